"""The one file of gathers and scatters, against plain Python loops, for every dtype a leaf may have."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import blocks as B

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool")
SHAPES = ((3,), (3,), (), (), (2, 1, 2), (3,), (3,))
LAYERS, BLOCKS = 2, 5
IDS = np.array([3, 0, 1, -1, 5, -5, 6, 4, -(2**31), 2**31 - 1], np.int32)


def pool_of(dtype: str, shape=(3,), n=BLOCKS) -> jnp.ndarray:
    values = np.random.default_rng(n).integers(1, 100, size=(LAYERS, n, *shape))
    return jnp.asarray(values if dtype != "bool" else values % 2, dtype)


def outside(dtype: str):
    """What reading a block that is not there gives: NaN, or the largest value."""
    if dtype == "bool":
        return True
    return np.nan if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def expect_read(pool, ids):
    pool = np.asarray(pool)
    out = np.zeros((LAYERS, len(ids), *pool.shape[2:]), pool.dtype)
    for i, block in enumerate(ids.tolist()):
        if block != 0:
            out[:, i] = pool[:, block] if 0 < block < BLOCKS else outside(pool.dtype.name)
    return out


def assert_equal(got, expect):
    got, expect = np.asarray(got), np.asarray(expect)
    assert got.dtype == expect.dtype
    if jnp.issubdtype(got.dtype, jnp.inexact):  # numpy knows no NaN of bfloat16
        got, expect = got.astype(np.float64), expect.astype(np.float64)
    np.testing.assert_array_equal(got, expect)


def expect_write(pool, ids, values):
    out = np.asarray(pool).copy()
    for i, block in enumerate(ids.tolist()):
        if 0 < block < BLOCKS:
            out[:, block] = np.asarray(values)[:, i]
    return out


class BlocksTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*zip(DTYPES, SHAPES, strict=True))
    def test_inv18_inv22_br140_br141_gather_and_scatter_over_all_layers(self, dtype, shape):
        pool = pool_of(dtype, shape)
        got = self.variant(B.gather_blocks)(pool, IDS)
        assert_equal(got, expect_read(pool, IDS))
        values = pool_of(dtype, shape, n=len(IDS))
        got = self.variant(B.scatter_blocks)(pool, IDS, values)
        assert_equal(got, expect_write(pool, IDS, values))

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("float32", "bfloat16", "bool")
    def test_inv18_inv22_br140_br141_read_and_write_one_layer(self, dtype):
        pool = pool_of(dtype)
        for layer in range(LAYERS):
            got = self.variant(B.read_blocks)(pool, layer, IDS)
            assert_equal(got, expect_read(pool, IDS)[layer])
            values = pool_of(dtype, n=len(IDS))
            got = self.variant(B.write_blocks)(pool, layer, IDS, values[layer])
            expect = np.asarray(pool).copy()
            expect[layer] = expect_write(pool, IDS, values)[layer]
            assert_equal(got, expect)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("float32", "bool")
    def test_inv16_copies_read_all_before_they_write(self, dtype):
        pool = pool_of(dtype)
        source = np.array([1, 2, 3, 1, 4, 0], np.int32)
        destination = np.array([2, 3, 1, -1, 9, 0], np.int32)
        got = self.variant(B.copy_blocks)(pool, source, destination)
        expect = np.asarray(pool).copy()
        expect[:, [2, 3, 1]] = np.asarray(pool)[:, [1, 2, 3]]
        assert_equal(got, expect)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters("bfloat16", "uint8")
    def test_inv13_fill_reaches_all_layers_of_the_named_blocks(self, dtype):
        pool = pool_of(dtype)
        got = self.variant(lambda p, i: B.fill_blocks(p, i, 0))(pool, IDS)
        expect = np.asarray(pool).copy()
        expect[:, [1, 3, 4]] = 0
        assert_equal(got, expect)

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv22_cells_of_a_table(self):
        table = jnp.arange(1, 13, dtype=jnp.int32).reshape(3, 4)
        for columns, expect in [
            ([0, 3, 2], [1, 8, 11]), ([-1, 4, -4], [0, 0, 0]), ([2**31 - 1, 0, -(2**31)], [0, 5, 0]),
        ]:  # fmt: skip
            got = self.variant(B.read_cells)(table, np.array(columns, np.int32))
            assert got.tolist() == expect
        rows = np.array([0, 2, -1, 3, 1, 1, 0], np.int32)
        columns = np.array([1, 3, 0, 0, -1, 4, 0], np.int32)
        ids = np.array([21, 22, 23, 24, 25, 26, 0], np.int32)
        got = self.variant(B.write_cells)(table, rows, columns, ids)
        expect = np.asarray(table).copy()
        expect[0, 1], expect[2, 3] = 21, 22
        assert_equal(got, expect)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inv18_br13_null_is_selected_away_and_never_multiplied(dtype):
    pool = pool_of(dtype).at[:, 0].set(jnp.nan)
    assert not np.asarray(B.gather_blocks(pool, np.array([0, 0]))).any()
    assert not np.asarray(B.read_blocks(pool, 1, jnp.array([0, 0]))).any()
    copied = B.copy_blocks(pool, jnp.array([0]), jnp.array([2]))
    assert not np.asarray(copied[:, 2]).any() and np.isnan(np.asarray(copied[:, 0], "f4")).all()
