"""What a model says about each tensor it needs: the name and shape in the file, and how it is kept.

A model is first built with `Tensor`s where its arrays will be: a blueprint. Loading, saving and random initialisation
are then each one `jax.tree.map` over that blueprint, and the list of tensors a checkpoint must hold is its leaves.

Matrices are kept as files have them, `[out, in]`, each output's weights side by side: a CPU reads that fastest when it
comes from memory. A depthwise convolution, `[channels, 1, taps]` in the file, is kept as `[taps, channels]`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.typing import Array, Device

Init = Callable[[Array, tuple[int, ...]], Array]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model.

    Args:
      name: its name in a published checkpoint.
      shape: its shape in the file.
      init: from a key and the file's shape to float32 random values.
      conv: `[channels, 1, taps]` in the file, kept as `[taps, channels]`.
      float32: kept in float32 whatever the dtype of the model.
      factor: enters products alone (see `layers.matmul`); kept in bfloat16 in a float32 model if the file has it so.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    conv: bool = False
    float32: bool = False
    factor: bool = False

    def dtype(self, model_dtype: Any) -> Any:
        """The dtype it is kept in."""
        return jnp.dtype(jnp.float32 if self.float32 else model_dtype)

    def kept_dtype(self, filed: Any, model_dtype: Any) -> Any:
        """The dtype in which it is kept when its file has another."""
        narrow = self.factor and filed == jnp.bfloat16 and model_dtype == jnp.float32
        return jnp.dtype(filed) if narrow else self.dtype(model_dtype)

    def kept(self, value: Array, model_dtype: Any) -> Array:
        """The file's value as the model keeps it."""
        return _keep(value, self.conv, self.kept_dtype(value.dtype, model_dtype))

    def unread(self, filed: Any, model_dtype: Any, read: Callable[..., np.ndarray]) -> Unread:
        """As `kept`, of what `read` will read from a file that has it in the dtype `filed`."""
        dtype = self.kept_dtype(jnp.dtype(filed), model_dtype)

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if self.conv:
                taps, channels = index
                value = read((channels, slice(None), taps))[:, 0, :].T
            else:
                value = read(index)
            with np.errstate(over="ignore"):  # to infinity, as on a device
                return value.astype(dtype)

        return Unread(self.kept_shape(), dtype, part)

    def kept_shape(self) -> tuple[int, ...]:
        """The shape as the model keeps it."""
        return (self.shape[2], self.shape[0]) if self.conv else self.shape

    def filed(self, value: Array) -> np.ndarray:
        """The model's value as the file has it."""
        array = np.asarray(value)
        if self.conv:
            array = array.T[:, None, :]
        return np.ascontiguousarray(array)

    def random(self, seed: int, model_dtype: Any) -> Array:
        """Random values that depend on the seed and the name alone, made where they will stay."""
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(self.name.encode()))
        return _random(key, self.init, self.shape, self.conv, self.dtype(model_dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Unread:
    """A tensor that nobody has read yet: `read` gives the part that slices, one an axis, cut out of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read((slice(None),) * len(self.shape)), dtype)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.read(index)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def devices(self) -> set[Device]:
        """Where it would go first."""
        return {jax.local_devices()[0]}


def read_whole(model: Any) -> Any:
    """The model with everything that was not read yet on the first device."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, Unread) else x, model)


@partial(jax.jit, static_argnames=("conv", "dtype"))
def _keep(value, conv, dtype):
    return (value[:, 0, :].T if conv else value).astype(dtype)


@partial(jax.jit, static_argnames=("init", "shape", "conv", "dtype"))
def _random(key, init, shape, conv, dtype):
    return _keep(init(key, shape), conv, dtype)


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
