"""Gathers and scatters against loops in plain Python, with any ids that an int32 can hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import blocks
from tests.properties.profile import examples

LAYERS, BLOCKS, N = 2, 6, 5
DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32)
INT32 = np.iinfo(np.int32)

any_id = st.one_of(
    st.integers(-BLOCKS - 1, BLOCKS + 1),
    st.sampled_from([INT32.min, INT32.min + 1, INT32.max, INT32.max - 1, -1, 0, BLOCKS]),
    st.integers(INT32.min, INT32.max),
)
many_ids = st.lists(any_id, min_size=N, max_size=N).map(lambda ids: np.array(ids, np.int32))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)

read_blocks, write_blocks, fill_blocks, copy_blocks, gather_blocks, scatter_blocks = (
    jax.jit(f)
    for f in (
        blocks.read_blocks, blocks.write_blocks, blocks.fill_blocks,
        blocks.copy_blocks, blocks.gather_blocks, blocks.scatter_blocks,
    )
)  # fmt: skip
read_cells, write_cells = jax.jit(blocks.read_cells), jax.jit(blocks.write_cells)


def _pool(dtype, seed: int) -> np.ndarray:
    """Random blocks, no two alike; the null block is what nobody may see."""
    pool = np.random.default_rng(seed).integers(1, 200, (LAYERS, BLOCKS, 3)).astype(dtype)
    pool[:, 0] = INT32.min if dtype is np.int32 else np.nan
    return pool


def _absent(dtype):
    return INT32.max if dtype is np.int32 else np.nan


def _read(pool: np.ndarray, layer: int, block: int) -> np.ndarray:
    if block == 0:
        return np.zeros(3, pool.dtype)
    return (
        pool[layer, block]
        if 0 < block < BLOCKS
        else np.full(3, _absent(pool.dtype.type), pool.dtype)
    )


def _same(got, want: np.ndarray) -> None:
    assert np.asarray(got).tobytes() == want.tobytes(), (np.asarray(got), want)


def _same_values(got, want: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want.astype(np.float64))


def _first_of_each(ids: np.ndarray) -> np.ndarray:
    """The ids with repetitions of blocks that exist made null: who wins there is nobody's business."""
    seen, out = set(), ids.copy()
    for i, block in enumerate(ids.tolist()):
        if 0 < block < BLOCKS and block in seen:
            out[i] = 0
        seen.add(block)
    return out


@examples(80)
@given(dtypes, seeds, st.integers(0, LAYERS - 1), many_ids)
def test_reads_are_zeros_for_null_the_block_or_the_mark_of_absence(dtype, seed, layer, ids):
    pool = _pool(dtype, seed)
    want = np.stack([_read(pool, layer, block) for block in ids.tolist()])
    _same_values(read_blocks(pool, jnp.int32(layer), ids), want)
    both = np.stack([[_read(pool, at, b) for b in ids.tolist()] for at in range(LAYERS)])
    _same_values(gather_blocks(pool, ids), both)


@examples(80)
@given(dtypes, seeds, st.integers(0, LAYERS - 1), many_ids)
def test_writes_reach_the_named_blocks_of_one_layer_and_no_byte_more(dtype, seed, layer, ids):
    pool, ids = _pool(dtype, seed), _first_of_each(ids)
    values = np.random.default_rng(seed + 1).integers(-99, -1, (LAYERS, N, 3)).astype(dtype)
    want, everywhere = pool.copy(), pool.copy()
    for i, block in enumerate(ids.tolist()):
        if 0 < block < BLOCKS:
            want[layer, block] = values[0, i]
            everywhere[:, block] = values[:, i]
    _same(write_blocks(pool, jnp.int32(layer), ids, values[0]), want)
    _same(scatter_blocks(pool, ids, values), everywhere)


@examples(40)
@given(seeds, many_ids)
def test_of_two_writes_to_a_block_one_wins_whole(seed, ids):
    pool = _pool(np.float32, seed)
    values = np.random.default_rng(seed + 1).normal(size=(N, 3)).astype(np.float32)
    got = np.asarray(write_blocks(pool, jnp.int32(1), ids, values))
    for block in range(BLOCKS):
        written = [v for i, v in zip(ids.tolist(), values, strict=True) if i == block and block]
        candidates = written or [pool[1, block]]
        assert any(got[1, block].tobytes() == c.tobytes() for c in candidates)
    _same(got[0], pool[0])


@examples(60)
@given(dtypes, seeds, many_ids)
def test_fills_reach_every_layer_of_the_named_blocks(dtype, seed, ids):
    pool = _pool(dtype, seed)
    want = pool.copy()
    for block in ids.tolist():
        if 0 < block < BLOCKS:
            want[:, block] = 0
    _same(fill_blocks(pool, ids, 0), want)


@examples(80)
@given(dtypes, seeds, many_ids, many_ids)
def test_copies_happen_at_once(dtype, seed, source, destination):
    """Chains and cycles read what was there before; nothing is copied to null, and null is copied as zeros."""
    pool, destination = _pool(dtype, seed), _first_of_each(destination)
    want = pool.copy()
    for s, d in zip(source.tolist(), destination.tolist(), strict=True):
        if 0 < d < BLOCKS:
            want[:, d] = np.stack([_read(pool, layer, s) for layer in range(LAYERS)])
    got = np.asarray(copy_blocks(pool, source, destination))
    _same_values(got, want)
    _same(got[:, 0], pool[:, 0])


ROWS, WIDTH = 4, 3
any_column = st.one_of(st.integers(-WIDTH - 1, WIDTH + 1), st.integers(INT32.min, INT32.max))
some = lambda one, n: st.lists(one, min_size=n, max_size=n).map(lambda x: np.array(x, np.int32))  # noqa: E731


@examples(60)
@given(seeds, some(any_column, ROWS))
def test_cells_outside_the_table_read_as_null(seed, columns):
    table = np.random.default_rng(seed).integers(1, 99, (ROWS, WIDTH)).astype(np.int32)
    want = [
        table[row, c] if 0 <= c < WIDTH else 0 for row, c in enumerate(columns.tolist())
    ]  # fmt: skip
    assert np.asarray(read_cells(table, columns)).tolist() == want


@examples(80)
@given(seeds, some(any_column, N), some(any_column, N), many_ids)
def test_cells_outside_the_table_are_not_written_and_no_other_changes(seed, rows, columns, ids):
    table = np.random.default_rng(seed).integers(1, 99, (ROWS, WIDTH)).astype(np.int32)
    wanted: dict[tuple[int, int], set[int]] = {}
    for row, column, block in zip(rows.tolist(), columns.tolist(), ids.tolist(), strict=True):
        if block and 0 <= row < ROWS and 0 <= column < WIDTH:
            wanted.setdefault((row, column), set()).add(block)
    got = np.asarray(write_cells(table, rows, columns, ids))
    for row in range(ROWS):
        for column in range(WIDTH):
            assert got[row, column] in wanted.get((row, column), {table[row, column]})


@pytest.mark.parametrize("function", ["wraps", "clamps"])
def test_the_loops_tell_a_wrapping_or_clamping_read_from_a_right_one(function):
    """So the tests above can fail: plain indexing differs from the loop at -1 and past the end."""
    pool, ids = _pool(np.float32, 0), {"wraps": -1, "clamps": BLOCKS}
    plain = jnp.asarray(pool)[1, ids[function]]
    assert not np.array_equal(plain, _read(pool, 1, ids[function]), equal_nan=True)
