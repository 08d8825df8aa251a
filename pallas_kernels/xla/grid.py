"""The chunk grid: packed ragged tokens laid out in chunks aligned to each row's own start."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.rows import Rows, lengths, token_rows, writes


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


def chain(
    grid: Grid,
    decay: Float[Array, "C ..."],
    own: Float[Array, "C ..."],
    initial: Float[Array, "R ..."],
) -> tuple[Float[Array, "C ..."], Float[Array, "C ..."]]:
    """States at the start and at the end of each chunk: `end = decay * start + own`.

    One chunk after the other, so that the bits do not depend on where a prompt was split.
    """

    def advance(state, chunk):
        row, first, decay, own = chunk
        start = jnp.where(first, initial[row], state)
        end = decay * start + own
        return end, (start, end)

    _, states = lax.scan(advance, jnp.zeros_like(initial[0]), (grid.row, grid.first, decay, own))
    return states


def last_chunks(grid: Grid, rows: Rows, chunk: int) -> Int[Array, "R"]:
    """The chunk that holds each row's last token; some chunk for a row without tokens."""
    last = grid.start + (jnp.maximum(lengths(rows), 1) - 1) // chunk
    return jnp.minimum(last, grid.row.shape[0] - 1)


class Places(NamedTuple):
    """Where checkpoints lie on the grid, one after the other."""

    chunk: Int[Array, "R*M"]
    mask: Bool[Array, "R*M Q"]  # the slots of the chunk up to the checkpoint
    whole: Bool[Array, "R*M"]  # nothing of the row follows in the chunk
    asked: Bool[Array, "R*M"]


def checkpoint_places(grid: Grid, rows: Rows, chunk: int) -> Places:
    """Places of `rows.checkpoint_positions`; those that are not asked for lie anywhere."""
    length = lengths(rows)[:, None]
    position = jnp.clip(rows.checkpoint_positions, 1, jnp.maximum(length, 1))
    index = jnp.minimum(grid.start[:, None] + (position - 1) // chunk, grid.row.shape[0] - 1)
    taken = (position - 1) % chunk + 1
    mask = jnp.arange(chunk) < taken[..., None]
    whole = (taken == chunk) | (position == length)
    asked = writes(rows)[1] != 0
    return Places(index.ravel(), mask.reshape((-1, chunk)), whole.ravel(), asked.ravel())


def select_checkpoints(
    places: Places, ends: Float[Array, "C ..."], inside: Callable[[], Float[Array, "R*M ..."]]
) -> Float[Array, "R*M ..."]:
    """States at the checkpoints: the carried one at a chunk's end, else from `inside`.

    `inside` runs only if a checkpoint lies within a chunk.
    """
    carried = ends[places.chunk]
    needed = jnp.any(places.asked & ~places.whole)
    states = lax.cond(needed, inside, lambda: carried)
    return jnp.where(places.whole.reshape((-1,) + (1,) * (carried.ndim - 1)), carried, states)
