"""One value in every element of whole blocks."""

import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.mosaic.blocks import splat, when_inside
from pallas_kernels.mosaic.compat import store
from pallas_kernels.mosaic.config import largest_divisor


def fill_blocks(
    pool: Shaped[Array, "layers blocks ..."],
    ids: Int[Array, "n"],
    value: Shaped[Array, ""],
    *,
    interpret: Any = None,
) -> Shaped[Array, "layers blocks ..."]:
    """`pallas_kernels.fill_blocks`, one program per id and layer; one of id 0 ends at once.

    Lists of ids are mostly padding, and XLA's scatter takes as long for that as for ids.
    """
    layers, blocks = pool.shape[:2]
    size = math.prod(pool.shape[2:])
    width = largest_divisor(
        size, (1024, 512, 256, 128) if pool.dtype.itemsize < 4 else (512, 256, 128)
    )
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def fill_blocks_kernel(ids, value, pool):
        layer, block = lax.axis_index("layer"), ids[lax.axis_index("id")]

        @when_inside(pool, block)
        def _():
            filled = splat(value[0], (width,), layout, pool.dtype)

            @pl.loop(0, size // width)
            def _(part):
                store(pool.at[layer, block, pl.ds(part * width, width)], filled)

    ref = jax.new_ref(pool.reshape((layers, blocks, size)))
    plgpu.kernel(
        fill_blocks_kernel,
        out_type=(),
        grid=(ids.shape[0], layers),
        grid_names=("id", "layer"),
        interpret=interpret,
    )(ids, value.astype(pool.dtype).reshape(1), ref)
    return jax.freeze(ref).reshape(pool.shape)
