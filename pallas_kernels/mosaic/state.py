"""One token of Mamba-2's state space model, after the convolution."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.blocks import inside, read_block, splat, when_inside
from pallas_kernels.mosaic.call import call, scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import StateConfig, state_config
from pallas_kernels.mosaic.gates import NO_LIMIT, float32, step_size

# A tile [P, N] in registers. A warp takes four rows at once, 32 columns of each: eight threads with
# four columns, so that its accesses are whole lines of 128 bytes, free of bank conflicts in shared
# memory, and the sum over N takes three shuffles for four rows.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), (-5,), (-3, -2), -1)
BY_ROW, BY_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)


class Tile(NamedTuple):
    """Which part of which state: `row` of the batch, `head`, first row `start` of the head."""

    row: Any
    head: Any
    start: Any


class Inputs(NamedTuple):
    """What a tile's update needs beside the state, as loaded: nothing waits for it yet."""

    x: Any
    B: Any
    C: Any
    dt: Any
    dt_bias: Any
    A: Any
    skip: Any


class Sizes(NamedTuple):
    """Sizes of a head's state, heads, groups and the rows of a tile."""

    heads: int
    width: int
    state: int
    groups: int
    rows: int

    @property
    def tiles(self) -> int:
        """Tiles of a row of the batch."""
        return self.heads * self.width // self.rows

    def tile(self, index) -> Tile:
        """The tile at a place in the order of the pool's memory."""
        parts = self.width // self.rows
        row, rest = lax.div(index, self.tiles), lax.rem(index, self.tiles)
        return Tile(row, lax.div(rest, parts), lax.rem(rest, parts) * self.rows)


def load_inputs(refs, tile: Tile, sizes: Sizes) -> Inputs:
    """The inputs of one tile."""

    def vector(start, size, layout):
        return load(refs["xbc"].at[tile.row, pl.ds(start, size)], layout)

    def scalar(name):
        return None if refs[name] is None else refs[name][tile.head]

    inner, per_group = sizes.heads * sizes.width, sizes.heads // sizes.groups
    group = lax.div(tile.head, per_group) * sizes.state
    x = vector(tile.head * sizes.width + tile.start, sizes.rows, BY_ROW)
    B = vector(inner + group, sizes.state, BY_COLUMN)
    C = vector(inner + sizes.groups * sizes.state + group, sizes.state, BY_COLUMN)
    dt = refs["dt"][tile.row, tile.head]
    return Inputs(x, B, C, dt, scalar("dt_bias"), scalar("A"), scalar("skip"))


def update(h, inputs: Inputs, dt_limit):
    """The new state and the output of one tile."""
    x, B, C, dt, dt_bias, A, skip = float32(inputs)

    def down(vector):
        return lax.broadcast_in_dim(vector, h.shape, (0,))

    def across(vector):
        return lax.broadcast_in_dim(vector, h.shape, (1,))

    dt = step_size(dt, dt_bias, dt_limit)
    h = h * jnp.exp(dt * A) + down(x * dt) * across(B)
    y = jnp.sum(h * across(C), axis=1)
    return h, y if skip is None else y + x * skip


def direct_kernel(sizes: Sizes, dt_limit) -> Callable:
    """One program per tile, from the pool to registers and back."""
    shape = (sizes.rows, sizes.state)

    def state_step_kernel(refs, states, y):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        tile = Tile(row, head, lax.axis_index("part") * sizes.rows)
        part = pl.ds(tile.start, sizes.rows)
        layer, read, write = refs["layer"][0], refs["read_ids"][row], refs["write_ids"][row]
        inputs = load_inputs(refs, tile, sizes)

        @pl.when(write != 0)
        def _():
            block = states.at[layer, read, head, part]
            h = read_block(states, read, lambda: load(block, LAYOUT), shape, LAYOUT)
            h, out = update(h, inputs, dt_limit)

            @when_inside(states, write)
            def _():
                store(states.at[layer, write, head, part], h.astype(states.dtype))

            store(y.at[row, head, part], out.astype(y.dtype))

        @pl.when(write == 0)
        def _():
            store(y.at[row, head, part], splat(0.0, (sizes.rows,), BY_ROW, y.dtype))

    return state_step_kernel


