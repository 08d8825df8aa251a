"""Pieces of Mamba-2's prefill kernels: chunks of a row, their decays, and what is made of them.

Dao & Gu 2024, arXiv:2405.21060, section 6. All decays are exp2 of differences of one cumulative
sum, so that nothing is divided by a decay that may be 0. A chunk that its row does not fill counts
the missing tokens as steps of size 0, and their inputs, which are another row's, are replaced by
zeros: 0 times NaN is NaN.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic.blocks import inside, splat
from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.rows import CHUNK, Rows
from pallas_kernels.xla.gates import step_size

Q = CHUNK
P = 64  # rows of a head's state in a program
W = 64  # columns of a tile: what a line of swizzled memory holds
LAYOUT = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
SWIZZLED = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]
TILED = (plgpu.TilingTransform((8, W)), *SWIZZLED)  # pyright: ignore[reportAbstractUsage]
LOG2E = math.log2(math.e)
NEVER = 2**31 - 1


class Tile(NamedTuple):
    """A row's tokens, and the part of a head that a program computes of them."""

    row: Any
    head: Any
    part: Any
    start: Any
    length: Any

    @property
    def chunks(self):
        return lax.div(self.length + (Q - 1), Q)

    def lanes(self, first: int, width: int):
        """Columns of a program's part of its head, of heads `width` wide that begin at column `first`."""
        return pl.ds(first + self.head * width + self.part * P, P)

    def place(self, chunk):
        """Where the steps of a chunk are; see `chunk_steps`."""
        return lax.div(self.start, Q) + self.row + chunk

    def valid(self, chunk):
        """Tokens of the row from a chunk's start on; the chunk is full if they are Q or more."""
        return self.length - chunk * Q


class Decays(NamedTuple):
    """Logs to base 2 of the decays of a chunk, and what they make of its tokens."""

    log: Any  # from the chunk's start through each token
    own: Any  # `log` less the log of the token's step
    weight: Any  # step times decay to the chunk's end
    total: Any  # decay over the chunk, once per row of the state


def across(vector, shape):
    """One value per row."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def down(vector, shape):
    """One value per column."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def iota(shape, axis: int, layout: Any = LAYOUT):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def causal():
    return iota((Q, Q), 1) <= iota((Q, Q), 0)


def chunk_decays(dt, A, valid=None) -> Decays:
    """The decays of one chunk, up to token `valid` if it is given; `dt` is a ref to its steps."""
    step = load(dt, BY_ROW)
    # exp2(-150) is 0 in float32; the bound keeps the digits of the sums.
    log = jnp.maximum(load(dt, BY_COLUMN) * (A * LOG2E), -150.0)
    if valid is not None:
        step = jnp.where(iota((Q,), 0, BY_ROW) < valid, step, splat(0.0, (Q,), BY_ROW))
        log = jnp.where(iota((Q,), 0, BY_COLUMN) < valid, log, splat(0.0, (Q,), BY_COLUMN))
    log = down(log, (Q, Q))
    total = jnp.sum(log, axis=1)
    log = jnp.sum(jnp.where(causal(), log, splat(0.0, (Q, Q), LAYOUT)), axis=1)
    weight = step * jnp.exp2(total - log)
    return Decays(log, log - jnp.log(step) * LOG2E, weight, jnp.exp2(total))


def keep_rows(ref, valid) -> None:
    """Zeros in place of the rows of a tile from `valid` on."""
    value = plgpu.load(ref, layout=LAYOUT)
    zero = splat(0.0, value.shape, LAYOUT, value.dtype)
    ref[...] = jnp.where(iota(value.shape, 0) < valid, value, zero)


def tile_memory(dtype, interpreted: bool):
    """Shared memory of tiles `[..., rows, W]`, as `operand_and_copy` takes it apart."""

    def of(*shape):
        tiled, plain = (plgpu.SMEM(shape, dtype, transforms=t) for t in (TILED, SWIZZLED))
        return tiled if interpreted else plgpu.RefUnion(tiled, plain)

    return of


def operand_and_copy(ref, interpreted: bool):
    """Two views of one piece of shared memory: of the tensor cores, and of copies.

    The tensor cores want it in tiles of 8 rows, and copies between such tiles and an array would
    have to start at a multiple of 8. Tiles as wide as a swizzled line lie one after the other, so
    that they are the lines of a plain array.
    """
    return (ref, ref) if interpreted else ref


def result(acc, pending: int = 0):
    """What an accumulator holds once at most `pending` products are under way."""
    # The barrier: the wait for the product has no data dependence on it.
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=pending))


def weigh(x, weight, weighted) -> None:
    """Writes a chunk's inputs, each times its weight."""
    value = plgpu.load(x, layout=LAYOUT).astype(jnp.float32) * across(weight, (Q, P))
    weighted[...] = value.astype(weighted.dtype)


