"""Products of few rows with a matrix, one convolved, and norms of rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.xla.conv import conv_step


def rows_matmul(
    x: Float[Array, "R I"],
    weight: Float[Array, "O I"],
    residual: Float[Array, "R O"] | None = None,
    *,
    dtype: Any,
) -> Float[Array, "R O"]:
    """`pallas_kernels.rows_matmul`."""
    # Float32 operands are not rounded, as a GPU would by default.
    exact = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = ((1,), (1,)), ((), ())
    # Some backends round to the operands' dtype before any other.
    summed = dtype if dtype == x.dtype else jnp.float32
    y = lax.dot_general(x, weight, contracted, precision=exact, preferred_element_type=summed)
    y = y.astype(dtype)
    return y if residual is None else residual + y.astype(residual.dtype)


def projected_conv_step(
    x: Float[Array, "R I"],
    weight: Float[Array, "O I"],
    conv_weight: Float[Array, "K D"],
    conv_bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    norm_weight: Float[Array, "I"] | None = None,
    *,
    first: int,
    eps: float = 0.0,
    activation: str | None = None,
) -> tuple[Float[Array, "R O"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.projected_conv_step`: one after the other."""
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps=eps)
    y, last = rows_matmul(x, weight, dtype=x.dtype), first + conv_weight.shape[1]
    convolved, windows = conv_step(
        y[:, first:last], conv_weight, conv_bias, windows, layer, read_ids, write_ids,
        activation=activation,
    )  # fmt: skip
    return jnp.concatenate([y[:, :first], convolved, y[:, last:]], axis=1), windows


def rms_norm(
    x: Float[Array, "R D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "R D"]:
    """`pallas_kernels.rms_norm`."""
    x = x.astype(jnp.float32)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(weight.dtype)
