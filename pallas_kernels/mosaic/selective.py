"""One token of Mamba's selective scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import xla
from pallas_kernels.columns import Columns, parts, sliced
from pallas_kernels.mosaic.batch_matmul import batch_matmul
from pallas_kernels.mosaic.blocks import read_block, splat, when_inside
from pallas_kernels.mosaic.call import call, scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import SelectiveConfig, selective_config
from pallas_kernels.mosaic.gates import LOG2_E, float32, silu, step_size
from pallas_kernels.mosaic.low_rank import Registers, TensorCores
from pallas_kernels.mosaic.matmul import rows_matmul
from pallas_kernels.mosaic.support import FEW_ROWS, low_rank_reason, matmul_reason


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
    dt: Float[Array, "R _"] | Columns,
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
    dt_weight: Float[Array, "D K"] | None = None,
    *,
    config: SelectiveConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_step`, one program per channel block and a few rows.

    The rows of a program share one load of `A` and `dt_weight`, and the states of some are under way
    at once, also while the program multiplies by `dt_weight` (`low_rank`). Where that is declined, a
    product in a launch before gives the step sizes.
    """
    rows, channels = x.shape
    size = A.shape[1]
    if dt_weight is not None and low_rank_reason(dt, dt_weight, rows, channels, size):
        dt, dt_weight = product(dt, dt_weight, interpret), None
    config = config or selective_config(rows, channels, size, low_rank=dt_weight is not None)
    width = config.channels
    dtype, (x, first_x) = x.dtype, parts(x)
    B, first_B = parts(B)
    C, first_C = parts(C)
    z, first_z = parts(z)
    source, first_dt = parts(dt)
    shape = (size, width)
    layout = tile_layout(config)
    by_channel, by_state = layout.reduce(0), layout.reduce(1)
    count = config.rows // config.warpgroups
    ahead = config.ahead or count
    factors = None
    if dt_weight is not None and config.cores:
        factors = TensorCores(dt_weight.shape[1], first_dt, config, bool(interpret))
        source = factors.padded(source)
    elif dt_weight is not None:
        factors = Registers(dt_weight.shape[1], first_dt, config)

    def across(vector):
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (1,)), layout)

    def down(vector):
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (0,)), layout)

    def update(h, A, skip, dt, token):
        x, z, B, C = float32(token)
        h = jnp.exp2(across(dt) * A) * h + across(dt * x) * down(B)
        y = jnp.sum(h * down(C), axis=0)
        y = y if skip is None else y + skip * x
        return h, y if z is None else y * silu(z)

    def selective_step_kernel(refs, states, y, shared=None):
        start = lax.axis_index("channels") * width
        lanes = pl.ds(start, width)
        first = lax.axis_index("rows") * config.rows
        if config.warpgroups > 1:
            first = first + lax.axis_index("thread") * count

        own, exist = [first + n for n in range(count)], [True] * count
        if rows % config.rows:  # what lies past the last row is that row's, and not written
            exist = [row < rows for row in own]
            own = [jnp.minimum(row, rows - 1) for row in own]

        def ids_of(n):
            row, exists = own[n], exist[n]
            write = jnp.where(exists, refs["write_ids"][row], 0)
            # A null row loads nothing, whatever block it names.
            return jnp.where(write == 0, 0, refs["read_ids"][row]), write

        def per_channel(name, *row, first=0):
            ref = refs[name]
            lanes = pl.ds(first + start, width)
            return None if ref is None else load(ref.at[(*row, lanes)], by_channel)

        def per_state(name, row, first):
            return load(refs[name].at[row, pl.ds(first, size)], by_state)

        def begin(n):
            row, read = own[n], ids[n][0]
            token = (
                per_channel("x", row, first=first_x),
                per_channel("z", row, first=first_z),
                per_state("B", row, first_B),
                per_state("C", row, first_C),
            )
            given: Any = None if factors else per_channel("dt", row, first=first_dt)
            block = states.at[layer, read, :, lanes]
            h = read_block(states, read, lambda: load(block, layout), shape, layout)
            return token, given, h

        def end(n, steps):
            row, write = own[n], ids.pop(n)[1]
            token, given, h = begun.pop(n)

            @pl.when(write != 0)
            def _():
                step = steps() if steps else step_size(*float32([given, bias]))
                new, out = update(h, A, skip, step, token)
                store(y.at[row, lanes], out.astype(y.dtype))

                @when_inside(states, write)
                def _():
                    store(states.at[layer, write, :, lanes], new.astype(states.dtype))

            @pl.when((write == 0) & exist[n])
            def _():
                store(y.at[row, lanes], splat(0.0, (width,), by_channel, y.dtype))

        # All that can be loaded at once is, before anything is waited for.
        layer = refs["layer"][0]
        ids = {n: ids_of(n) for n in range(min(ahead + 2, count))}
        loading = factors and factors.begin(refs, shared, start, own, by_channel)
        A = load(refs["A"].at[:, lanes], layout) * LOG2_E  # for powers of two
        (skip,) = float32([per_channel("skip")])
        bias = None if factors else per_channel("dt_bias")
        begun = {n: begin(n) for n in range(ahead)}
        steps: list[Any] = [None] * count
        if factors:
            steps = factors.finish(loading, shared, by_channel)
        for n in range(count):
            end(n, steps[n])
            if n + ahead < count:
                begun[n + ahead] = begin(n + ahead)
            if n + ahead + 2 < count:
                ids[n + ahead + 2] = ids_of(n + ahead + 2)

    operands = {
        "layer": scalar_operand(layer),
        "read_ids": read_ids,
        "write_ids": write_ids,
        "x": x,
        "dt": source,
        # Channels last, as in the states. XLA hoists this out of a loop over tokens.
        "A": A.astype(jnp.float32).T,
        "B": B,
        "C": C,
        "skip": skip,
        "z": z,
        "dt_bias": dt_bias,
        "dt_weight": dt_weight,
    }
    more: dict[str, Any] = {}
    if factors:
        more = {"threads": config.warpgroups, "scratch": factors.scratch()}
    return call(
        selective_step_kernel,
        operands,
        states,
        jax.ShapeDtypeStruct((rows, channels), dtype),
        grid={"rows": -(-rows // config.rows), "channels": channels // width},
        interpret=interpret,
        **more,
    )


def product(dt: Array | Columns, dt_weight: Array, interpret: Any = None) -> Array:
    """`dt @ dt_weight.T` in a launch of its own."""
    if matmul_reason(dt, dt_weight):
        return xla.rows_matmul(sliced(dt), dt_weight, dtype=dt.dtype)
    kernel = rows_matmul if dt.shape[0] <= FEW_ROWS else batch_matmul
    return kernel(dt, dt_weight, dtype=dt.dtype, interpret=interpret)
