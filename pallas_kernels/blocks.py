"""Every gather from and scatter to a pool of state blocks: explicit mode, no negative index.

Block 0 is null: it reads as zeros whatever its bytes are, and writes to it are dropped. An id
outside the pool reads as NaN (the largest value for integers) and is dropped by writes; it is
never wrapped or clamped onto somebody else's block.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Shaped


def _fill(dtype) -> float | int | bool:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _drop_null(ids: Int[Array, "n"], blocks: int) -> Int[Array, "n"]:
    """Ids with the null id moved past the end, where a scatter drops it; int32, which has room for that."""
    ids = jnp.asarray(ids, jnp.int32)
    return jnp.where(ids == 0, blocks, ids)


def _align(mask, like):
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def read_blocks(
    pool: Shaped[Array, "layers blocks ..."], layer: int | Int[Array, ""], ids: Int[Array, "n"]
) -> Shaped[Array, "n ..."]:
    """Blocks `ids` of one layer; id 0 reads as zeros, an id outside the pool as NaN."""
    layer = jnp.asarray(layer, jnp.int32)
    values = pool.at[layer, ids].get(
        mode="fill", fill_value=_fill(pool.dtype), wrap_negative_indices=False
    )
    # A select, not a product: block 0 may hold NaN.
    return jnp.where(_align(ids == 0, values), jnp.zeros((), pool.dtype), values)


def write_blocks(
    pool: Shaped[Array, "layers blocks ..."],
    layer: int | Int[Array, ""],
    ids: Int[Array, "n"],
    values: Shaped[Array, "n ..."],
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with `values` in blocks `ids` of one layer; 0 and ids outside it are dropped."""
    layer = jnp.asarray(layer, jnp.int32)
    return pool.at[layer, _drop_null(ids, pool.shape[1])].set(
        values.astype(pool.dtype), mode="drop", wrap_negative_indices=False
    )


def update_blocks(
    pool: Float[Array, "layers blocks ..."],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "n"],
    write_ids: Int[Array, "n"],
    update: Callable[[Array, PyTree], Array],
    inputs: PyTree,
    output: Callable[[Array, PyTree], Array],
    maps: PyTree,
) -> tuple[Float[Array, "n ..."], Float[Array, "layers blocks ..."]]:
    """`state = update(block, inputs[i])` of each pair of ids, one after another in place, in float32.

    Returns `output(state, maps[i])` of each, unspecified where nothing is written, and the pool. Reads and writes as
    `read_blocks` and `write_blocks` do, but a pair reads what the pairs before it wrote.
    """
    blocks, rest = pool.shape[1], pool.shape[2:]
    layer, read_ids, write_ids = (jnp.asarray(v, jnp.int32) for v in (layer, read_ids, write_ids))
    inside = (read_ids > 0) & (read_ids < blocks)
    instead = jnp.where(read_ids == 0, jnp.float32(0), jnp.float32(jnp.nan))
    writes = (write_ids > 0) & (write_ids < blocks)
    source = jnp.where(inside, read_ids, 0)
    # A pair that must not write puts back what it has read.
    target = jnp.where(writes, write_ids, source)
    start = (jnp.int32(0),) * len(rest)

    def one(pool, pair):
        inside, instead, writes, source, target, inputs, maps = pair
        old = lax.dynamic_slice(
            pool, (layer, source, *start), (1, 1, *rest), allow_negative_indices=False
        )
        old = old.reshape(rest).astype(jnp.float32)
        new = jnp.where(writes, update(jnp.where(inside, old, instead), inputs), old)
        # One pass makes it; without the barrier it would be made twice, to be stored and for the output.
        new = lax.optimization_barrier(new)
        stored = new.reshape((1, 1, *rest)).astype(pool.dtype)
        pool = lax.dynamic_update_slice(
            pool, stored, (layer, target, *start), allow_negative_indices=False
        )
        return pool, output(new, maps)

    # Computed once, not again for every pair.
    pairs = lax.optimization_barrier((inside, instead, writes, source, target, inputs, maps))
    pool, outputs = lax.scan(one, pool, pairs)
    return outputs, pool


def fill_blocks(
    pool: Shaped[Array, "layers blocks ..."], ids: Int[Array, "n"], value
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with `value` in every element of blocks `ids`, in all layers; id 0 is dropped.

    Costs by the ids that are not dropped: of the many that a plan has room for most are 0.
    """
    ids = jnp.asarray(ids, jnp.int32)
    live = (ids > 0) & (ids < pool.shape[1])
    ids = ids[jnp.argsort(~live)]
    block = jnp.full((pool.shape[0], 1, *pool.shape[2:]), value, pool.dtype)
    start = (jnp.int32(0),) * (pool.ndim - 2)

    def fill(n, pool):
        at = lax.dynamic_index_in_dim(ids, n, keepdims=False, allow_negative_indices=False)
        return lax.dynamic_update_slice(
            pool, block, (jnp.int32(0), at, *start), allow_negative_indices=False
        )

    return lax.fori_loop(0, live.sum(), fill, pool)


def copy_blocks(
    pool: Shaped[Array, "layers blocks ..."], src: Int[Array, "n"], dst: Int[Array, "n"]
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with blocks `src` copied to blocks `dst` at once, in all layers.

    Every source is read before any destination is written. A pair is dropped when its destination
    is 0 or outside the pool; source 0 copies zeros.
    """
    values = pool.at[:, src].get(
        mode="fill", fill_value=_fill(pool.dtype), wrap_negative_indices=False
    )
    null = lax.broadcast_in_dim(src == 0, values.shape, (1,))
    values = jnp.where(null, jnp.zeros((), pool.dtype), values)
    return pool.at[:, _drop_null(dst, pool.shape[1])].set(
        values, mode="drop", wrap_negative_indices=False
    )


def gather_blocks(
    pool: Shaped[Array, "layers blocks ..."], ids: Int[Array, "n"]
) -> Shaped[Array, "layers n ..."]:
    """Blocks `ids` of all layers; id 0 reads as zeros, an id outside the pool as NaN."""
    ids = jnp.asarray(ids)
    values = pool.at[:, ids].get(
        mode="fill", fill_value=_fill(pool.dtype), wrap_negative_indices=False
    )
    null = lax.broadcast_in_dim(ids == 0, values.shape, (1,))
    return jnp.where(null, jnp.zeros((), pool.dtype), values)


def scatter_blocks(
    pool: Shaped[Array, "layers blocks ..."],
    ids: Int[Array, "n"],
    values: Shaped[Array, "layers n ..."],
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with `values` in blocks `ids` of all layers; 0 and ids outside it are dropped."""
    return pool.at[:, _drop_null(jnp.asarray(ids), pool.shape[1])].set(
        values.astype(pool.dtype), mode="drop", wrap_negative_indices=False
    )


def read_cells(table: Int[Array, "rows width"], columns: Int[Array, "rows"]) -> Int[Array, "rows"]:
    """The cell of each row at its column; 0 where the column is outside the table."""
    rows = jnp.arange(table.shape[0], dtype=jnp.int32)
    return table.at[rows, columns].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def write_cells(
    table: Int[Array, "rows width"],
    rows: Int[Array, "n"],
    columns: Int[Array, "n"],
    ids: Int[Array, "n"],
) -> Int[Array, "rows width"]:
    """The table with `ids` in the cells (rows, columns); id 0 and cells outside are dropped."""
    rows = jnp.where(jnp.asarray(ids) == 0, table.shape[0], jnp.asarray(rows))
    return table.at[rows, columns].set(
        jnp.asarray(ids, table.dtype), mode="drop", wrap_negative_indices=False
    )
