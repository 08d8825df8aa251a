"""A projection of few rows and one token of the convolution that follows it, in one launch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.columns import Columns, sliced
from pallas_kernels.mosaic.blocks import inside, when_inside
from pallas_kernels.mosaic.call import scalar_operand
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import MatmulConfig, norms_within, projected_conv_config
from pallas_kernels.mosaic.conv import weigh
from pallas_kernels.mosaic.gates import float32
from pallas_kernels.mosaic.matmul import Epilogue, Tile, launch, padded_shape
from pallas_kernels.mosaic.norm import LINES, rms_norm

BY_ROW, BY_CHANNEL = LINES.reduce(1), LINES.reduce(0)
LEAST_IDS = 32  # the fewest that a copy takes
MOST_ROWS = 32  # of which a program's registers have room
WARPS = 4


class Memory(NamedTuple):
    """What a program keeps of its rows: ids to read and to write, windows, the convolution's weights."""

    ids: Any
    windows: Any
    weight: Any
    bias: Any
    named: Any  # barrier of the ids
    loaded: Any  # barrier of everything else


def spread(vector, shape: tuple[int, int], axis: int):
    """A vector along one axis of a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), LINES)


def conv_epilogue(
    taps: int, channels: int, first: int, dtypes: Mapping[str, Any], activation: str | None
) -> Epilogue:
    """The convolution of `channels` features from `first` on, each program in those that it finishes.

    No other program knows their windows, so that read and write block may be the same.
    """

    def scratch(rows: int, features: int) -> Memory:
        bias = None
        if dtypes["bias"] is not None:
            bias = plgpu.SMEM((features,), dtypes["bias"])
        return Memory(
            plgpu.SMEM((2, max(rows, LEAST_IDS)), jnp.int32),
            plgpu.SMEM((rows, taps - 1, features), dtypes["windows"]),
            plgpu.SMEM((taps, features), dtypes["weight"]),
            bias,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=rows + (1 if bias is None else 2)),
        )

    def begin(refs, memory: Memory, tile: Tile):
        layer, read_ids, write_ids, weight, *bias, windows = refs
        layer = layer[0]
        active = (tile.feature >= first) & (tile.feature < first + channels) & tile.owned
        lanes = pl.ds(tile.feature - first, tile.features)
        # Behind the first pieces of the matrix, and windows when the ids are there.
        late = 4 if tile.turns >= 16 else 0
        # Rows whose windows are asked for in a turn, so that all are there in time.
        each = tile.rows
        while each > 1 and 2 * tile.rows <= each // 2 * tile.turns:
            each //= 2

        def fetch():
            for n, ids in enumerate((read_ids, write_ids)):
                named = ids.at[pl.ds(tile.row, memory.ids.shape[1])]
                plgpu.copy_gmem_to_smem(named, memory.ids.at[n], memory.named)
            plgpu.copy_gmem_to_smem(weight.at[:, lanes], memory.weight, memory.loaded)
            for ref in bias:
                plgpu.copy_gmem_to_smem(ref.at[lanes], memory.bias, memory.loaded)

        def turn(chunk):
            pl.when(active & (chunk == 0))(fetch)
            first_row = (chunk - late) * each

            @pl.when(active & (first_row >= 0) & (first_row < tile.rows))
            def _():
                pl.when(first_row == 0)(lambda: plgpu.barrier_wait(memory.named))
                places = [first_row + n for n in range(each)]
                for place, block in [(place, memory.ids[0, place]) for place in places]:
                    # The null block in place of one that may not be read; nobody looks at it.
                    block = jnp.where(inside(windows, block), block, 0)
                    source = windows.at[layer, block, :, lanes]
                    plgpu.copy_gmem_to_smem(source, memory.windows.at[place], memory.loaded)

        shape = min(tile.rows, MOST_ROWS), tile.features

        def convolve(out, start: int, weight, bias):
            rows = pl.ds(start, shape[0])

            def across(n):
                return spread(load(memory.ids.at[n, rows], BY_ROW), shape, 0)

            read, write = across(0), across(1)
            there, absent = inside(windows, read), jnp.where(read == 0, 0.0, jnp.nan)
            seen = [load(memory.windows.at[rows, k], LINES) for k in range(taps - 1)]
            seen = [jnp.where(there, value, absent) for value in float32(seen)]
            seen += float32([load(out.at[rows], LINES)])
            y = weigh(seen, weight, bias, activation)
            store(out.at[rows], jnp.where(write == 0, 0.0, y).astype(out.dtype))
            for k, value in enumerate(seen[1:]):
                store(memory.windows.at[rows, k], value.astype(windows.dtype))

        def end(out):
            @pl.when(active)
            def _():
                plgpu.barrier_wait(memory.loaded)
                weight = [load(memory.weight.at[k], BY_CHANNEL) for k in range(taps)]
                vectors = weight + [load(memory.bias, BY_CHANNEL) for _ in bias]
                vectors = [spread(vector, shape, 1) for vector in float32(vectors)]
                for start in range(0, tile.rows, shape[0]):
                    convolve(out, start, vectors[:taps], vectors[taps:])
                plgpu.commit_smem()

                @plgpu.warp_map
                def _(warp):
                    own = tile.rows // WARPS
                    places = [warp * own + n for n in range(own)]
                    for place, block in [(place, memory.ids[1, place]) for place in places]:

                        @when_inside(windows, block)
                        def _(place=place, block=block):
                            target = windows.at[layer, block, :, lanes]
                            plgpu.copy_smem_to_gmem(memory.windows.at[place], target)

        return turn, end

    return Epilogue(first, scratch, begin)


def projected_conv_step(
    x: Float[Array, "R I"] | Columns,
    weight: Float[Array, "O I"],
    conv_weight: Float[Array, "K D"],
    conv_bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    norm_weight: Float[Array, "I"] | None = None,
    *,
    first: int,
    eps: float = 0.0,
    activation: str | None = None,
    config: MatmulConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R O"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.projected_conv_step`, see `conv_epilogue`."""
    rows, (features, inputs), (taps, channels) = x.shape[0], weight.shape, conv_weight.shape
    norm = None if norm_weight is None else (norm_weight, eps)
    config = config or projected_conv_config(rows, features, inputs, taps, norm is not None)
    if norm is not None and not norms_within(rows, inputs, config):
        x, norm = rms_norm(sliced(x), norm[0], eps=eps, interpret=interpret), None
    if norm is not None:
        x = sliced(x)
    ids = [ids.astype(jnp.int32) for ids in (read_ids, write_ids)]
    if interpret:  # as copies do, which give zeros past an array's end
        more = padded_shape(rows, 0, config)[0] + LEAST_IDS - rows
        ids = [jnp.pad(array, (0, more)) for array in ids]
    vectors = (conv_weight,) if conv_bias is None else (conv_weight, conv_bias)
    dtypes = {
        "windows": windows.dtype,
        "weight": conv_weight.dtype,
        "bias": None if conv_bias is None else conv_bias.dtype,
    }
    ref = jax.new_ref(windows)
    y = launch(
        x,
        weight,
        (scalar_operand(layer), *ids, *vectors, ref),
        dtype=weight.dtype,
        kept=weight.dtype,
        config=config,
        epilogue=conv_epilogue(taps, channels, first, dtypes, activation),
        norm=norm,
        interpret=interpret,
    )
    return y, jax.freeze(ref)
