"""Mamba's selective scan of packed rows.

A program walks one row in one block of channels with the states in registers, one token after the
other, so that no bit depends on where a row is cut. One or two warpgroups do nothing but the
recurrence, each in channels of its own. A further one prepares the tokens ahead of them (step size,
conversions) and finishes those behind them (sum over the groups of states, skip, gate), tile by
tile through shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.columns import Columns, parts
from pallas_kernels.mosaic.blocks import inside, splat, when_inside
from pallas_kernels.mosaic.call import call, scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import ScanConfig, scan_config
from pallas_kernels.mosaic.gates import silu, step_size
from pallas_kernels.rows import Rows, writes

LOG2_E = 1.4426950408889634
GROUPS = 4  # of a channel's states, each in a thread's registers or next to each other in a warp
STRETCH = 16  # tokens of a tile without a loop: larger code is slower, smaller has more of the loop
NEVER = 2**30  # a checkpoint position that no row reaches


def token_layout(width: int):
    """Layout of `[tokens, width]` outside the scan: eight threads hold up to 32 channels of a token."""
    vector = min(4, width // 8)
    tiles = (16, 8 * vector), (4, 8 * vector), (vector,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3, -2), -1)


def state_layout(size: int, width: int):
    """Layout of `[GROUPS, size / GROUPS, width]`: a warp holds a group, with 32 channels in its lanes.

    Where there are fewer channels, several lanes share out the states of a group.
    """
    lanes = max(1, 32 // width)
    states = min(4, size // GROUPS // lanes)
    tile = GROUPS, lanes * states, min(width, 32)
    if states == 1:
        return plgpu.Layout.TILED(plgpu.Tiling((tile, (1,))), (-4,), (-3, -2), -1)
    tiles = plgpu.Tiling((tile, (states, 1)))
    return plgpu.Layout.TILED(tiles, (-5,), (-4, -3) if lanes > 1 else (-3,), -2)


def sorted_checkpoints(rows: Rows) -> tuple[Int[Array, "R M+1"], Int[Array, "R M+1"]]:
    """Positions and ids of each row's checkpoints in order, with one at the end that never comes."""
    ids = writes(rows)[1]
    positions = jnp.where(ids == 0, NEVER, rows.checkpoint_positions)
    positions, ids = lax.sort((positions, ids), num_keys=1)
    return jnp.pad(positions, ((0, 0), (0, 1)), constant_values=NEVER), jnp.pad(
        ids, ((0, 0), (0, 1))
    )


