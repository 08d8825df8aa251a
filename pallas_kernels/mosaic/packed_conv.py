"""A causal depthwise convolution of packed rows.

A program walks a few tokens of one row in one block of channels, all loads under way at once. Tiles
begin at a row's own start, so that none has two rows.
"""

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
from pallas_kernels.mosaic.config import CausalConvConfig, causal_conv_config
from pallas_kernels.mosaic.conv import weigh
from pallas_kernels.mosaic.gates import float32
from pallas_kernels.rows import Rows, live, writes

NULL = -1  # in place of a row, where outputs are zero


def tile_table(rows: Rows, tokens: int, tile: int) -> Int[Array, "tiles 3"]:
    """Row (or NULL), first token and number of tokens of every tile.

    Tile `i` of row `r` is at `offsets[r] // tile + r + i`, where no two rows meet. What lies before
    the first row and after the last one counts as a row at either end.
    """
    count = rows.read_ids.shape[0]
    ends = [jnp.zeros(1, jnp.int32), rows.offsets, jnp.full(1, tokens, jnp.int32)]
    bounds = jnp.concatenate(ends)
    owners = jnp.where(live(rows), jnp.arange(count, dtype=jnp.int32), NULL)
    owners = jnp.pad(owners, 1, constant_values=NULL)
    first = bounds[:-1] // tile + jnp.arange(count + 2, dtype=jnp.int32)
    place = jnp.arange(tokens // tile + count + 2, dtype=jnp.int32)
    span = jnp.sum(first <= place[:, None], axis=1) - 1
    start = (place - first[span]) * tile + bounds[span]
    size = jnp.clip(bounds[span + 1] - start, 0, tile)
    return jnp.stack([owners[span], start, size], axis=1)


def causal_conv(
    x: Float[Array, "T D"] | Columns,
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    activation: str | None = None,
    config: CausalConvConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.causal_conv`, one program per tile of tokens and channel block.

    The program of a row's first tile, which alone reads the row's window, also stores what is left in
    its blocks: read and write block may be the same.
    """
    tokens, channels = x.shape
    kept, checkpoints, dtype = weight.shape[0] - 1, rows.checkpoint_ids.shape[1], x.dtype
    x, first_column = parts(x)
    config = config or causal_conv_config(tokens, channels)
    tile, unroll, width = config.tokens, config.unroll, 128 * config.width
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=config.width)

    def causal_conv_kernel(refs, windows, y):
        place, begin = lax.axis_index("tile"), lax.axis_index("channels") * width
        lanes, columns = pl.ds(begin, width), pl.ds(first_column + begin, width)
        row, start, size = (refs["tiles"][place, n] for n in range(3))

        def token(t):
            return load(refs["x"].at[t, columns], layout)

        def walk():
            owner = jnp.maximum(row, 0)
            first, last = refs["offsets"][owner], refs["offsets"][owner + 1]
            layer, read = refs["layer"][0], refs["read_ids"][owner]
            weight = float32(load(refs["weight"].at[k, lanes], layout) for k in range(kept + 1))
            bias = [] if refs["bias"] is None else [load(refs["bias"].at[lanes], layout)]

            def window():
                def of(k):
                    return load(windows.at[layer, read, k, lanes], layout)

                return [
                    read_block(windows, read, lambda k=k: of(k), (width,), layout)
                    for k in range(kept)
                ]

            def tokens_before():
                return float32(token(start - kept + k) for k in range(kept))

            def convolve(seen):
                return weigh(seen, weight, float32(bias), activation).astype(y.dtype)

            def is_whole(piece):
                return (piece + 1) * unroll <= size

            def fetch(piece):
                """A piece's tokens; nothing waits for them yet. Past the end it is the row's last token."""
                at = start + piece * unroll

                def clamped():
                    return [token(jnp.minimum(at + n, last - 1)) for n in range(unroll)]

                return lax.cond(
                    is_whole(piece), lambda: [token(at + n) for n in range(unroll)], clamped
                )

            def turn(piece, carry):
                seen, values = carry
                following = fetch(piece + 1)
                at, seen = start + piece * unroll, [*seen, *float32(values)]
                outs = [convolve(seen[n : n + kept + 1]) for n in range(unroll)]

                @pl.when(is_whole(piece))
                def _():
                    for n, out in enumerate(outs):
                        store(y.at[at + n, lanes], out)

                @pl.when(~is_whole(piece))
                def _():
                    for n, out in enumerate(outs):
                        pl.when(piece * unroll + n < size)(
                            lambda n=n, out=out: store(y.at[at + n, lanes], out)
                        )

                return seen[unroll:], following

            seen = lax.cond(start == first, window, tokens_before)
            pieces = lax.div(size + (unroll - 1), unroll)
            lax.fori_loop(0, pieces, turn, (seen, fetch(0)))

            def leave(block, position):
                """Stores the window after `position` tokens."""

                @when_inside(windows, block)
                def _():
                    before, values = window(), []
                    for k in range(kept):
                        back = position - kept + k
                        value = token(first + jnp.maximum(back, 0)).astype(jnp.float32)
                        for older in range(k + 1, kept):
                            value = jnp.where(back == older - kept, before[older], value)
                        values.append(value)
                    for k, value in enumerate(values):
                        store(windows.at[layer, block, k, lanes], value.astype(windows.dtype))

            @pl.when(start == first)
            def _():
                if checkpoints:

                    @pl.loop(0, checkpoints)
                    def _(m):
                        leave(refs["points"][owner, m], refs["positions"][owner, m])

                leave(refs["write_ids"][owner], last - first)

        @pl.when((row == NULL) & (size > 0))
        def _():
            nothing = splat(0.0, (width,), layout, y.dtype)

            @pl.loop(0, size)
            def _(n):
                store(y.at[start + n, lanes], nothing)

        pl.when((row != NULL) & (size > 0))(walk)

    operands = {
        "layer": scalar_operand(layer),
        "tiles": tile_table(rows, tokens, tile),
        "offsets": rows.offsets,
        "read_ids": rows.read_ids,
        "write_ids": rows.write_ids,
        "x": x,
        "weight": weight,
        "bias": bias,
    }
    if checkpoints:
        operands |= {"points": writes(rows)[1], "positions": rows.checkpoint_positions}
    return call(
        causal_conv_kernel,
        operands,
        windows,
        jax.ShapeDtypeStruct((tokens, channels), dtype),
        grid={"tile": operands["tiles"].shape[0], "channels": channels // width},
        threads=1,
        interpret=interpret,
    )
