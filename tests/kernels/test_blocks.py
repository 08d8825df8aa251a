"""Reads and writes of blocks: nothing wraps, nothing clamps, block 0 is null."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, copy_blocks, fill_blocks, read_blocks, ssd_step, write_blocks

STRAY = [-1, -4, -5, 4, 5, 2**31 - 1, -(2**31)]


def ids(*values):
    return jnp.asarray(values, jnp.int32)


def pool():
    """Two layers of four blocks of two; block 0 is poisoned."""
    values = np.arange(10.0, 26.0, dtype=np.float32).reshape(2, 4, 2)
    values[:, 0] = np.nan
    return jnp.asarray(values)


@pytest.mark.parametrize("layer", [0, 1, np.int32(1), jnp.int32(1)])
def test_read_takes_the_blocks_of_one_layer_and_zeros_for_null(layer):
    read = jax.jit(read_blocks)(pool(), layer, ids(3, 0, 1))
    base = 8 * int(layer)
    assert read.tolist() == [[16 + base, 17 + base], [0, 0], [12 + base, 13 + base]]


@pytest.mark.parametrize("stray", STRAY)
def test_br141_a_stray_id_reads_nan(stray):
    read = jax.jit(read_blocks)(pool(), 1, ids(stray, 3))
    assert np.isnan(read[0]).all() and read[1].tolist() == [24, 25]


def test_a_stray_id_reads_the_largest_integer():
    read = read_blocks(jnp.ones((1, 4, 2), jnp.int32), 0, ids(-1, 0, 1))
    assert read.tolist() == [[2**31 - 1] * 2, [0, 0], [1, 1]]


@pytest.mark.parametrize("stray", [0, *STRAY])
def test_br140_null_and_stray_writes_are_dropped(stray):
    values = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    after = np.array(jax.jit(write_blocks)(pool(), 1, ids(stray, 2), values))
    assert after[1, 2].tolist() == [3, 4]
    after[1, 2] = pool()[1, 2]
    assert after.tobytes() == np.asarray(pool()).tobytes()


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_outside_the_pool_is_not_another_layer(layer):
    assert np.isnan(read_blocks(pool(), layer, ids(1, 2))).all()
    after = write_blocks(pool(), layer, ids(1, 2), jnp.ones((2, 2)))
    assert np.asarray(after).tobytes() == np.asarray(pool()).tobytes()


def test_values_are_rounded_to_the_pools_dtype():
    half = jnp.zeros((1, 2, 1), jnp.bfloat16)
    after = write_blocks(half, 0, ids(1), jnp.full((1, 1), 1.001, jnp.float32))
    assert after.dtype == jnp.bfloat16 and after[0, 1, 0] == 1.0


@pytest.mark.parametrize("stray", [0, *STRAY])
def test_fill_reaches_every_layer_and_only_the_named_blocks(stray):
    after = np.array(jax.jit(fill_blocks)(pool(), ids(2, stray), 0))
    assert after[:, 2].tolist() == [[0, 0], [0, 0]]
    after[:, 2] = pool()[:, 2]
    assert after.tobytes() == np.asarray(pool()).tobytes()


def test_copies_are_simultaneous():
    after = np.asarray(jax.jit(copy_blocks)(pool(), ids(1, 2, 3), ids(2, 3, 1)))
    before = np.asarray(pool())
    np.testing.assert_array_equal(after[:, [2, 3, 1]], before[:, [1, 2, 3]])
    assert np.isnan(after[:, 0]).all()


def test_a_copy_from_null_is_zeros():
    after = np.asarray(copy_blocks(pool(), ids(0), ids(2)))
    assert after[:, 2].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("stray", [0, *STRAY])
def test_a_copy_to_null_or_outside_is_dropped(stray):
    after = copy_blocks(pool(), ids(1), ids(stray))
    assert np.asarray(after).tobytes() == np.asarray(pool()).tobytes()


@pytest.mark.parametrize("stray", STRAY)
def test_a_copy_from_outside_is_nan_and_not_another_block(stray):
    after = copy_blocks(pool(), ids(stray), ids(2))
    assert np.isnan(after[:, 2]).all() and after[0, 3].tolist() == [16, 17]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_null_is_null_whatever_the_width_of_its_id(dtype):
    # 300 does not fit into these, and as 44 would be somebody else's block.
    large = jnp.ones((1, 300, 2), jnp.float32)
    null, values = jnp.zeros(1, dtype), jnp.full((1, 2), 5.0)
    for after in (
        write_blocks(large, 0, null, values),
        copy_blocks(large, null, null),
        fill_blocks(large, null, 5.0),
    ):
        assert (np.asarray(after) == 1).all()
    case = next(c for c in cases.TESTS if c.op == "ssd_step")
    operands = cases.make_operands(case)
    narrow = {k: operands[k].astype(dtype) for k in ("read_ids", "write_ids")}
    for ours, wide in zip(ssd_step(**operands | narrow), ssd_step(**operands), strict=True):
        np.testing.assert_array_equal(ours, wide)
