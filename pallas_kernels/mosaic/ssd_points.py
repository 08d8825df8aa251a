"""Checkpoints of Mamba-2's prefill that lie inside a chunk."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.ssd_chunk import (
    LAYOUT,
    TILED,
    P,
    Points,
    Q,
    W,
    advance,
    chunk_decays,
    columns,
    keep_rows,
    operand_and_copy,
    tile_memory,
    weigh,
)


def points_kernel(
    rows: int, points: int, per_group: int, firsts, dtype, interpreted: bool
) -> Callable:
    """One program per checkpoint inside a chunk and 64 rows of a head's state.

    The walk left the state at the start of the chunk in the checkpoint's block.
    """
    memory = tile_memory(dtype, interpreted)

    def ssd_points_kernel(refs, pool):
        width, size = pool.shape[3:]
        parts, tiles = width // P, size // W
        row, m = lax.div(lax.axis_index("point"), points), lax.rem(lax.axis_index("point"), points)
        head, part = lax.div(lax.axis_index("head"), parts), lax.rem(lax.axis_index("head"), parts)
        layer, start = refs["layer"][0], refs["offsets"][row]
        length = refs["offsets"][row + 1] - start
        block, position = Points(refs, row, length, pool).at(m)
        valid, lanes = lax.rem(position, Q), pl.ds(part * P, P)
        span = pl.ds(start + position - valid, Q)

        def body(x, B, dt, weighted, loaded):
            (x, x_copy), (B, B_copy) = (operand_and_copy(ref, interpreted) for ref in (x, B))
            lanes_of_head = pl.ds(firsts["x"] + head * width + part * P, P)
            plgpu.copy_gmem_to_smem(refs["x"].at[span, lanes_of_head], x_copy, loaded)
            for k in range(tiles):
                first = firsts["B"] + lax.div(head, per_group) * size
                source = refs["B"].at[span, columns(k, first)]
                plgpu.copy_gmem_to_smem(source, B_copy.at[k], loaded)
            place = lax.div(start, Q) + row + lax.div(position, Q)
            plgpu.copy_gmem_to_smem(refs["dt"].at[place, head], dt, loaded)
            places = [pool.at[layer, block, head, lanes, columns(k)] for k in range(tiles)]
            state = [load(place, LAYOUT).astype(jnp.float32) for place in places]
            plgpu.barrier_wait(loaded)
            keep_rows(x, valid)
            for k in range(tiles):
                keep_rows(B.at[k], valid)
            decays = chunk_decays(dt, refs["A"][head], valid)
            weigh(x, decays.weight, weighted)
            plgpu.commit_smem()
            Bk = [B.at[k] for k in range(tiles)]
            for place, h in zip(places, advance(state, decays.total, weighted, Bk), strict=True):
                store(place, h.astype(pool.dtype))

        @pl.when((refs["write_ids"][row] != 0) & (block > 0) & (valid > 0))
        def _():
            pl.run_scoped(
                body,
                memory(Q, P),
                memory(tiles, Q, W),
                plgpu.SMEM((Q,), jnp.float32),
                plgpu.SMEM((Q, P), dtype, transforms=TILED),
                plgpu.Barrier(num_arrivals=2 + tiles),
                collective_axes="thread",
            )

    return ssd_points_kernel