def selective_scan(
    x: Float[Array, "T D"],
    dt: Float[Array, "T D"],
    A: Float[Array, "D N"],
    B: Float[Array, "T N"] | Columns,
    C: Float[Array, "T N"] | Columns,
    skip: Float[Array, "D"] | None,
    z: Float[Array, "T D"] | Columns | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    config: ScanConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_scan`, one program per row and channel block."""
    tokens, channels = x.shape
    size, count = A.shape[1], rows.read_ids.shape[0]
    checkpoints = rows.checkpoint_ids.shape[1]
    config = config or scan_config(count, channels, size, checkpoints)
    widths, tile, unroll = config.widths, config.tokens, config.unroll
    (B, first_B), (C, first_C), (z, first_z) = (parts(operand) for operand in (B, C, z))
    per_group = size // GROUPS
    all_parts = range(len(widths))
    firsts = [sum(widths[:n]) for n in all_parts]

    def kernel(refs, states, y, shared):
        row = lax.axis_index("row")
        origin = lax.axis_index("channels") * config.channels
        lanes = [pl.ds(origin + first, width) for first, width in zip(firsts, widths, strict=True)]
        start, stop = refs["offsets"][row], refs["offsets"][row + 1]
        layer, read, write = refs["layer"][0], refs["read_ids"][row], refs["write_ids"][row]
        length = stop - start
        is_live = (write != 0) & (length > 0)
        tiles = lax.select(is_live, lax.div(length + (tile - 1), tile), 0)

        def begin_of(i):
            """Position in the row of the first token of tile i, earlier where the buffer ends."""
            return jnp.minimum(start + i * tile, tokens - tile) - start

        # The recurrence ------------------------------------------------------------------------

        def walk(part):
            width, lane = widths[part], lanes[part]
            shape, layout = (GROUPS, per_group, width), state_layout(size, width)
            by_group, by_state, by_channel = (layout.reduce(axes) for axes in (1, 2, (0, 1)))
            steps, inputs, sums = (shared[name][part] for name in ("step", "input", "y"))

            def spread(value, axes):
                return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, axes), layout)

            def group_rows(block, k):
                """State k of each group: rows k, k + per_group, ... of a block's channels."""
                if interpret:  # which cannot reshape a ref
                    return block.at[pl.ds(k, GROUPS, per_group)]
                return block.reshape(GROUPS, per_group, width).at[:, k]

            def is_nth(k):
                # Mosaic's iota counts along the last axis only, whatever a layout's vectors run along.
                return spread(load(refs["nth"], by_state), (0, 1)) == k

            def load_states(block):
                """A block's channels as an array of the states' layout."""
                value = splat(0.0, shape, layout)
                for k in range(per_group):
                    rows = load(group_rows(block, k), by_group).astype(jnp.float32)
                    value = jnp.where(is_nth(k), spread(rows, (0, 2)), value)
                return value

            def store_states(block, value):
                @when_inside(states, block)
                def _():
                    for k in range(per_group):
                        # Minus zero, which changes no bit of what it is added to.
                        rows = jnp.sum(jnp.where(is_nth(k), value, -0.0), axis=1)
                        rows = plgpu.layout_cast(rows, by_group).astype(states.dtype)
                        store(group_rows(states.at[layer, block, :, lane], k), rows)

            def read_token(slot, token):
                step, dtx = (load(ref.at[slot, token], by_channel) for ref in (steps, inputs))
                B, C = (load(shared[name].at[slot, token], by_state) for name in "BC")
                return step, dtx, B, C

            A = load_states(refs["A"].at[:, lane])

            def advance(h, step, dtx, B):
                """The states after one token."""
                decay = jnp.exp2(spread(step, (2,)) * A)
                return decay * h + spread(dtx, (2,)) * spread(B, (0, 1))

            def stored():
                return load_states(states.at[layer, jnp.maximum(read, 0), :, lane])

            def absent():
                return splat(jnp.where(read == 0, 0.0, jnp.nan), shape, layout)

            usable = inside(states, read) & is_live
            h = lax.cond(usable, stored, absent)

            def checkpoint(i, h, before, point):
                """Stores the states asked for within tile i."""
                begin, slot = begin_of(i), lax.rem(i, 2)
                end = jnp.minimum(begin + tile, length)

                def pending(point):
                    return refs["positions"][row, point] <= end

                def leave(point):
                    position = refs["positions"][row, point]

                    def again():
                        def step(token, h):
                            step, dtx, B, _ = read_token(slot, token)
                            kept = begin + token < position
                            step, dtx = (jnp.where(kept, v, 0.0) for v in (step, dtx))
                            return advance(h, step, dtx, B)

                        return lax.fori_loop(0, tile, step, before)

                    value = lax.cond(position == end, lambda: h, again)
                    store_states(refs["points"][row, point], value)
                    return point + 1

                return lax.while_loop(pending, leave, point)

            def stretch(slot, first, h):
                """The states after the next `STRETCH` tokens of a tile."""
                # A load waits for every store before it: read a piece before the last one is stored.
                pieces = [range(n, n + unroll) for n in range(0, STRETCH, unroll)]
                following = [read_token(slot, first + n) for n in pieces[0]]
                for piece, ahead in zip(pieces, [*pieces[1:], ()], strict=True):
                    tokens, following = following, [read_token(slot, first + n) for n in ahead]
                    for n, (step, dtx, B, C) in zip(piece, tokens, strict=True):
                        h = advance(h, step, dtx, B)
                        partial = jnp.sum(h * spread(C, (0, 1)), axis=1)
                        store(sums.at[slot, first + n], plgpu.layout_cast(partial, by_group))
                return h

            def one_tile(i, carry):
                h, point = carry
                slot, before = lax.rem(i, 2), h
                plgpu.barrier_wait(shared["ready"].at[slot])
                h = lax.fori_loop(0, tile // STRETCH, lambda n, h: stretch(slot, n * STRETCH, h), h)
                if checkpoints:
                    point = checkpoint(i, h, before, point)
                plgpu.barrier_arrive(shared["done"].at[slot])
                return h, point

            h, _ = lax.fori_loop(0, tiles, one_tile, (h, jnp.int32(0)))
            store_states(lax.select(is_live, write, 0), h)

        # The tokens ----------------------------------------------------------------------------

        layouts = [token_layout(width) for width in widths]

        def emit(values, at, skipped, count):
            """Stores `count` tokens of a tile of outputs that begins at `at`, after those skipped."""

            @pl.when(count == tile)
            def _():
                for lane, value in zip(lanes, values, strict=True):
                    store(y.at[pl.ds(at, tile), lane], value)

            @pl.when((count > 0) & (count < tile))
            def _():
                for tail, value in zip(shared["tail"], values, strict=True):
                    store(tail, value)
                plgpu.commit_smem()

                @pl.loop(skipped, skipped + count)
                def _(n):
                    for lane, tail in zip(lanes, shared["tail"], strict=True):
                        line = y.at[pl.ds(at + n, 1), lane]
                        plgpu.copy_smem_to_gmem(tail.at[pl.ds(n, 1)], line)

                plgpu.wait_smem_to_gmem(0)

        def zeros(begin, end):
            nothing = [
                splat(0.0, (tile, width), layout, y.dtype)
                for width, layout in zip(widths, layouts, strict=True)
            ]

            @pl.loop(0, lax.div(end - begin + (tile - 1), tile))
            def _(i):
                at = begin + i * tile
                emit(nothing, at, 0, jnp.minimum(end - at, tile))

        def per_channel(name, part):
            if refs[name] is None:
                return None
            value = load(refs[name].at[lanes[part]], layouts[part].reduce(0)).astype(jnp.float32)
            value = lax.broadcast_in_dim(value, (tile, widths[part]), (1,))
            return plgpu.layout_cast(value, layouts[part])

        def feed():
            weights = [
                [per_channel(name, part) for name in ("skip", "dt_bias")] for part in all_parts
            ]
            narrow = plgpu.Layout.WG_STRIDED((tile, size), vec_size=2)

            def nth(width, layout):
                return plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=layout)

            nths = [nth(width, layout) for width, layout in zip(widths, layouts, strict=True)]
            narrow_nth = nth(size, narrow)

            wide_columns = [("x", 0), ("dt", 0), *([] if refs["z"] is None else [("z", first_z)])]

            def fetch(i):
                """The inputs of tile i; nothing waits for them yet."""
                span = pl.ds(start + begin_of(i), tile)

                def fetch_wide(part, name, column):
                    at = pl.ds(column + origin + firsts[part], widths[part])
                    return load(refs[name].at[span, at], layouts[part])

                wide = [[fetch_wide(part, *c) for c in wide_columns] for part in all_parts]
                both = (("B", first_B), ("C", first_C))
                return wide, [
                    load(refs[name].at[span, pl.ds(at, size)], narrow) for name, at in both
                ]

            def prepare(i, wide, both):
                slot, skipped = lax.rem(i, 2), i * tile - begin_of(i)
                left = length - begin_of(i)

                def masked(value, nth):
                    return jnp.where((nth >= skipped) & (nth < left), value, 0.0)

                for part in all_parts:
                    x, dt = (value.astype(jnp.float32) for value in wide[part][:2])
                    dt = masked(step_size(dt, weights[part][1]), nths[part])
                    store(shared["step"][part].at[slot], dt)
                    store(shared["input"][part].at[slot], masked(dt * x, nths[part]))
                B, C = (value.astype(jnp.float32) for value in both)
                for name, value in ("B", masked(B, narrow_nth)), ("C", C):
                    store(shared[name].at[slot], value.reshape((tile, GROUPS, per_group)))
                plgpu.barrier_arrive(shared["ready"].at[slot])

            def finish(i, wide):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(shared["done"].at[slot])
                outputs = []
                for part in all_parts:
                    sums, layout, skip = shared["y"][part], layouts[part], weights[part][0]
                    total = [load(sums.at[slot, :, g], layout) for g in range(GROUPS)]
                    out = (total[0] + total[1]) + (total[2] + total[3])
                    x, _, *gate = (value.astype(jnp.float32) for value in wide[part])
                    out = out if skip is None else out + skip * x
                    out = out * silu(*gate) if gate else out
                    outputs.append(out.astype(y.dtype))
                count, begin = jnp.minimum(length - i * tile, tile), begin_of(i)
                emit(outputs, start + begin, i * tile - begin, count)

            def turn(i, carry):
                (wide, both), before = carry
                following = fetch(jnp.minimum(i + 1, tiles - 1))

                @pl.when(i < tiles)
                def _():
                    prepare(i, wide, both)

                @pl.when(i > 0)
                def _():
                    finish(i - 1, before)

                return following, wide

            @pl.when(tiles > 0)
            def _():
                first = fetch(0)
                lax.fori_loop(0, tiles + 1, turn, (first, first[0]))

            zeros(start, lax.select(is_live, start, stop))
            zeros(0, lax.select(row == 0, start, 0))
            zeros(lax.select(row == count - 1, stop, tokens), tokens)

        for part in all_parts:
            pl.when(lax.axis_index("thread") == part)(lambda part=part: walk(part))
        pl.when(lax.axis_index("thread") == len(widths))(feed)

    kernel.__name__ = "selective_scan_kernel"
    missing = max(tile - tokens, 0)
    tokens += missing

    def padded(value):
        return value if value is None or not missing else jnp.pad(value, ((0, missing), (0, 0)))

    operands = {
        "layer": scalar_operand(layer),
        "offsets": rows.offsets,
        "read_ids": rows.read_ids,
        "write_ids": rows.write_ids,
        "x": padded(x),
        "dt": padded(dt),
        "A": (A.astype(jnp.float32) * LOG2_E).T,
        "B": padded(B),
        "C": padded(C),
        "skip": skip,
        "z": padded(z),
        "dt_bias": dt_bias,
        "nth": jnp.arange(size, dtype=jnp.int32).reshape((GROUPS, per_group)) % per_group,
    }
    if checkpoints:
        operands["positions"], operands["points"] = sorted_checkpoints(rows)

    def buffer(*shape, dtype=jnp.float32):
        return plgpu.SMEM(shape, dtype)

    scratch = {
        "step": [buffer(2, tile, width) for width in widths],
        "input": [buffer(2, tile, width) for width in widths],
        "B": buffer(2, tile, GROUPS, per_group),
        "C": buffer(2, tile, GROUPS, per_group),
        "y": [buffer(2, tile, GROUPS, width) for width in widths],
        "tail": [buffer(tile, width, dtype=x.dtype) for width in widths],
        "ready": plgpu.Barrier(num_barriers=2),
        "done": plgpu.Barrier(num_arrivals=len(widths), num_barriers=2),
    }
    y, states = call(
        kernel,
        operands,
        states,
        jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid={"row": count, "channels": channels // config.channels},
        scratch=scratch,
        threads=len(widths) + 1,
        interpret=interpret,
    )
    return y[: x.shape[0]], states