def pipelined_kernel(sizes: Sizes, dt_limit, tiles: int, config: StateConfig) -> Callable:
    """Persistent programs that walk over tiles, with several of them in flight.

    A tile is copied to a buffer in shared memory, updated there and copied back from there. A
    buffer is loaded again once its store, one tile ago, has been read out.
    """
    shape, stages, programs = (sizes.rows, sizes.state), config.stages, config.programs

    def state_step_kernel(refs, states, y, buffers, loaded):
        first, layer = lax.axis_index("program"), refs["layer"][0]

        def ids(tile: Tile):
            return refs["read_ids"][tile.row], refs["write_ids"][tile.row]

        def part(block, tile: Tile):
            return states.at[layer, block, tile.head, pl.ds(tile.start, sizes.rows)]

        def start_load(step):
            index = first + step * programs

            @pl.when(index < tiles)
            def _():
                tile, stage = sizes.tile(index), lax.rem(step, stages)
                read, write = ids(tile)

                @pl.when(inside(states, read) & (write != 0))
                def _():
                    source = part(read, tile)
                    plgpu.copy_gmem_to_smem(source, buffers.at[stage], loaded.at[stage])

        def step_tile(step, _):
            tile, stage = sizes.tile(first + step * programs), lax.rem(step, stages)
            read, write = ids(tile)
            inputs = load_inputs(refs, tile, sizes)
            out = y.at[tile.row, tile.head, pl.ds(tile.start, sizes.rows)]

            @pl.when(write != 0)
            def _():
                def arrived():
                    plgpu.barrier_wait(loaded.at[stage])
                    return load(buffers.at[stage], LAYOUT)

                h = read_block(states, read, arrived, shape, LAYOUT)
                h, total = update(h, inputs, dt_limit)

                @when_inside(states, write)
                def _():
                    store(buffers.at[stage], h.astype(states.dtype))
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffers.at[stage], part(write, tile))

                store(out, total.astype(y.dtype))

            @pl.when(write == 0)
            def _():
                store(out, splat(0.0, (sizes.rows,), BY_ROW, y.dtype))

            # The store of this step may still be running, those before it are to be done. A step
            # that stored nothing has to wait for all.
            @pl.when(inside(states, write))
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(~inside(states, write))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            start_load(step + stages - 1)

        for step in range(stages - 1):
            start_load(step)
        steps = lax.div(tiles - first + programs - 1, programs)
        lax.fori_loop(0, steps, step_tile, None)
        plgpu.wait_smem_to_gmem(0)

    return state_step_kernel


def state_step(
    xbc: Float[Array, "R DC"],
    dt: Float[Array, "R H"],
    A: Float[Array, "H"],
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    *,
    n_groups: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
    config: StateConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R H P"], Float[Array, "layers blocks H P N"]]:
    """`ssd` of one token a row, from the convolution's output; see `pallas_kernels.mamba2_step`."""
    heads, width, size = states.shape[2:]
    rows = xbc.shape[0]
    config = config or state_config(rows, heads, width, size)
    sizes = Sizes(heads, width, size, n_groups, config.rows)
    operands = {
        "layer": scalar_operand(layer),
        "read_ids": read_ids,
        "write_ids": write_ids,
        "xbc": xbc,
        "dt": dt,
        "A": A,
        "skip": skip,
        "dt_bias": dt_bias,
    }
    out = jax.ShapeDtypeStruct((rows, heads, width), xbc.dtype)
    if not config.stages:
        grid = {"row": rows, "head": heads, "part": width // config.rows}
        kernel = direct_kernel(sizes, dt_limit)
        return call(kernel, operands, states, out, grid=grid, interpret=interpret)
    scratch = {
        "buffers": plgpu.SMEM((config.stages, config.rows, size), states.dtype),
        "loaded": plgpu.Barrier(num_barriers=config.stages),
    }
    kernel = pipelined_kernel(sizes, dt_limit, rows * sizes.tiles, config)
    grid = {"program": min(config.programs, rows * sizes.tiles)}
    return call(kernel, operands, states, out, grid=grid, scratch=scratch, interpret=interpret)
