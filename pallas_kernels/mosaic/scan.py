"""Mamba's selective scan of packed rows.

A program walks one row in one block of channels with the states in registers, one token after the
other, so that no bit depends on where a row is cut. One or two warpgroups do nothing but the
recurrence, each in channels of its own. One more prepares the tokens ahead of them (step size,
conversions) and another one, or the same, finishes those behind them (sum over the groups of
states, skip, gate), tile by tile through shared memory.
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
from pallas_kernels.mosaic.gates import LOG2_E, silu, step_size
from pallas_kernels.mosaic.scan_layouts import (
    GROUPS,
    sorted_checkpoints,
    state_layout,
    token_layout,
)
from pallas_kernels.rows import Rows

STRETCH = 16  # tokens of a tile without a loop: larger code is slower, smaller has more of the loop
BLOCK = 64  # tokens of the inputs that are copied to shared memory at once


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
    config = config or scan_config(count, channels, size)
    widths, tile, unroll = config.widths, config.tokens, config.unroll
    (B, first_B), (C, first_C), (z, first_z) = (parts(operand) for operand in (B, C, z))
    per_group = size // GROUPS
    # What each helper copies to shared memory: one for what comes before the recurrence and one for
    # what comes after, or one for both.
    copied_by = [("x", "dt"), ("x",) if z is None else ("x", "z")]
    if config.helpers == 1:
        copied_by = [tuple(dict.fromkeys(copied_by[0] + copied_by[1]))]
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

        def begin_of_block(n):
            """First token of block n, earlier where the buffer ends."""
            return jnp.minimum(start + n * BLOCK, tokens - BLOCK)

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

            def take(slot, first, count):
                """Tokens `first` to `first + count` of a tile, each as step size, input, B and C."""
                at = slot, pl.ds(first, count)
                step, dtx = (load(ref.at[at], by_channel) for ref in (steps, inputs))
                B, C = (load(shared[name].at[at], by_state) for name in "BC")
                every = step, dtx, B, C

                def token(value, n):
                    # Without strides, which Mosaic does not know.
                    start, stop = (n, 0, 0), (n + 1, *value.shape[1:])
                    return lax.squeeze(lax.slice(value, start[: value.ndim], stop), (0,))

                return [[token(value, n) for value in every] for n in range(count)]

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
                            ((step, dtx, B, _),) = take(slot, token, 1)
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
                following = take(slot, first, unroll)
                for n in range(0, STRETCH, unroll):
                    tokens, sum_of = following, []
                    if n + unroll < STRETCH:
                        following = take(slot, first + n + unroll, unroll)
                    for step, dtx, B, C in tokens:
                        h = advance(h, step, dtx, B)
                        partial = jnp.sum(h * spread(C, (0, 1)), axis=1)
                        partial = plgpu.layout_cast(partial, by_group)
                        sum_of.append(lax.reshape(partial, (1, *partial.shape)))
                    at = slot, pl.ds(first + n, unroll), pl.ds(0, GROUPS)
                    store(sums.at[at], lax.concatenate(sum_of, 0))
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

        def help(helper):
            weights = [
                [per_channel(name, part) for name in ("skip", "dt_bias")] for part in all_parts
            ]
            narrow = plgpu.Layout.WG_STRIDED((tile, size), vec_size=2)

            def nth(width, layout):
                return plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=layout)

            nths = [nth(width, layout) for width, layout in zip(widths, layouts, strict=True)]
            narrow_nth = nth(size, narrow)

            prepares, finishes = "dt" in copied_by[helper], helper == len(copied_by) - 1
            copies, arrived = shared["copies"][helper], shared["arrived"][helper]

            def begin_copies(n):
                """Starts copies of block n to shared memory."""
                stage, span = lax.rem(n, 2), pl.ds(begin_of_block(n), BLOCK)
                for name, targets in copies.items():
                    first = origin + (first_z if name == "z" else 0)
                    for part in all_parts:
                        source = refs[name].at[span, pl.ds(first + firsts[part], widths[part])]
                        target = targets[part].at[stage]
                        plgpu.copy_gmem_to_smem(source, target, arrived.at[stage])

            def copied(i, name, part):
                n = lax.div(i, BLOCK // tile)
                at = lax.rem(n, 2), pl.ds(start + begin_of(i) - begin_of_block(n), tile)
                return load(copies[name][part].at[at], layouts[part]).astype(jnp.float32)

            def fetch(i):
                """B and C of tile i; nothing waits for them yet."""
                span = pl.ds(start + begin_of(i), tile)
                both = (("B", first_B), ("C", first_C)) if prepares else ()
                return [load(refs[name].at[span, pl.ds(at, size)], narrow) for name, at in both]

            def prepare(i, both):
                slot, skipped = lax.rem(i, 2), i * tile - begin_of(i)
                left = length - begin_of(i)
                is_part = (skipped > 0) | (left < tile)  # other tokens of the tile change no state

                def leave(ref, value, nth):
                    """Stores a tile, with zeros for tokens that are not the row's."""
                    ref = ref.at[slot]
                    store(ref, value.reshape(ref.shape))

                    @pl.when(is_part)
                    def _():
                        kept = jnp.where((nth >= skipped) & (nth < left), value, 0.0)
                        store(ref, kept.reshape(ref.shape))

                for part in all_parts:
                    x, dt = (copied(i, name, part) for name in ("x", "dt"))
                    dt = step_size(dt, weights[part][1])
                    leave(shared["step"][part], dt, nths[part])
                    leave(shared["input"][part], dt * x, nths[part])
                for name, value in zip("BC", both, strict=True):
                    leave(shared[name], value.astype(jnp.float32), narrow_nth)
                plgpu.barrier_arrive(shared["ready"].at[slot])

            def finish(i):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(shared["done"].at[slot])
                outputs = []
                for part in all_parts:
                    sums, layout, skip = shared["y"][part], layouts[part], weights[part][0]
                    total = [load(sums.at[slot, :, g], layout) for g in range(GROUPS)]
                    out = (total[0] + total[1]) + (total[2] + total[3])
                    out = out if skip is None else out + skip * copied(i, "x", part)
                    out = out * silu(copied(i, "z", part)) if "z" in copies else out
                    outputs.append(out.astype(y.dtype))
                if not prepares:
                    plgpu.barrier_arrive(shared["taken"].at[slot])
                count, begin = jnp.minimum(length - i * tile, tile), begin_of(i)
                emit(outputs, start + begin, i * tile - begin, count)

            def turn(i, both):
                following = fetch(jnp.minimum(i + 1, tiles - 1))
                n, within = lax.div(i, BLOCK // tile), lax.rem(i, BLOCK // tile)

                @pl.when((within == 1 % (BLOCK // tile)) & ((n + 1) * BLOCK < length))
                def _():
                    # No warp reads the block before this one any more.
                    plgpu.commit_smem()
                    begin_copies(n + 1)

                @pl.when(i < tiles)
                def _():
                    pl.when(within == 0)(lambda: plgpu.barrier_wait(arrived.at[lax.rem(n, 2)]))
                    if prepares:
                        if not finishes:

                            @pl.when(i >= 2)
                            def _():
                                plgpu.barrier_wait(shared["taken"].at[lax.rem(i, 2)])

                        prepare(i, both)
                    else:
                        finish(i)

                if prepares and finishes:
                    pl.when(i > 0)(lambda: finish(i - 1))
                return following

            @pl.when(tiles > 0)
            def _():
                begin_copies(0)
                last = tiles + 1 if prepares and finishes else tiles
                lax.fori_loop(0, last, turn, fetch(0))

            if not finishes:
                return
            zeros(start, lax.select(is_live, start, stop))
            zeros(0, lax.select(row == 0, start, 0))
            zeros(lax.select(row == count - 1, stop, tokens), tokens)

        for part in all_parts:
            pl.when(lax.axis_index("thread") == part)(lambda part=part: walk(part))
        for helper in range(len(copied_by)):
            number = len(widths) + helper
            pl.when(lax.axis_index("thread") == number)(lambda helper=helper: help(helper))

    kernel.__name__ = "selective_scan_kernel"
    missing = max(BLOCK - tokens, 0)
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
        "copies": [
            {n: [buffer(2, BLOCK, w, dtype=operands[n].dtype) for w in widths] for n in names}
            for names in copied_by
        ],
        "arrived": [
            plgpu.Barrier(num_arrivals=len(names) * len(widths), num_barriers=2)
            for names in copied_by
        ],
        "step": [buffer(2, tile, width) for width in widths],
        "input": [buffer(2, tile, width) for width in widths],
        "B": buffer(2, tile, GROUPS, per_group),
        "C": buffer(2, tile, GROUPS, per_group),
        # One group more where several tokens of a narrow block would share banks.
        "y": [buffer(2, tile, GROUPS + (width < 32), width) for width in widths],
        "tail": [buffer(tile, width, dtype=x.dtype) for width in widths],
        "ready": plgpu.Barrier(num_barriers=2),
        "done": plgpu.Barrier(num_arrivals=len(widths), num_barriers=2),
        "taken": plgpu.Barrier(num_barriers=2),
    }
    y, states = call(
        kernel,
        operands,
        states,
        jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid={"row": count, "channels": channels // config.channels},
        scratch=scratch,
        threads=len(widths) + len(copied_by),
        interpret=interpret,
    )
    return y[: x.shape[0]], states