def advance(state, total, weighted, B) -> tuple[Any, ...]:
    """The state at the end of a chunk, by tiles of its columns; `B` holds theirs."""
    shape = (P, W)

    def multiply(*owns):
        for k, own in enumerate(owns):
            plgpu.wgmma(own, weighted.transpose((1, 0)), B[k])
        waiting = reversed(range(len(owns)))
        return [
            h * across(total, shape) + result(own, n)
            for h, own, n in zip(state, owns, waiting, strict=True)
        ]

    return tuple(
        pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(state))
    )


def columns(k: int, first=0):
    return pl.ds(first + k * W, W)


class Points:
    """Checkpoints of one row: which chunk starts they lie at, or in the chunk that begins there."""

    def __init__(self, refs, row, length, pool):
        self.ids, self.positions = refs["checkpoint_ids"], refs["checkpoint_positions"]
        self.row, self.length, self.pool = row, length, pool
        self.count = 0 if self.ids is None else self.ids.shape[1]

    def at(self, m):
        """Block and position of a checkpoint; block 0 where nothing is to be written."""
        block, position = self.ids[self.row, m], self.positions[self.row, m]
        asked = (position >= 1) & (position <= self.length) & inside(self.pool, block)
        return jnp.where(asked, block, 0), position

    def after(self, chunks):
        """The first number of chunks above `chunks` that has a checkpoint."""

        def sooner(m, best):
            block, position = self.at(m)
            place = lax.div(position, Q)
            return jnp.where((block > 0) & (place > chunks), jnp.minimum(best, place), best)

        return lax.fori_loop(0, self.count, sooner, jnp.int32(NEVER)) if self.count else NEVER

    def store(self, chunks, write: Callable):
        """Calls `write(block)` for every checkpoint at `chunks` chunks."""
        if not self.count:
            return

        @pl.loop(0, self.count)
        def _(m):
            block, position = self.at(m)

            @pl.when((block > 0) & (lax.div(position, Q) == chunks))
            def _():
                write(block)


def find_tile(
    refs, rows: int, tokens: int, parts: int, segments: int
) -> tuple[Tile, Any, Any, Any]:
    """Tile of a program, the segment of the row, and the blocks that are read and written.

    After the rows come what no row owns, the tokens before the first and after the last.
    """
    index, place = lax.axis_index("row"), lax.axis_index("head")
    row = jnp.where(
        index < rows * segments, lax.div(index, segments), index - rows * (segments - 1)
    )
    offsets = refs["offsets"]
    own = jnp.minimum(row, rows - 1)
    before, after = row == rows, row == rows + 1
    start = jnp.where(before, 0, jnp.where(after, offsets[rows], offsets[own]))
    stop = jnp.where(before, offsets[0], jnp.where(after, tokens, offsets[own + 1]))
    write = jnp.where(row < rows, refs["write_ids"][own], 0)
    read = jnp.where(row < rows, refs["read_ids"][own], 0)
    head, part = lax.div(place, parts), lax.rem(place, parts)
    segment = jnp.where(row < rows, lax.rem(index, segments), 0)
    return Tile(own, head, part, start, stop - start), segment, read, write


def put_rows(tile: Tile, chunk, value, staging, y, width: int) -> None:
    """Writes a chunk's outputs, and nothing past the row's end."""
    (tiles, copied), lines = staging
    start, valid = tile.start + chunk * Q, tile.valid(chunk)
    lanes = tile.lanes(0, width)

    @pl.when(valid >= Q)
    def _():
        tiles[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(copied, y.at[pl.ds(start, Q), lanes])

    @pl.when(valid < Q)
    def _():
        store(lines, value)
        plgpu.commit_smem()

        @pl.loop(0, valid)
        def _(q):
            plgpu.copy_smem_to_gmem(lines.at[q], y.at[start + q, lanes])


def chunk_steps(
    dt: Float[Array, "T H"], dt_bias: Float[Array, "H"] | None, dt_limit, rows: Rows
) -> Float[Array, "C H Q"]:
    """The step sizes of each chunk of each row, 0 where it has no token.

    Chunk `c` of row `r` is at `offsets[r] // Q + r + c`: no two rows meet, nothing is searched for.
    """
    tokens, count = dt.shape[0], rows.read_ids.shape[0]
    first = rows.offsets[:-1] // Q + jnp.arange(count, dtype=jnp.int32)
    place = jnp.arange(tokens // Q + count + 1, dtype=jnp.int32)
    row = jnp.sum(first <= place[:, None], axis=1) - 1
    start = (place - first[row]) * Q + rows.offsets[row]
    token = start[:, None] + jnp.arange(Q, dtype=jnp.int32)
    owned = (row >= 0)[:, None] & (token < rows.offsets[row + 1][:, None])
    taken = dt.at[jnp.where(owned, token, tokens)].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    steps = jnp.where(owned[..., None], step_size(taken, dt_bias, dt_limit), 0)
    return jnp.swapaxes(steps, 1, 2)
