"""Mamba's selective scan of packed rows.

A program walks one row in one block of channels with the states in registers, one token after the
other, so that no bit depends on where a row is cut. One warpgroup does nothing but the recurrence.
A second one prepares the tokens ahead of it (step size, conversions) and finishes those behind it
(sum over the groups of states, skip, gate), tile by tile through shared memory.
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
SCAN, TOKENS = 0, 1  # the two warpgroups
NEVER = 2**30  # a checkpoint position that no row reaches

# Layout of `[tokens, channels]` outside the scan: eight threads hold 32 channels of a token.
TILE = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), (-5,), (-3, -2), -1)
PER_CHANNEL = TILE.reduce(0)


def state_layout(groups: int):
    """Layout of `[groups, size / groups, channels]`: a thread holds the states of a group in a channel."""
    if groups == 4:
        tiles = (4, 4, 32), (4, 1)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3,), -2)
    tiles = (groups, 4, 128 // groups), (4, 32), (4, 1)
    warps = (-7, -5) if groups == 2 else (-5,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warps, (-3,), -2)


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
    width, groups, tile, unroll = config.channels, config.groups, config.tokens, config.unroll
    per_group = size // groups
    (B, first_B), (C, first_C), (z, first_z) = (parts(operand) for operand in (B, C, z))
    shape = (groups, per_group, width)
    layout = state_layout(groups)
    by_group, by_state, by_channel = layout.reduce(1), layout.reduce(2), layout.reduce((0, 1))

    def spread(value, axes):
        return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, axes), layout)

    def group_rows(block, k):
        """State k of each group: rows k, k + per_group, ... of a block's channels."""
        if interpret:  # which cannot reshape a ref
            return block.at[pl.ds(k, groups, per_group)]
        return block.reshape(groups, per_group, width).at[:, k]

    def kernel(refs, states, y, shared):
        row = lax.axis_index("row")
        first = lax.axis_index("channels") * width
        lanes = pl.ds(first, width)
        start, stop = refs["offsets"][row], refs["offsets"][row + 1]
        layer, read, write = refs["layer"][0], refs["read_ids"][row], refs["write_ids"][row]
        length = stop - start
        is_live = (write != 0) & (length > 0)
        tiles = lax.select(is_live, lax.div(length + (tile - 1), tile), 0)

        def begin_of(i):
            """Position in the row of the first token of tile i, earlier where the buffer ends."""
            return jnp.minimum(start + i * tile, tokens - tile) - start

        def is_nth(k):
            # Mosaic's iota counts along the last axis only, whatever the vectors of a layout run along.
            return spread(load(refs["nth"], by_state), (0, 1)) == k

        # The recurrence ------------------------------------------------------------------------

        def load_states(block):
            """A block's channels as an array of the states' layout."""
            value = splat(0.0, shape, layout)
            for k in range(per_group):
                part = load(group_rows(block, k), by_group).astype(jnp.float32)
                value = jnp.where(is_nth(k), spread(part, (0, 2)), value)
            return value

        def store_states(block, value):
            @when_inside(states, block)
            def _():
                for k in range(per_group):
                    # Minus zero, which changes no bit of what it is added to.
                    part = jnp.sum(jnp.where(is_nth(k), value, -0.0), axis=1)
                    part = plgpu.layout_cast(part, by_group).astype(states.dtype)
                    store(group_rows(states.at[layer, block, :, lanes], k), part)

        def read_token(slot, token):
            step = load(shared["step"].at[slot, token], by_channel)
            dtx = load(shared["input"].at[slot, token], by_channel)
            B, C = (load(shared[name].at[slot, token], by_state) for name in "BC")
            return step, dtx, B, C

        def advance(h, A, step, dtx, B):
            """The states after one token."""
            decay = jnp.exp2(spread(step, (2,)) * A)
            return decay * h + spread(dtx, (2,)) * spread(B, (0, 1))

        def walk():
            A = load_states(refs["A"].at[:, lanes])

            def stored():
                return load_states(states.at[layer, jnp.maximum(read, 0), :, lanes])

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
                            return advance(h, A, step, dtx, B)

                        return lax.fori_loop(0, tile, step, before)

                    value = lax.cond(position == end, lambda: h, again)
                    store_states(refs["points"][row, point], value)
                    return point + 1

                return lax.while_loop(pending, leave, point)

            def one_tile(i, carry):
                h, point = carry
                slot, before = lax.rem(i, 2), h
                plgpu.barrier_wait(shared["ready"].at[slot])
                # A load waits for every store before it: read a piece before the last one is stored.
                pieces = [range(n, n + unroll) for n in range(0, tile, unroll)]
                following = [read_token(slot, token) for token in pieces[0]]
                for n, piece in enumerate(pieces):
                    inputs = following
                    if n + 1 < len(pieces):
                        following = [read_token(slot, token) for token in pieces[n + 1]]
                    for token, (step, dtx, B, C) in zip(piece, inputs, strict=True):
                        h = advance(h, A, step, dtx, B)
                        partial = jnp.sum(h * spread(C, (0, 1)), axis=1)
                        partial = plgpu.layout_cast(partial, by_group)
                        store(shared["y"].at[slot, token], partial)
                if checkpoints:
                    point = checkpoint(i, h, before, point)
                plgpu.barrier_arrive(shared["done"].at[slot])
                return h, point

            h, _ = lax.fori_loop(0, tiles, one_tile, (h, jnp.int32(0)))
            store_states(lax.select(is_live, write, 0), h)

        # The tokens ----------------------------------------------------------------------------

        def emit(value, at, skipped, count):
            """Stores `count` tokens of a tile of outputs that begins at `at`, after those skipped."""

            @pl.when(count == tile)
            def _():
                store(y.at[pl.ds(at, tile), lanes], value)

            @pl.when((count > 0) & (count < tile))
            def _():
                store(shared["tail"], value)
                plgpu.commit_smem()

                @pl.loop(skipped, skipped + count)
                def _(n):
                    plgpu.copy_smem_to_gmem(
                        shared["tail"].at[pl.ds(n, 1)], y.at[pl.ds(at + n, 1), lanes]
                    )

                plgpu.wait_smem_to_gmem(0)

        def zeros(begin, end):
            nothing = splat(0.0, (tile, width), TILE, y.dtype)

            @pl.loop(0, lax.div(end - begin + (tile - 1), tile))
            def _(i):
                at = begin + i * tile
                emit(nothing, at, 0, jnp.minimum(end - at, tile))

        def per_channel(name):
            if refs[name] is None:
                return None
            value = load(refs[name].at[lanes], PER_CHANNEL).astype(jnp.float32)
            return plgpu.layout_cast(lax.broadcast_in_dim(value, (tile, width), (1,)), TILE)

        def feed():
            skip, bias = per_channel("skip"), per_channel("dt_bias")
            wide_columns = [("x", lanes), ("dt", lanes)]
            if refs["z"] is not None:
                wide_columns.append(("z", pl.ds(first_z + first, width)))
            narrow = plgpu.Layout.WG_STRIDED((tile, size), vec_size=2)
            nth = plgpu.broadcasted_iota(jnp.int32, (tile, width), 0, layout=TILE)
            narrow_nth = plgpu.broadcasted_iota(jnp.int32, (tile, size), 0, layout=narrow)

            def fetch(i):
                """The inputs of tile i; nothing waits for them yet."""
                part = pl.ds(start + begin_of(i), tile)
                wide = [load(refs[name].at[part, at], TILE) for name, at in wide_columns]
                both = (("B", first_B), ("C", first_C))
                return wide, [
                    load(refs[name].at[part, pl.ds(at, size)], narrow) for name, at in both
                ]

            def prepare(i, wide, both):
                slot, skipped = lax.rem(i, 2), i * tile - begin_of(i)
                left = length - begin_of(i)

                def masked(value, nth):
                    return jnp.where((nth >= skipped) & (nth < left), value, 0.0)

                x, dt = (value.astype(jnp.float32) for value in wide[:2])
                dt = masked(step_size(dt, bias), nth)
                store(shared["step"].at[slot], dt)
                store(shared["input"].at[slot], masked(dt * x, nth))
                B, C = (value.astype(jnp.float32) for value in both)
                for name, value in ("B", masked(B, narrow_nth)), ("C", C):
                    store(shared[name].at[slot], value.reshape((tile, groups, per_group)))
                plgpu.barrier_arrive(shared["ready"].at[slot])

            def finish(i, wide):
                slot = lax.rem(i, 2)
                plgpu.barrier_wait(shared["done"].at[slot])
                total = [load(shared["y"].at[slot, :, g], TILE) for g in range(groups)]
                while len(total) > 1:
                    total = [a + b for a, b in zip(total[::2], total[1::2], strict=True)]
                x, _, *gate = (value.astype(jnp.float32) for value in wide)
                out = total[0] if skip is None else total[0] + skip * x
                out = out * silu(*gate) if gate else out
                count, begin = jnp.minimum(length - i * tile, tile), begin_of(i)
                emit(out.astype(y.dtype), start + begin, i * tile - begin, count)

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

        pl.when(lax.axis_index("thread") == SCAN)(walk)
        pl.when(lax.axis_index("thread") == TOKENS)(feed)

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
        "nth": jnp.arange(size, dtype=jnp.int32).reshape((groups, per_group)) % per_group,
    }
    if checkpoints:
        operands["positions"], operands["points"] = sorted_checkpoints(rows)

    def buffer(*shape, dtype=jnp.float32):
        return plgpu.SMEM(shape, dtype)

    scratch = {
        "step": buffer(2, tile, width),
        "input": buffer(2, tile, width),
        "B": buffer(2, tile, groups, per_group),
        "C": buffer(2, tile, groups, per_group),
        "y": buffer(2, tile, groups, width),
        "tail": buffer(tile, width, dtype=x.dtype),
        "ready": plgpu.Barrier(num_barriers=2),
        "done": plgpu.Barrier(num_barriers=2),
    }
    y, states = call(
        kernel,
        operands,
        states,
        jax.ShapeDtypeStruct((tokens, channels), x.dtype),
        grid={"row": count, "channels": channels // width},
        scratch=scratch,
        threads=2,
        interpret=interpret,
    )
    return y[: x.shape[0]], states
