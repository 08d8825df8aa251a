"""The chunk grid: packed ragged tokens laid out in chunks aligned to each row's own start."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.rows import Rows, lengths, token_rows


class Grid(NamedTuple):
    """Chunks in row order; a chunk holds tokens of one row only, its last one may be part empty."""

    token: Int[Array, "C Q"]  # packed index, T where the slot is empty
    used: Bool[Array, "C Q"]
    row: Int[Array, "C"]
    first: Bool[Array, "C"]  # the first chunk of its row, or an unused chunk
    start: Int[Array, "R"]  # first chunk of each row
    slot: Int[Array, "T"]  # flat place in the grid of each packed token
    live: Bool[Array, "T"]  # whether a live row owns the token


def chunk_grid(rows: Rows, tokens: int, chunk: int) -> Grid:
    """Grid of `ceil(length / chunk)` chunks per row, padded to a bound that is static."""
    count = rows.read_ids.shape[0]
    # sum over rows of ceil(length / chunk), at most; no chunk is empty, so never above the tokens.
    bound = max(1, min(tokens, (tokens + count * (chunk - 1)) // chunk))
    length = lengths(rows)
    end = jnp.cumsum((length + chunk - 1) // chunk, dtype=jnp.int32)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1]])

    index = jnp.arange(bound, dtype=jnp.int32)
    row = jnp.searchsorted(end, index, side="right").astype(jnp.int32)
    filled = row < count
    row = jnp.minimum(row, count - 1)
    place = (index - start[row])[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
    used = filled[:, None] & (place < length[row][:, None])
    token = jnp.where(used, rows.offsets[row][:, None] + place, tokens)

    owner, position, live = token_rows(rows, tokens)
    slot = jnp.where(live, start[owner] * chunk + position, 0)
    return Grid(token, used, row, (index == start[row]) | ~filled, start, slot, live)


def to_grid(values: Shaped[Array, "T ..."], grid: Grid) -> Shaped[Array, "C Q ..."]:
    """Packed values laid out on the grid; empty slots are 0."""
    return values.at[grid.token].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def to_packed(values: Shaped[Array, "C Q ..."], grid: Grid) -> Shaped[Array, "T ..."]:
    """Grid values in packed order; tokens that no live row owns are exactly 0."""
    flat = values.reshape((-1, *values.shape[2:]))
    packed = flat.at[grid.slot].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    live = grid.live.reshape((-1,) + (1,) * (packed.ndim - 1))
    return jnp.where(live, packed, jnp.zeros((), packed.dtype))
