"""One token of Mamba-2's state space model, after the convolution."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from pallas_kernels.mosaic.config import StateConfig, state_config
from pallas_kernels.mosaic.gates import NO_LIMIT, float32, silu, step_size

# A tile [P, N] in registers. A warp takes four rows at once, 32 columns of each: eight threads with
# four columns, so that its accesses are whole lines of 128 bytes, and the sum over N takes three
# shuffles for four rows.
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
    gate: Any


class Sizes(NamedTuple):
    """Sizes of a head's state, heads, groups and the rows of a tile; the first columns of operands."""

    heads: int
    width: int
    state: int
    groups: int
    rows: int
    first: Mapping[str, int]


def load_inputs(refs, tile: Tile, sizes: Sizes) -> Inputs:
    """The inputs of one tile."""

    def vector(name, start, size, layout):
        return load(refs[name].at[tile.row, pl.ds(sizes.first[name] + start, size)], layout)

    def scalar(name):
        return None if refs[name] is None else refs[name][tile.head]

    group = lax.div(tile.head, sizes.heads // sizes.groups) * sizes.state
    start = tile.head * sizes.width + tile.start
    x = vector("x", start, sizes.rows, BY_ROW)
    gate = None if refs["gate"] is None else vector("gate", start, sizes.rows, BY_ROW)
    B, C = (vector(name, group, sizes.state, BY_COLUMN) for name in "BC")
    dt = refs["dt"][tile.row, sizes.first["dt"] + tile.head]
    return Inputs(x, B, C, dt, scalar("dt_bias"), scalar("A"), scalar("skip"), gate)


def update(h, inputs: Inputs, dt_limit):
    """The new state and the output of one tile."""
    x, B, C, dt, dt_bias, A, skip, gate = float32(inputs)

    def down(vector):
        return lax.broadcast_in_dim(vector, h.shape, (0,))

    def across(vector):
        return lax.broadcast_in_dim(vector, h.shape, (1,))

    dt = step_size(dt, dt_bias, dt_limit)
    h = h * jnp.exp(dt * A) + down(x * dt) * across(B)
    y = jnp.sum(h * across(C), axis=1)
    y = y if skip is None else y + x * skip
    return h, y if gate is None else y * silu(gate)


def tile_kernel(sizes: Sizes, dt_limit) -> Callable:
    """One program per tile, from the pool to registers and back."""
    shape = (sizes.rows, sizes.state)

    def ssd_step_kernel(refs, states, y):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        tile = Tile(row, head, lax.axis_index("part") * sizes.rows)
        part = pl.ds(tile.start, sizes.rows)
        outputs = pl.ds(head * sizes.width + tile.start, sizes.rows)
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

            store(y.at[row, outputs], out.astype(y.dtype))

        @pl.when(write == 0)
        def _():
            store(y.at[row, outputs], splat(0.0, (sizes.rows,), BY_ROW, y.dtype))

    return ssd_step_kernel


def ssd_step(
    x: Float[Array, "R H P"] | Columns,
    dt: Float[Array, "R H"] | Columns,
    A: Float[Array, "H"],
    B: Float[Array, "R G N"] | Columns,
    C: Float[Array, "R G N"] | Columns,
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    gate: Float[Array, "R HP"] | Columns | None = None,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
    config: StateConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R H P"], Float[Array, "layers blocks H P N"]]:
    """`pallas_kernels.ssd_step`, one program per tile of a head's state."""
    heads, width, size = states.shape[2:]
    rows, groups, dtype = x.shape[0], B.shape[1], x.dtype
    config = config or state_config(rows, heads, width, size)
    matrices, first = {}, {}
    for name, operand in {"x": x, "dt": dt, "B": B, "C": C, "gate": gate}.items():
        array, first[name] = parts(operand)
        matrices[name] = None if array is None else array.reshape((rows, -1))
    sizes = Sizes(heads, width, size, groups, config.rows, first)
    operands = {
        "layer": scalar_operand(layer),
        "read_ids": read_ids,
        "write_ids": write_ids,
        **matrices,
        "A": A,
        "skip": skip,
        "dt_bias": dt_bias,
    }
    # Flat, so that XLA finds one reduction over all channels in the norm that follows.
    out = jax.ShapeDtypeStruct((rows, heads * width), dtype)
    grid = {"row": rows, "head": heads, "part": width // config.rows}
    kernel = tile_kernel(sizes, dt_limit)
    y, states = call(kernel, operands, states, out, grid=grid, interpret=interpret)
    return y.reshape((rows, heads, width)), states
