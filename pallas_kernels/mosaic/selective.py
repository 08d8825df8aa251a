"""One token of Mamba's selective scan."""

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
from pallas_kernels.mosaic.config import SelectiveConfig, selective_config
from pallas_kernels.mosaic.gates import float32, silu, step_size


def tile_layout(config: SelectiveConfig):
    """Layout of `[N, channels]`: a warp holds `lanes` states at once, of 32 / lanes x width channels.

    With four channels a thread and eight threads across, a warp moves whole lines of 128 bytes, and
    a thread loads only N / lanes of the numbers in B and C.
    """
    across = 32 // config.lanes * config.width
    if config.lanes == 1:
        tiles = (1, 4 * across), (across,), (config.width,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-3,), (-2,), -1)
    tiles = (config.lanes, 4 * across), (config.lanes, across), (config.width,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-4,), (-3, -2), -1)


def selective_step(
    x: Float[Array, "R D"] | Columns,
    dt: Float[Array, "R D"],
    A: Float[Array, "D N"],
    B: Float[Array, "R N"] | Columns,
    C: Float[Array, "R N"] | Columns,
    skip: Float[Array, "D"] | None,
    z: Float[Array, "R D"] | Columns | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    *,
    config: SelectiveConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_step`, one program per channel block and a few rows.

    The rows of a program share one load of `A`, and their states are all under way at once.
    """
    rows, channels = x.shape
    size = A.shape[1]
    config = config or selective_config(rows, channels, size)
    width = config.channels
    dtype, (x, first_x) = x.dtype, parts(x)
    B, first_B = parts(B)
    C, first_C = parts(C)
    z, first_z = parts(z)
    shape = (size, width)
    layout = tile_layout(config)
    by_channel, by_state = layout.reduce(0), layout.reduce(1)

    def across(vector):
        return lax.broadcast_in_dim(vector, shape, (1,))

    def down(vector):
        return lax.broadcast_in_dim(vector, shape, (0,))

    def update(h, A, inputs):
        x, dt, z, B, C, skip, dt_bias = float32(inputs)
        dt = step_size(dt, dt_bias)
        h = jnp.exp(across(dt) * A) * h + across(dt * x) * down(B)
        y = jnp.sum(h * down(C), axis=0)
        y = y if skip is None else y + skip * x
        return h, y if z is None else y * silu(z)

    def selective_step_kernel(refs, states, y):
        start = lax.axis_index("channels") * width
        lanes = pl.ds(start, width)
        first = lax.axis_index("rows") * config.rows
        own = [first + n for n in range(config.rows)]
        layer = refs["layer"][0]
        ids = [(refs["read_ids"][row], refs["write_ids"][row]) for row in own]

        def per_channel(name, *row, first=0):
            ref = refs[name]
            lanes = pl.ds(first + start, width)
            return None if ref is None else load(ref.at[(*row, lanes)], by_channel)

        def per_state(name, row, first):
            return load(refs[name].at[row, pl.ds(first, size)], by_state)

        A = load(refs["A"].at[:, lanes], layout)
        weights = [per_channel("skip"), per_channel("dt_bias")]
        tokens = [
            (
                per_channel("x", row, first=first_x),
                per_channel("dt", row),
                per_channel("z", row, first=first_z),
                per_state("B", row, first_B),
                per_state("C", row, first_C),
            )
            for row in own
        ]

        def old(read, write):
            # A null row loads nothing, whatever block it names.
            read = jnp.where(write == 0, 0, read)
            block = states.at[layer, read, :, lanes]
            return read_block(states, read, lambda: load(block, layout), shape, layout)

        before = [old(read, write) for read, write in ids]

        for row, (_, write), h, token in zip(own, ids, before, tokens, strict=True):

            @pl.when(write != 0)
            def _(row=row, write=write, h=h, token=token):
                new, out = update(h, A, [*token, *weights])
                store(y.at[row, lanes], out.astype(y.dtype))

                @when_inside(states, write)
                def _():
                    store(states.at[layer, write, :, lanes], new.astype(states.dtype))

            @pl.when(write == 0)
            def _(row=row):
                store(y.at[row, lanes], splat(0.0, (width,), by_channel, y.dtype))

    operands = {
        "layer": scalar_operand(layer),
        "read_ids": read_ids,
        "write_ids": write_ids,
        "x": x,
        "dt": dt,
        # Channels last, as in the states. XLA hoists this out of a loop over tokens.
        "A": A.astype(jnp.float32).T,
        "B": B,
        "C": C,
        "skip": skip,
        "z": z,
        "dt_bias": dt_bias,
    }
    return call(
        selective_step_kernel,
        operands,
        states,
        jax.ShapeDtypeStruct((rows, channels), dtype),
        grid={"rows": rows // config.rows, "channels": channels // width},
        interpret=interpret,
    )
