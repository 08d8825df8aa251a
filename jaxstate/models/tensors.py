"""What a model says about each tensor it needs: the name and shape in the file, and how it is kept.

A model is first built with `Tensor`s where its arrays will be: a blueprint. Loading, saving and random initialisation
are then each one `jax.tree.map` over that blueprint, and the list of tensors a checkpoint must hold is its leaves.

Files keep a matrix as `[out, in]` and a depthwise convolution as `[channels, 1, taps]`. The model keeps `[in, out]` and
`[taps, channels]`: on a CPU `x @ W` reads that 1.1 to 5 times faster than `x @ W.T` reads the other.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.typing import Array

Init = Callable[[Array, tuple[int, ...]], Array]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model.

    Args:
      name: its name in a published checkpoint.
      shape: its shape in the file.
      init: from a key and the file's shape to float32 random values.
      layout: `same`, `matrix` (kept transposed) or `conv` (`[channels, 1, taps]` kept as `[taps, channels]`).
      float32: kept in float32 whatever the dtype of the model.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    layout: Literal["same", "matrix", "conv"] = "same"
    float32: bool = False

    def dtype(self, model_dtype: Any) -> Any:
        """The dtype it is kept in."""
        return jnp.dtype(jnp.float32 if self.float32 else model_dtype)

    def kept(self, value: Array, model_dtype: Any) -> Array:
        """The file's value as the model keeps it."""
        return _keep(value, self.layout, self.dtype(model_dtype))

    def filed(self, value: Array) -> np.ndarray:
        """The model's value as the file has it."""
        array = np.asarray(value)
        if self.layout == "matrix":
            array = array.T
        elif self.layout == "conv":
            array = array.T[:, None, :]
        return np.ascontiguousarray(array)

    def random(self, seed: int, model_dtype: Any) -> Array:
        """Random values that depend on the seed and the name alone, made where they will stay."""
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(self.name.encode()))
        return _random(key, self.init, self.shape, self.layout, self.dtype(model_dtype))


@partial(jax.jit, static_argnames=("layout", "dtype"))
def _keep(value, layout, dtype):
    if layout == "conv":
        value = value[:, 0, :]
    return (value if layout == "same" else value.T).astype(dtype)


@partial(jax.jit, static_argnames=("init", "shape", "layout", "dtype"))
def _random(key, init, shape, layout, dtype):
    return _keep(init(key, shape), layout, dtype)


def ones(key: Array, shape: tuple[int, ...]) -> Array:
    """All one."""
    return jnp.ones(shape, jnp.float32)


def zeros(key: Array, shape: tuple[int, ...]) -> Array:
    """All zero."""
    return jnp.zeros(shape, jnp.float32)


def embedding(key: Array, shape: tuple[int, ...]) -> Array:
    """Normal values of deviation 0.02."""
    return 0.02 * jax.random.normal(key, shape)


def fan_in(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform within one over the root of the inputs that each output sums."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def log_arange(key: Array, shape: tuple[int, ...]) -> Array:
    """The logarithms of 1 to N in each row: the decays of S4D-real (Gu et al. 2022, arXiv:2206.11893)."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32)), shape)


def log_uniform_decay(key: Array, shape: tuple[int, ...]) -> Array:
    """The logarithms of uniform values between 1 and 16 (Dao & Gu 2024, arXiv:2405.21060)."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))


def inverse_softplus_step(key: Array, shape: tuple[int, ...]) -> Array:
    """Biases whose softplus is log-uniform between 0.001 and 0.1 (Gu & Dao 2023, arXiv:2312.00752)."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
