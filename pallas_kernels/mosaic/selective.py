"""One token of Mamba's selective scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic.blocks import read_block, splat, when_inside
from pallas_kernels.mosaic.call import call, scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import SelectiveConfig, selective_config
from pallas_kernels.mosaic.gates import float32, silu, step_size


def channel_layout(width: int):
    """Layout of `[N, 128 * width]`: a thread owns `width` channels and all N of their states."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, 128 * width), (32 * width,), (width,))), (-3,), (-2,), -1
    )


def selective_step(
    x: Float[Array, "R D"],
    dt: Float[Array, "R D"],
    A: Float[Array, "D N"],
    B: Float[Array, "R N"],
    C: Float[Array, "R N"],
    skip: Float[Array, "D"] | None,
    z: Float[Array, "R D"] | None,
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

    The sum over N stays within a thread, and `A` in its registers from row to row.
    """
    rows, channels = x.shape
    size = A.shape[1]
    config = config or selective_config(rows, channels, size)
    width = 128 * config.width
    shape = (size, width)
    layout = channel_layout(config.width)
    by_channel, by_state = layout.reduce(0), layout.reduce(1)

    def across(vector):
        return lax.broadcast_in_dim(vector, shape, (1,))

    def down(vector):
        return lax.broadcast_in_dim(vector, shape, (0,))

    def selective_step_kernel(refs, states, y):
        lanes = pl.ds(lax.axis_index("channels") * width, width)
        start = lax.axis_index("rows") * config.rows
        layer = refs["layer"][0]

        def per_channel(name, *row):
            ref = refs[name]
            return None if ref is None else load(ref.at[(*row, lanes)], by_channel)

        A = load(refs["A"].at[:, lanes], layout)
        weights = [per_channel("skip"), per_channel("dt_bias")]

        def step(row, _):
            read, write = refs["read_ids"][row], refs["write_ids"][row]
            token = [per_channel(name, row) for name in ("x", "dt", "z")]
            token += [load(refs[name].at[row], by_state) for name in ("B", "C")]

            @pl.when(write != 0)
            def _():
                block = states.at[layer, read, :, lanes]
                h = read_block(states, read, lambda: load(block, layout), shape, layout)
                # Converted after the state's loads are under way: a use waits for its own load.
                x, dt, z, B, C, skip, dt_bias = float32([*token, *weights])
                step = step_size(dt, dt_bias)
                h = jnp.exp(across(step) * A) * h + across(step * x) * down(B)
                total = jnp.sum(h * down(C), axis=0)
                total = total if skip is None else total + skip * x
                total = total if z is None else total * silu(z)
                store(y.at[row, lanes], total.astype(y.dtype))

                @when_inside(states, write)
                def _():
                    store(states.at[layer, write, :, lanes], h.astype(states.dtype))

            @pl.when(write == 0)
            def _():
                store(y.at[row, lanes], splat(0.0, (width,), by_channel, y.dtype))

        if config.rows == 1:
            step(start, None)
        else:
            lax.fori_loop(start, jnp.minimum(start + config.rows, rows), step, None)

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
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid={"rows": -(-rows // config.rows), "channels": channels // width},
        interpret=interpret,
    )
