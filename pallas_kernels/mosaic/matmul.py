"""Products of few rows with a large matrix, at the speed at which the matrix can be read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.columns import Columns, parts
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import MatmulConfig, matmul_config, matmul_line
from pallas_kernels.mosaic.norm import LINES, lines_of, normed

LAYOUT, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
MULTIPROCESSORS = 132


class Sizes(NamedTuple):
    """What a program needs to know of its call."""

    inputs: int
    first: int  # column of the inputs' array at which they begin
    line: int  # inputs of a line of swizzled memory
    tiles: int  # of features


class Tile(NamedTuple):
    """What a program finishes of a product: `rows` rows from `row` on, `features` from `feature` on."""

    row: Any
    rows: int
    feature: Any
    features: int
    turns: int  # of the loop over its inputs
    owned: Any  # whether the program finishes any


class Norm(NamedTuple):
    """The norm of `rows` rows in the program itself; they lie as lines (see `norm.LINES`)."""

    rows: int
    eps: float


class Epilogue(NamedTuple):
    """What a program does with its tile of the product before it leaves.

    `scratch(rows, features)` is the memory that it needs. `begin(refs, scratch, tile)` starts to load what it needs;
    of the two functions that it returns one is called in each turn of the loop, the other with the rounded tile.
    """

    first: int  # feature for which there is something to do
    scratch: Callable[[int, int], Any]
    begin: Callable[[Any, Any, Tile], tuple[Callable[[Any], None], Callable[[Any], None]]]


def swizzled(bits: int, line: int) -> tuple[Any, ...]:
    """Transforms of tiles of 8 lines; that of the lines is the last."""
    swizzle = plgpu.SwizzleTransform(line * bits // 8)  # pyright: ignore[reportAbstractUsage]
    return plgpu.TilingTransform((8, line)), swizzle  # pyright: ignore[reportAbstractUsage]


def rows_matmul_kernel(
    sizes: Sizes,
    config: MatmulConfig,
    dtype: Any,
    interpreted: bool,
    epilogue: Epilogue | None = None,
    norm: Norm | None = None,
) -> Callable:
    """A cluster of programs per tile of features and rows, each with its share of the inputs.

    Features are the rows of the tensor core's product and rows its columns, so that few rows waste
    nothing. Each program of a cluster adds what all of them have of some of the rows, in order.
    """
    inputs, first, line, tiles = sizes
    split, stages = config.split, config.stages
    owners = 1 if interpreted else min(split, config.rows // 8)
    own = config.rows // owners  # rows that a program finishes
    width = config.chunk * line
    chunks = inputs // (split * width)
    # A copy takes at most 256 features.
    box = next(n for n in (256, 192, 160, 128, 64) if config.features % n == 0)
    boxes = range(0, config.features, box)

    def rows_matmul_kernel(*refs):
        x, weight, *rest, y = refs
        scale: Any = None if norm is None else rest.pop(0)
        residual: Any = rest[0] if rest and epilogue is None else None
        place = lax.axis_index("features")
        if epilogue is not None and tiles > MULTIPROCESSORS:
            # Whoever shares a multiprocessor is done last; those with more to do have one each.
            ahead = epilogue.first // config.features - (tiles - MULTIPROCESSORS)
            place = lax.rem(place + (ahead + tiles), tiles)
        start = place * config.features
        row = lax.axis_index("rows") * config.rows
        rank = lax.axis_index("part") if split > 1 and not interpreted else 0

        def body(memory, out: Any, kept: Any, loaded, more, summed, scratch):
            # Views of one memory: of the tensor cores, of copies, and of what follows the product.
            (ws, xs), (w_copy, x_copy), (_, x_plain), later = (
                (memory, memory, memory, None) if interpreted else memory
            )
            out, sums = (later, None) if out is None else (out, later)

            def fetch(part, chunk):
                slot = lax.rem(chunk, stages)
                for k in range(config.chunk):
                    at = (part * chunks + chunk) * width + k * line
                    for piece in boxes:
                        source = weight.at[pl.ds(start + piece, box), pl.ds(at, line)]
                        target = w_copy.at[slot, k, pl.ds(piece, box)]
                        plgpu.copy_gmem_to_smem(source, target, loaded.at[slot])
                    if norm is None:
                        source = x.at[pl.ds(row, config.rows), pl.ds(first + at, line)]
                        plgpu.copy_gmem_to_smem(source, x_copy.at[slot, k], loaded.at[slot])

            def prepare(norm):
                """All inputs, normed. The matrix is on its way meanwhile."""
                rows = [load(x.at[row], LINES).astype(jnp.float32) for row in range(norm.rows)]
                weights = load(scale, LINES).astype(jnp.float32)
                for row, value in enumerate(rows):
                    value = normed(value, weights, norm.eps, inputs).astype(weight.dtype)
                    store(x_plain.at[:, 0, row], value)
                if not interpreted:  # where they lie is not where the tensor cores look for them
                    plgpu.commit_smem()
                    tiles = [load(x_plain.at[n, 0], LINES) for n in range(inputs // line)]
                    plgpu.commit_smem()
                    for n, tile in enumerate(tiles):
                        store(xs.at[n, 0], tile)
                plgpu.commit_smem()

            def multiply(part, turn=None):
                def walk(acc):
                    for chunk in range(min(stages, chunks)):
                        fetch(part, jnp.int32(chunk))
                    if norm is not None:
                        prepare(norm)

                    @pl.loop(0, chunks)
                    def _(chunk):
                        if turn is not None:
                            turn(chunk)
                        slot = lax.rem(chunk, stages)
                        plgpu.barrier_wait(loaded.at[slot])
                        place = slot if norm is None else chunk
                        for k in range(config.chunk):
                            plgpu.wgmma(acc, ws.at[slot, k], xs.at[place, k].transpose((1, 0)))
                        plgpu.wgmma_wait(config.chunk)
                        following = chunk - 1 + stages

                        @pl.when((chunk > 0) & (following < chunks))
                        def _():
                            plgpu.commit_smem()  # all warps have read what is fetched anew
                            fetch(part, following)

                    return acc[...]

                shape = (config.features, config.rows)
                total = pl.run_scoped(walk, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
                plgpu.commit_smem()  # all warps have read what is written anew
                return total

            def fetch_residual():
                for piece in boxes:
                    at = pl.ds(row + rank * own, own), pl.ds(start + piece, box)
                    target = kept.at[:, pl.ds(piece, box)]
                    plgpu.copy_gmem_to_smem(residual.at[*at], target, more)

            def finish(total):
                total = plgpu.layout_cast(total, TRANSPOSED)
                if residual is not None:
                    plgpu.barrier_wait(more)
                    before = load(kept.transpose((1, 0)), TRANSPOSED).astype(jnp.float32)
                    total = before + total.astype(dtype).astype(jnp.float32)
                store(out.transpose((1, 0)), total.astype(y.dtype))
                plgpu.commit_smem()
                if end is not None:
                    end(out)
                for piece in boxes:
                    at = pl.ds(row + rank * own, own), pl.ds(start + piece, box)
                    plgpu.copy_smem_to_gmem(out.at[:, pl.ds(piece, box)], y.at[*at])

            def meet():
                plgpu.barrier_arrive(summed)
                plgpu.barrier_wait(summed)

            alone = sums is None
            if residual is not None:
                pl.when(rank < owners)(fetch_residual)
            turn = end = None
            if epilogue is not None:
                tile = Tile(row + rank * own, own, start, config.features, chunks, rank < owners)
                turn, end = epilogue.begin(rest, scratch, tile)
            if alone:
                total = multiply(0, turn)
                for part in range(1, split):
                    total = total + multiply(part)
                finish(total)
            else:
                total = multiply(rank, turn)
                for owner in range(owners):
                    sums[owner] = total[:, owner * own : (owner + 1) * own]
                plgpu.commit_smem()
                meet()

                @pl.when(rank < owners)
                def _():
                    def term(part):
                        theirs = plgpu.cluster_ref(sums.at[rank], {"part": jnp.int32(part)})
                        return load(theirs, LAYOUT)

                    total = term(0)
                    for part in range(1, split):
                        total = total + term(part)
                    finish(total)

                meet()  # nobody leaves while another reads its sums
            plgpu.wait_smem_to_gmem(0)

        def pair(transforms):
            def stage(stages, count):
                shape = (stages, config.chunk, count, line)
                return plgpu.SMEM(shape, weight.dtype, transforms=transforms)

            held = stages if norm is None else chunks
            return stage(stages, config.features), stage(held, config.rows)

        alone = split == 1 or interpreted
        copies = config.chunk * (len(boxes) + (1 if norm is None else 0))
        tile, tiled = (own, config.features), swizzled(16, line)
        out = plgpu.SMEM(tile, y.dtype)
        sums = plgpu.SMEM(
            (owners, config.features, own), jnp.float32, transforms=swizzled(32, min(own, 32))
        )
        views = pair(tiled), pair(tiled[1:]), pair(()), out if alone else sums
        pl.run_scoped(
            body,
            views[0] if interpreted else plgpu.RefUnion(*views),
            out if interpreted or not alone else None,
            None if residual is None else plgpu.SMEM(tile, residual.dtype),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            None if residual is None else plgpu.Barrier(num_arrivals=len(boxes)),
            None if alone else plgpu.ClusterBarrier(collective_axes=("part",)),
            None if epilogue is None else epilogue.scratch(own, config.features),
        )

    return rows_matmul_kernel


def rows_matmul(
    x: Float[Array, "R I"] | Columns,
    weight: Float[Array, "O I"],
    residual: Float[Array, "R O"] | None = None,
    *,
    dtype: Any,
    config: MatmulConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "R O"]:
    """`pallas_kernels.rows_matmul`, see `rows_matmul_kernel`."""
    config = config or matmul_config(x.shape[0], *weight.shape)
    if interpret and residual is not None:
        residual = padded(residual, padded_shape(x.shape[0], weight.shape[0], config))
    more = () if residual is None else (residual,)
    kept = dtype if residual is None else residual.dtype
    return launch(x, weight, more, dtype=dtype, kept=kept, config=config, interpret=interpret)


def launch(
    x: Float[Array, "R I"] | Columns,
    weight: Float[Array, "O I"],
    more: tuple[Any, ...],
    *,
    dtype: Any,
    kept: Any,
    config: MatmulConfig,
    epilogue: Epilogue | None = None,
    norm: tuple[Float[Array, "I"], float] | None = None,
    interpret: Any = None,
) -> Float[Array, "R O"]:
    """The product rounded to `dtype` and kept as `kept`, with `more` operands for what follows it.

    With a `norm`, its weight and epsilon, it is that of the rows' norms.
    """
    (rows, inputs), features = x.shape, weight.shape[0]
    source, first = parts(x)
    grid = {"features": -(-features // config.features), "rows": -(-rows // config.rows)}
    shape = rows, features
    if interpret:  # copies clip what lies past an array's end, but interpretation raises
        shape = padded_shape(rows, features, config)
        if norm is None:
            source = padded(source, (shape[0], source.shape[1]))
        weight = padded(weight, (shape[1], inputs))
    within = None
    if norm is not None:
        lines = lines_of(inputs)
        source, more = source.reshape((rows, *lines)), (norm[0].reshape(lines), *more)
        within = Norm(rows, norm[1])
    sizes = Sizes(inputs, first, matmul_line(inputs), grid["features"])
    kernel = rows_matmul_kernel(sizes, config, dtype, bool(interpret), epilogue, within)
    cluster = {}
    if config.split > 1 and not interpret:
        cluster = {"cluster": (config.split,), "cluster_names": ("part",)}
    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, kept),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        **cluster,
    )(source, weight, *more)
    return y[:rows, :features] if interpret else y


def padded_shape(rows: int, features: int, config: MatmulConfig) -> tuple[int, int]:
    """The sizes of a product in whole tiles."""
    return -(-rows // config.rows) * config.rows, -(-features // config.features) * config.features


def padded(array: Array, shape: tuple[int, int]) -> Array:
    """The array with NaN after its rows and columns."""
    more = [(0, size - own) for own, size in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, more, constant_values=jnp.nan)
