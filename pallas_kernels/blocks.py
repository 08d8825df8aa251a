"""Every gather from and scatter to a pool of state blocks: explicit mode, no negative index.

Block 0 is null: it reads as zeros whatever its bytes are, and writes to it are dropped. An id
outside the pool reads as NaN (the largest value for integers) and is dropped by writes; it is
never wrapped or clamped onto somebody else's block.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def _fill(dtype) -> float | int | bool:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _drop_null(ids: Int[Array, "n"], blocks: int) -> Int[Array, "n"]:
    """Ids with the null id moved past the end, where a scatter drops it."""
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


def fill_blocks(
    pool: Shaped[Array, "layers blocks ..."], ids: Int[Array, "n"], value
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with `value` in every element of blocks `ids`, in all layers; id 0 is dropped."""
    return pool.at[:, _drop_null(ids, pool.shape[1])].set(
        jnp.asarray(value, pool.dtype), mode="drop", wrap_negative_indices=False
    )


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
