"""Products of few rows with a matrix, and norms of rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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
    y = lax.dot_general(x, weight, contracted, precision=exact, preferred_element_type=dtype)
    return y if residual is None else residual + y.astype(residual.dtype)


def rms_norm(
    x: Float[Array, "R D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "R D"]:
    """`pallas_kernels.rms_norm`."""
    x = x.astype(jnp.float32)
    normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(weight.dtype)
