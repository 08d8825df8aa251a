"""Products of many rows with a large matrix, with enough of both in each program for the tensor cores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.columns import Columns, parts
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import BatchMatmulConfig, batch_matmul_config
from pallas_kernels.mosaic.matmul import padded, swizzled

LAYOUT = plgpu.Layout.WGMMA
M = 64  # rows of a tensor core's tile, one for each warpgroup that multiplies
LINE = 64  # inputs of a line of swizzled memory


def batch_matmul_kernel(
    inputs: int, first: int, config: BatchMatmulConfig, dtype: Any, interpreted: bool
) -> Callable:
    """A program per tile of rows and features, and per part of the inputs.

    One warpgroup asks for rows and matrix, the others multiply 64 rows each. Where the inputs are
    split, each program of a cluster adds what all of them have of some of the features, in order.
    """
    features, rows, split, stages = config.features, config.rows, config.split, config.stages
    multipliers = rows // M
    chunks = inputs // (split * LINE)
    alone = split == 1 or interpreted
    ranks = range(split) if alone else (None,)  # parts of the inputs that a program walks
    walked = len(ranks) * chunks
    own = features if alone else features // split  # features that a program finishes

    def batch_matmul_kernel(*refs):
        x, weight, *rest = refs
        residual: Any = rest[0] if len(rest) == 2 else None
        y = rest[-1]
        group = lax.axis_index("group")
        rank = jnp.int32(0) if alone else lax.axis_index("part")
        row = lax.axis_index("rows") * rows
        start = lax.axis_index("features") * features
        finished = pl.ds(start + rank * own, own)

        def body(memory, kept, loaded, used, more, done, summed):
            # Views of one memory: of the tensor cores, of copies, and of what follows the product.
            (ws, xs, *later), (w_copy, x_copy, *_) = (memory,) * 2 if interpreted else memory[:2]
            after: tuple[Any, ...] = (*(later if interpreted else memory[2]), None)
            out, sums = after[:2]

            def every_chunk(act):
                for index, part in enumerate(ranks):

                    @pl.loop(0, chunks)
                    def _(chunk, part=part, index=index):
                        number = index * chunks + chunk
                        at = ((rank if part is None else part) * chunks + chunk) * LINE
                        act(at, number, lax.rem(number, stages))

            def ask():
                if residual is not None:
                    plgpu.copy_gmem_to_smem(residual.at[pl.ds(row, rows), finished], kept, more)

                @every_chunk
                def _(at, number, slot):
                    @pl.when(number >= stages)
                    def _():
                        plgpu.barrier_wait(used.at[slot])

                    source = weight.at[pl.ds(start, features), pl.ds(at, LINE)]
                    plgpu.copy_gmem_to_smem(source, w_copy.at[slot], loaded.at[slot])
                    source = x.at[pl.ds(row, rows), pl.ds(first + at, LINE)]
                    plgpu.copy_gmem_to_smem(source, x_copy.at[slot], loaded.at[slot])

                # No barrier ends with a phase that nobody waited for.
                @pl.loop(max(0, walked - stages), walked)
                def _(number):
                    plgpu.barrier_wait(used.at[lax.rem(number, stages)])

            def multiply():
                mine = pl.ds(group * M, M)

                def walk(acc):
                    @every_chunk
                    def _(at, number, slot):
                        plgpu.barrier_wait(loaded.at[slot])
                        plgpu.wgmma(acc, xs.at[slot, mine], ws.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(1)  # the chunk before has been read

                        @pl.when(number > 0)
                        def _():
                            plgpu.barrier_arrive(used.at[lax.rem(number - 1, stages)])

                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(used.at[(walked - 1) % stages])
                    return acc[...]

                total = pl.run_scoped(walk, plgpu.WGMMAAccumulatorRef((M, features), jnp.float32))
                # The memory that was multiplied from is written anew.
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                if not alone:
                    for owner in range(split):
                        store(sums.at[owner, mine], total[:, owner * own : (owner + 1) * own])
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(summed)
                    plgpu.barrier_wait(summed)

                    def term(part):
                        theirs = plgpu.cluster_ref(sums.at[rank], {"part": jnp.int32(part)})
                        return load(theirs.at[mine], LAYOUT)

                    total = term(0)
                    for part in range(1, split):
                        total = total + term(part)
                if residual is not None:
                    plgpu.barrier_wait(more)
                    before = load(kept.at[mine], LAYOUT).astype(jnp.float32)
                    total = before + total.astype(dtype).astype(jnp.float32)
                store(out.at[mine], total.astype(y.dtype))
                plgpu.commit_smem()
                target = y.at[pl.ds(row + group * M, M), finished]
                plgpu.copy_smem_to_gmem(out.at[mine], target)
                if not alone:  # nobody leaves while another reads its sums
                    plgpu.barrier_arrive(summed)
                    plgpu.barrier_wait(summed)
                plgpu.wait_smem_to_gmem(0)

            pl.when(group == multipliers)(ask)
            pl.when(group < multipliers)(multiply)

        def pair(transforms):
            return (
                plgpu.SMEM((stages, features, LINE), weight.dtype, transforms=transforms),
                plgpu.SMEM((stages, rows, LINE), x.dtype, transforms=transforms),
            )

        tiled, later = swizzled(16, LINE), (plgpu.SMEM((rows, own), y.dtype),)
        if not alone:
            later = (*later, plgpu.SMEM((split, rows, own), jnp.float32))
        pl.run_scoped(
            body,
            (*pair(tiled), *later)
            if interpreted
            else plgpu.RefUnion(pair(tiled), pair(tiled[1:]), later),
            None if residual is None else plgpu.SMEM((rows, own), residual.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=multipliers, num_barriers=stages),
            None if residual is None else plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=multipliers),
            None
            if alone
            else plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=multipliers),
            collective_axes="group",
        )

    return batch_matmul_kernel


def batch_matmul(
    x: Float[Array, "R I"] | Columns,
    weight: Float[Array, "O I"],
    residual: Float[Array, "R O"] | None = None,
    *,
    dtype: Any,
    config: BatchMatmulConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "R O"]:
    """`pallas_kernels.rows_matmul` of many rows, see `batch_matmul_kernel`."""
    (rows, inputs), features = x.shape, weight.shape[0]
    kept = None if residual is None else residual.dtype
    config = config or batch_matmul_config(rows, features, inputs, kept)
    source, first = parts(x)
    grid = {"features": -(-features // config.features), "rows": -(-rows // config.rows)}
    shape = rows, features
    if interpret:  # copies clip what lies past an array's end, but interpretation raises
        shape = grid["rows"] * config.rows, grid["features"] * config.features
        source = padded(source, (shape[0], source.shape[1]))
        weight = padded(weight, (shape[1], inputs))
        residual = None if residual is None else padded(residual, shape)
    cluster = {}
    if config.split > 1 and not interpret:
        cluster = {"cluster": (config.split,), "cluster_names": ("part",)}
    y = plgpu.kernel(
        batch_matmul_kernel(inputs, first, config, dtype, bool(interpret)),
        out_type=jax.ShapeDtypeStruct(shape, dtype if residual is None else residual.dtype),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=config.rows // M + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
        **cluster,
    )(source, weight, *(() if residual is None else (residual,)))
    return y[:rows, :features] if interpret else y
