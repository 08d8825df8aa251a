"""Mamba-2's prefill on the tensor cores, with the state on chip.

A program walks one row of one head, 64 tokens at a time. Nothing but tokens and outputs goes through
memory; see `pallas_kernels.mosaic.ssd_chunk` for the arithmetic.

A few long rows are less than a GPU can hold. Then a walk ahead computes the states at the starts of a
row's segments, and nothing else, and the programs take a segment each. Both advance the state by the
same arithmetic in the same order, so that no bit depends on where a row is divided.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.columns import Columns, parts
from pallas_kernels.mosaic.blocks import read_block, splat, when_inside
from pallas_kernels.mosaic.call import call, scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import SsdConfig, ssd_config
from pallas_kernels.mosaic.gates import NO_LIMIT
from pallas_kernels.mosaic.ssd_ahead import WEIGHERS, ahead_kernel
from pallas_kernels.mosaic.ssd_chunk import (
    BY_COLUMN,
    BY_ROW,
    LAYOUT,
    TILED,
    P,
    Points,
    Q,
    W,
    across,
    advance,
    causal,
    chunk_decays,
    chunk_steps,
    columns,
    down,
    find_tile,
    keep_rows,
    operand_and_copy,
    put_rows,
    result,
    tile_memory,
    weigh,
)
from pallas_kernels.mosaic.ssd_points import points_kernel
from pallas_kernels.rows import Rows

WRITERS = 2  # warpgroups that compute outputs
SLOTS = 2 * WRITERS  # chunks of tokens in shared memory


def walk_kernel(
    rows: int, per_group: int, firsts, dtype, interpreted: bool, split: SsdConfig
) -> Callable:
    """One program per segment of a row and 64 rows of a head's state, with three warpgroups.

    Two compute outputs, of every second chunk each, and all that does not need the state. The third
    carries the state from chunk to chunk. A barrier has a phase for each of its chunks, and whoever
    waits for one does so before the next can end.
    """
    memory = tile_memory(dtype, interpreted)
    segments = split.segments

    def ssd_kernel(refs, pool, y):
        tokens, (width, size) = y.shape[0], pool.shape[3:]
        tiles, parts = size // W, width // P

        def body(xs, Bs, Cs, dts, weighted, carried, totals, logs, owns, lines, square, *barriers):
            loaded, weighed, taken, ready, used, end = barriers
            (xs, x_copy), (Bs, B_copy), (Cs, C_copy) = (
                operand_and_copy(ref, interpreted) for ref in (xs, Bs, Cs)
            )
            tile, segment, read, write = find_tile(refs, rows, tokens, parts, segments)
            # The chunks of this program; there are none in a segment past the row's end.
            if segments == 1:
                first, last = jnp.int32(0), tile.chunks
            else:
                first = segment * split.chunks
                last = jnp.minimum(first + split.chunks, tile.chunks)
                last = jnp.where(lax.axis_index("row") < rows * segments, last, tile.chunks)
            layer, group = refs["layer"][0], lax.div(tile.head, per_group)
            lanes = pl.ds(tile.part * P, P)

            def fetch(chunk):
                slot, span = lax.rem(chunk, SLOTS), pl.ds(tile.start + chunk * Q, Q)
                barrier = loaded.at[slot]
                for name, copy in (("B", B_copy), ("C", C_copy)):
                    for k in range(tiles):
                        source = refs[name].at[span, columns(k, firsts[name] + group * size)]
                        plgpu.copy_gmem_to_smem(source, copy.at[slot, k], barrier)
                source = refs["x"].at[span, tile.lanes(firsts["x"], width)]
                plgpu.copy_gmem_to_smem(source, x_copy.at[slot], barrier)
                source = refs["dt"].at[tile.place(chunk), tile.head]
                plgpu.copy_gmem_to_smem(source, dts.at[slot], barrier)

            def keep_own(slot, chunk):
                valid = tile.valid(chunk)

                @pl.when(valid < Q)
                def _():
                    keep_rows(xs.at[slot], valid)
                    for k in range(tiles):
                        keep_rows(Bs.at[slot, k], valid)
                    plgpu.commit_smem()

            def weigh_chunk(slot, side, A):
                decays = chunk_decays(dts.at[slot], A)
                store(totals.at[side], decays.total)
                store(logs.at[slot], decays.log)
                store(owns.at[slot], decays.own)
                weigh(xs.at[slot], decays.weight, weighted.at[side])
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed.at[side])

            def walk_state():
                points = Points(refs, tile.row, tile.length, pool)

                def put(block, state):
                    for k, h in enumerate(state):
                        store(
                            pool.at[layer, block, tile.head, lanes, columns(k)],
                            h.astype(pool.dtype),
                        )

                def get(k):
                    return load(pool.at[layer, read, tile.head, lanes, columns(k)], LAYOUT)

                def step(chunk, carry):
                    state, point = carry
                    slot, side = lax.rem(chunk, SLOTS), lax.rem(chunk, WRITERS)
                    pl.when(chunk == point)(
                        lambda: points.store(chunk, lambda block: put(block, state))
                    )
                    point = lax.cond(
                        chunk == point, lambda: points.after(chunk), lambda: jnp.int32(point)
                    )
                    pl.when(chunk >= first + WRITERS)(lambda: plgpu.barrier_wait(used.at[side]))
                    for k, h in enumerate(state):
                        carried[side, k] = h.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready.at[side])
                    plgpu.barrier_wait(weighed.at[side])
                    total = load(totals.at[side], BY_ROW)
                    Bk = [Bs.at[slot, k] for k in range(tiles)]
                    state = advance(state, total, weighted.at[side], Bk)
                    plgpu.barrier_arrive(taken.at[side])
                    return state, point

                def start():
                    return tuple(
                        read_block(pool, read, lambda k=k: get(k), (P, W), LAYOUT)
                        for k in range(tiles)
                    )

                def middle():
                    place = tile.row * segments + segment
                    block = refs["starts"].at[place, tile.head, lanes]
                    return tuple(load(block.at[:, columns(k)], LAYOUT) for k in range(tiles))

                # The block that a row starts from may be the one that its last segment, which runs beside this one,
                # writes; so only a row's only segment reads it here.
                alone = tile.chunks <= split.chunks
                state = start() if segments == 1 else lax.cond(alone, start, middle)
                state, _ = lax.fori_loop(first, last, step, (state, points.after(first - 1)))

                @pl.when(last == tile.chunks)
                def _():
                    points.store(tile.chunks, lambda block: put(block, state))
                    when_inside(pool, write)(lambda: put(write, state))

                for n in range(WRITERS, 0, -1) if interpreted else ():  # it wants all seen

                    @pl.when(last - first >= n)
                    def _(n=n):
                        plgpu.barrier_wait(used.at[lax.rem(last - n, WRITERS)])

            def walk_outputs(side):
                A = refs["A"][tile.head]
                skip = None if refs["skip"] is None else refs["skip"][tile.head]
                pl.when(first + side < last)(lambda: fetch(first + side))

                @pl.loop(first + side, last, step=WRITERS)
                def _(chunk):
                    slot = lax.rem(chunk, SLOTS)
                    x, B, C = xs.at[slot], Bs.at[slot], Cs.at[slot]
                    plgpu.barrier_wait(loaded.at[slot])
                    keep_own(slot, chunk)

                    def score(scores):
                        for k in range(tiles):
                            plgpu.wgmma(scores, C.at[k], B.at[k].transpose((1, 0)))

                        @pl.when(chunk + WRITERS < last)
                        def _():
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            fetch(chunk + WRITERS)

                        weigh_chunk(slot, side, A)
                        log = across(load(logs.at[slot], BY_ROW), (Q, Q))
                        decay = jnp.exp2(log - down(load(owns.at[slot], BY_COLUMN), (Q, Q)))
                        # A select, since scores of tokens that are not the row's may be NaN.
                        zero = splat(0.0, (Q, Q), LAYOUT)
                        return jnp.where(causal(), result(scores) * decay, zero).astype(dtype)

                    decayed = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((Q, Q), jnp.float32))
                    if interpreted:  # it has no products with an operand in registers
                        square[side] = decayed
                        decayed = square.at[side]

                    def multiply(own, from_start):
                        plgpu.wgmma(own, decayed, x)
                        plgpu.barrier_wait(ready.at[side])
                        for k in range(tiles):
                            state = carried.at[side, k].transpose((1, 0))
                            plgpu.wgmma(from_start, C.at[k], state)
                        start = across(jnp.exp2(load(logs.at[slot], BY_ROW)), (Q, P))
                        out = result(own, tiles)
                        if skip is not None:
                            out = out + plgpu.load(x, layout=LAYOUT).astype(jnp.float32) * skip
                        return out + result(from_start) * start

                    acc = plgpu.WGMMAAccumulatorRef((Q, P), jnp.float32)
                    out = pl.run_scoped(multiply, acc, acc)
                    plgpu.barrier_wait(taken.at[side])
                    plgpu.barrier_arrive(used.at[side])
                    plgpu.commit_smem()  # all have read the inputs, whose place is free now
                    staging = (x, x_copy.at[slot]), lines
                    put_rows(tile, chunk, out.astype(y.dtype), staging, y, width)

            def clear_outputs():
                zero = splat(0.0, (Q, P), LAYOUT, y.dtype)

                @pl.loop(first, last)
                def _(chunk):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.commit_smem()
                    put_rows(tile, chunk, zero, ((xs.at[0], x_copy.at[0]), lines), y, width)

            warpgroup = lax.axis_index("thread")
            alive = (write != 0) & (first < last)
            pl.when(alive & (warpgroup == WRITERS))(walk_state)
            for side in range(WRITERS):
                pl.when(alive & (warpgroup == side))(lambda side=side: walk_outputs(side))
            pl.when((write == 0) & (warpgroup == 0))(clear_outputs)
            plgpu.wait_smem_to_gmem(0)
            # A warpgroup must not leave while another still multiplies.
            plgpu.barrier_arrive(end)
            plgpu.barrier_wait(end)

        vectors = plgpu.SMEM((SLOTS, Q), jnp.float32)
        pl.run_scoped(
            body,
            memory(SLOTS, Q, P),
            memory(SLOTS, tiles, Q, W),
            memory(SLOTS, tiles, Q, W),
            vectors,
            plgpu.SMEM((WRITERS, Q, P), dtype, transforms=TILED),
            plgpu.SMEM((WRITERS, tiles, P, W), dtype, transforms=TILED),
            plgpu.SMEM((WRITERS, Q), jnp.float32),
            vectors,
            vectors,
            plgpu.SMEM((Q, P), dtype),
            plgpu.SMEM((WRITERS, Q, Q), dtype) if interpreted else None,
            plgpu.Barrier(num_arrivals=2 + 2 * tiles, num_barriers=SLOTS),
            *[plgpu.Barrier(num_barriers=WRITERS)] * 4,
            plgpu.Barrier(num_arrivals=WRITERS + 1),
            collective_axes="thread",
        )

    return ssd_kernel


def ssd(
    x: Float[Array, "T H P"] | Columns,
    dt: Float[Array, "T H"],
    A: Float[Array, "H"],
    B: Float[Array, "T G N"] | Columns,
    C: Float[Array, "T G N"] | Columns,
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
    chunk: int = Q,
    config: SsdConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T H P"], Float[Array, "layers blocks H P N"]]:
    """`pallas_kernels.ssd`; its chunks are of 64 tokens whatever multiple of it `chunk` is."""
    tokens, heads, width = x.shape
    count, groups = rows.read_ids.shape[0], B.shape[1]
    rows = Rows(*(ids.astype(jnp.int32) for ids in rows))
    # Copies clip what lies past an array's end, but interpretation raises, and no array is smaller
    # than what is copied at once.
    padding = Q if interpret else max(0, Q - tokens)
    arrays, firsts = {}, {}
    for name, value in {"x": x, "B": B, "C": C}.items():
        array, firsts[name] = parts(value)
        arrays[name] = jnp.pad(array.reshape((tokens, -1)), ((0, padding), (0, 0)))
    operands: dict[str, Any] = {
        "layer": scalar_operand(layer),
        **rows._asdict(),
        **arrays,
        "dt": chunk_steps(dt, dt_bias, dt_limit, rows),
        "A": A.astype(jnp.float32),
        "skip": None if skip is None else skip.astype(jnp.float32),
    }
    points = rows.checkpoint_ids.shape[1]
    if not points:
        operands |= {"checkpoint_ids": None, "checkpoint_positions": None}
    per_group, places = heads // groups, heads * (width // P)
    config = config or ssd_config(count, places, tokens)
    assert config.segments == 1 or config.segments * config.chunks * Q >= tokens, config
    common = count, per_group, firsts, x.dtype, bool(interpret), config
    if config.segments > 1:
        names = ("layer", "offsets", "read_ids", "write_ids", "x", "dt", "A", "B")
        starts, states = call(
            ahead_kernel(*common),
            {name: operands[name] for name in names},
            states,
            jax.ShapeDtypeStruct((count * config.segments, *states.shape[2:]), jnp.float32),
            grid={"row": count, "head": places},
            threads=WEIGHERS + states.shape[-1] // W,
            interpret=interpret,
        )
        operands["starts"] = starts
    y, states = call(
        walk_kernel(*common),
        operands,
        states,
        # Flat, so that XLA finds one reduction over all channels in the norm that follows.
        jax.ShapeDtypeStruct((tokens + padding, heads * width), x.dtype),
        grid={"row": count * config.segments + 2, "head": places},
        threads=WRITERS + 1,
        interpret=interpret,
    )
    if points:
        names = ("layer", "offsets", "write_ids", "checkpoint_ids", "checkpoint_positions")
        operands = {name: operands[name] for name in (*names, "x", "dt", "A", "B")}
        kernel = points_kernel(count, points, per_group, firsts, x.dtype, bool(interpret))
        grid = {"point": count * points, "head": places}
        _, states = call(kernel, operands, states, None, grid=grid, threads=1, interpret=interpret)
    return y[:tokens].reshape(x.shape), states
