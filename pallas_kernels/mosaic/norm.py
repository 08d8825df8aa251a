"""Root mean square norm of rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import largest_divisor


def rms_norm(
    x: Float[Array, "R D"], weight: Float[Array, "D"], *, eps: float, interpret: Any = None
) -> Float[Array, "R D"]:
    """`pallas_kernels.rms_norm`, one program per row."""
    rows, size = x.shape
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=largest_divisor(size // 128, (4, 2, 1)))

    def rms_norm_kernel(x, weight, y):
        row = lax.axis_index("row")
        scale = load(weight, layout).astype(jnp.float32)
        value = load(x.at[row], layout).astype(jnp.float32)
        mean = jnp.sum(value * value) * (1.0 / size)
        store(y.at[row], (value * lax.rsqrt(mean + eps) * scale).astype(y.dtype))

    return plgpu.kernel(
        rms_norm_kernel,
        out_type=jax.ShapeDtypeStruct((rows, size), weight.dtype),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )(x, weight)
