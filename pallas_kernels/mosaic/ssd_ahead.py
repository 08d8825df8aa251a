"""States of Mamba-2's prefill at the starts of a row's segments."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.blocks import read_block
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import SsdConfig
from pallas_kernels.mosaic.ssd_chunk import (
    BY_ROW,
    LAYOUT,
    P,
    Q,
    W,
    advance,
    chunk_decays,
    columns,
    find_tile,
    operand_and_copy,
    tile_memory,
    weigh,
)

WEIGHERS = 3  # warpgroups that compute decays and weigh the inputs, of every third chunk each
SLOTS = 3 * WEIGHERS  # chunks of tokens in shared memory, which a weigher has to itself
AHEAD = 2 * WEIGHERS  # chunks under way from memory


def ahead_kernel(
    rows: int, per_group: int, firsts, dtype, interpreted: bool, split: SsdConfig
) -> Callable:
    """One program per row and 64 rows of a head's state, with a warpgroup for every 64 columns.

    It leaves the states at the starts of the row's segments, if there are several; that of the first too, since the
    block that it comes from may be written before the first segment is walked.
    """
    memory = tile_memory(dtype, interpreted)

    def ssd_ahead_kernel(refs, pool, starts):
        tokens, (width, size) = refs["x"].shape[0], pool.shape[3:]
        tiles = size // W

        def body(xs, Bs, dts, totals, loaded, weighed, taken, end):
            (xs, x_copy), (Bs, B_copy) = (operand_and_copy(ref, interpreted) for ref in (xs, Bs))
            tile, _, read, write = find_tile(refs, rows, tokens, width // P, 1)
            last = lax.div(tile.chunks - 1, split.chunks) * split.chunks
            layer, group = refs["layer"][0], lax.div(tile.head, per_group)
            lanes = pl.ds(tile.part * P, P)

            def fetch(chunk):
                slot, span = lax.rem(chunk, SLOTS), pl.ds(tile.start + chunk * Q, Q)
                barrier = loaded.at[slot]
                for k in range(tiles):
                    source = refs["B"].at[span, columns(k, firsts["B"] + group * size)]
                    plgpu.copy_gmem_to_smem(source, B_copy.at[slot, k], barrier)
                source = refs["x"].at[span, tile.lanes(firsts["x"], width)]
                plgpu.copy_gmem_to_smem(source, x_copy.at[slot], barrier)
                source = refs["dt"].at[tile.place(chunk), tile.head]
                plgpu.copy_gmem_to_smem(source, dts.at[slot], barrier)

            def weigh_chunks(first):
                A = refs["A"][tile.head]
                for n in range(first, AHEAD, WEIGHERS):
                    pl.when(n < last)(lambda n=n: fetch(jnp.int32(n)))

                def wait_taken(chunk):
                    plgpu.barrier_wait(taken.at[lax.rem(chunk, SLOTS)])

                # All of these chunks are full: the row goes on after them.
                @pl.loop(first, last, step=WEIGHERS)
                def _(chunk):
                    slot = lax.rem(chunk, SLOTS)
                    plgpu.barrier_wait(loaded.at[slot])
                    decays = chunk_decays(dts.at[slot], A)
                    store(totals.at[slot], decays.total)
                    weigh(xs.at[slot], decays.weight, xs.at[slot])
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(weighed.at[slot])
                    pl.when(chunk >= WEIGHERS)(lambda: wait_taken(chunk - WEIGHERS))
                    pl.when(chunk + AHEAD < last)(lambda: fetch(chunk + AHEAD))

                own = last - 1 - lax.rem(last - 1 - first, WEIGHERS)
                pl.when(first < last)(lambda: wait_taken(own))

            def carry_state(k):
                def get():
                    return load(pool.at[layer, read, tile.head, lanes, columns(k)], LAYOUT)

                def put(segment, h):
                    place = tile.row * split.segments + segment
                    store(starts.at[place, tile.head, lanes, columns(k)], h)

                def step(chunk, h):
                    slot = lax.rem(chunk, SLOTS)
                    plgpu.barrier_wait(weighed.at[slot])
                    total = load(totals.at[slot], BY_ROW)
                    (h,) = advance((h,), total, xs.at[slot], [Bs.at[slot, k]])
                    plgpu.barrier_arrive(taken.at[slot])
                    segment = lax.div(chunk + 1, split.chunks)
                    pl.when(segment * split.chunks == chunk + 1)(lambda: put(segment, h))
                    return h

                first = read_block(pool, read, get, (P, W), LAYOUT)
                put(0, first)
                lax.fori_loop(0, last, step, first)

            warpgroup = lax.axis_index("thread")
            alive = (write != 0) & (last > 0)
            for n in range(WEIGHERS):
                pl.when(alive & (warpgroup == n))(lambda n=n: weigh_chunks(n))
            for k in range(tiles):
                pl.when(alive & (warpgroup == WEIGHERS + k))(lambda k=k: carry_state(k))
            # A warpgroup must not leave while another still multiplies.
            plgpu.barrier_arrive(end)
            plgpu.barrier_wait(end)

        vectors = plgpu.SMEM((SLOTS, Q), jnp.float32)
        pl.run_scoped(
            body,
            memory(SLOTS, Q, P),
            memory(SLOTS, tiles, Q, W),
            vectors,
            vectors,
            plgpu.Barrier(num_arrivals=2 + tiles, num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=WEIGHERS + tiles),
            collective_axes="thread",
        )

    return ssd_ahead_kernel
