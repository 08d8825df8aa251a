"""Root mean square norm of rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import largest_divisor

# Eight lines of 64 numbers at once: sixteen threads a line with four numbers each.
LINES = plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), (-5,), (-3, -2), -1)


def lines_of(size: int) -> tuple[int, ...]:
    """The shape in which a row is normed: lines, if a warpgroup can share them evenly."""
    return (size // 64, 64) if size % 512 == 0 else (size,)


def normed(value, scale, eps: float, size: int):
    """A row in float32 over its root mean square, times `scale`."""
    squares = value * value
    squares = jnp.sum(squares, axis=0) if squares.ndim == 2 else squares
    mean = jnp.sum(squares) * (1.0 / size)
    return value * lax.rsqrt(mean + eps) * scale


def rms_norm(
    x: Float[Array, "R D"], weight: Float[Array, "D"], *, eps: float, interpret: Any = None
) -> Float[Array, "R D"]:
    """`pallas_kernels.rms_norm`, one program per row."""
    (rows, size), shape = x.shape, lines_of(x.shape[1])
    layout = LINES
    if len(shape) == 1:
        vector = largest_divisor(size // 128, (4, 2, 1))
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)

    def rms_norm_kernel(x, weight, y):
        row = lax.axis_index("row")
        scale = load(weight, layout).astype(jnp.float32)
        value = load(x.at[row], layout).astype(jnp.float32)
        store(y.at[row], normed(value, scale, eps, size).astype(y.dtype))

    y = plgpu.kernel(
        rms_norm_kernel,
        out_type=jax.ShapeDtypeStruct((rows, *shape), weight.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(x.reshape((rows, *shape)), weight.reshape(shape))
    return y.reshape(x.shape)
