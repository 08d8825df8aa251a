"""How a packed call says which sequence owns which tokens and which state blocks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

CHUNK = 64
"""Tokens of one scan chunk: a row cut at a multiple of it gives the same bits as a row read whole."""


class Rows(NamedTuple):
    """Rows of a packed ragged call: row `r` owns tokens `offsets[r]:offsets[r + 1]`.

    Row `r` starts from block `read_ids[r]` (0: a zero state) and leaves its state in block
    `write_ids[r]`. The state after `p` tokens of this call is also stored in
    `checkpoint_ids[r, m]` for `p = checkpoint_positions[r, m]` in `1..length`; id 0 means unused.

    A row whose write id is 0 is null: its output is exactly 0 and nothing is written. A row
    without tokens writes nothing. Tokens outside `offsets[0]:offsets[R]` are padding: their
    output is exactly 0. No two rows may write the same block, nor may a row read what another
    writes: rows run in no order.
    """

    offsets: Int[Array, "R+1"]
    read_ids: Int[Array, "R"]
    write_ids: Int[Array, "R"]
    checkpoint_ids: Int[Array, "R M"]
    checkpoint_positions: Int[Array, "R M"]


class RowIds(NamedTuple):
    """The blocks that each row of a one-token decode call reads and writes; 0 is null.

    As in `Rows`, a block that is written belongs to one row.
    """

    read_ids: Int[Array, "R"]
    write_ids: Int[Array, "R"]


def lengths(rows: Rows) -> Int[Array, "R"]:
    """Number of tokens of each row."""
    return rows.offsets[1:] - rows.offsets[:-1]


def live(rows: Rows) -> Bool[Array, "R"]:
    """Whether a row has tokens and a block to leave its state in."""
    return (rows.write_ids != 0) & (lengths(rows) > 0)


def token_rows(
    rows: Rows, tokens: int
) -> tuple[Int[Array, "T"], Int[Array, "T"], Bool[Array, "T"]]:
    """Row and position within the row of each packed token, and whether a live row owns it."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    count = rows.read_ids.shape[0]
    row = jnp.searchsorted(rows.offsets[1:], token, side="right").astype(jnp.int32)
    inside = (row < count) & (token >= rows.offsets[0])
    row = jnp.minimum(row, count - 1)
    position = token - rows.offsets[row]
    return row, jnp.where(inside, position, 0), inside & live(rows)[row]


def writes(rows: Rows) -> tuple[Int[Array, "R"], Int[Array, "R M"]]:
    """Write ids and checkpoint ids with 0 wherever the contract says that nothing is written."""
    is_live = live(rows)
    position = rows.checkpoint_positions
    reached = is_live[:, None] & (position >= 1) & (position <= lengths(rows)[:, None])
    return jnp.where(is_live, rows.write_ids, 0), jnp.where(reached, rows.checkpoint_ids, 0)


def decode_rows(read_ids: Int[Array, "R"], write_ids: Int[Array, "R"]) -> Rows:
    """The packed rows of a call in which every row has one token and no checkpoint."""
    count = read_ids.shape[0]
    none = jnp.zeros((count, 0), jnp.int32)
    return Rows(jnp.arange(count + 1, dtype=jnp.int32), read_ids, write_ids, none, none)
