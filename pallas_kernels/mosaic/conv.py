"""One token of a causal depthwise convolution."""

from collections.abc import Sequence
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
from pallas_kernels.mosaic.config import ConvConfig, conv_config
from pallas_kernels.mosaic.gates import float32, silu


def weigh(seen: Sequence[Any], weight: Sequence[Any], bias: Sequence[Any], activation: str | None):
    """The convolution's output from the inputs that it sees, oldest first; `bias` is one or none."""
    total, *rest = [w * v for w, v in zip(weight, seen, strict=True)]
    for term in (*rest, *bias):
        total = total + term
    return silu(total) if activation == "silu" else total


def conv_step(
    x: Float[Array, "R D"] | Columns,
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    *,
    activation: str | None = None,
    config: ConvConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.conv_step`, one program per row and channel block.

    A program owns its channels of the row's window, so read and write block may be the same.
    """
    rows, channels = x.shape
    taps, dtype = weight.shape[0], x.dtype
    x, first = parts(x)
    config = config or conv_config(rows, channels)
    width = 128 * config.width
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=config.width)

    def conv_step_kernel(refs, windows, y):
        row = lax.axis_index("row")
        start = lax.axis_index("channels") * width
        lanes = pl.ds(start, width)
        layer, read, write = refs["layer"][0], refs["read_ids"][row], refs["write_ids"][row]

        x = load(refs["x"].at[row, pl.ds(first + start, width)], layout)
        weight = [load(refs["weight"].at[tap, lanes], layout) for tap in range(taps)]
        bias = [] if refs["bias"] is None else [load(refs["bias"].at[lanes], layout)]

        @pl.when(write != 0)
        def _():
            def stored():
                return [load(windows.at[layer, read, k, lanes], layout) for k in range(taps - 1)]

            def absent():
                fill = jnp.where(read == 0, 0.0, jnp.nan)
                return [splat(fill, (width,), layout, windows.dtype)] * (taps - 1)

            seen = [*lax.cond(inside(windows, read), stored, absent), x]
            seen = float32(seen)
            total = weigh(seen, float32(weight), float32(bias), activation)
            store(y.at[row, lanes], total.astype(y.dtype))

            @when_inside(windows, write)
            def _():
                for k in range(taps - 1):
                    kept = seen[k + 1].astype(windows.dtype)
                    store(windows.at[layer, write, k, lanes], kept)

        @pl.when(write == 0)
        def _():
            store(y.at[row, lanes], splat(0.0, (width,), layout, y.dtype))

    operands = {
        "layer": scalar_operand(layer),
        "read_ids": read_ids,
        "write_ids": write_ids,
        "x": x,
        "weight": weight,
        "bias": bias,
    }
    return call(
        conv_step_kernel,
        operands,
        windows,
        jax.ShapeDtypeStruct((rows, channels), dtype),
        grid={"row": rows, "channels": channels // width},
        interpret=interpret,
    )
