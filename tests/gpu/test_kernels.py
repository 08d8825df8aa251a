"""Every case of every op compiled for the GPU: XLA's twins, and the kernels where they take the call."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import cases, mosaic
from pallas_kernels.cases import make_operands
from tests.kernels import (
    test_mosaic,
    test_mosaic_conv,
    test_mosaic_scan,
    test_mosaic_ssd,
    test_projected_conv,
)
from tests.kernels.test_cases import check, op_of

pytestmark = pytest.mark.gpu
CONFIGURED = (
    *test_mosaic.CALLS,
    *test_mosaic_conv.CALLS,
    *test_mosaic_scan.CALLS,
    *test_projected_conv.CALLS,
)
CALLS = (
    *((case, {"config": chosen}) for case, chosen in CONFIGURED),
    *((case, {}) for case in test_mosaic_ssd.CASES),
)
FIRST = {case.op: case for case, _ in reversed(CALLS)}


@pytest.mark.parametrize("case", cases.TESTS, ids=lambda case: case.name)
def test_xla_equals_the_loops(case):
    operands = make_operands(case)
    op, arrays = op_of(case, operands, "xla")
    check(case, operands, jax.jit(op)(arrays))


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_a_kernel_equals_the_loops(case, chosen, hopper):
    operands = make_operands(case)
    check(case, operands, getattr(mosaic, case.op)(**operands, **chosen))


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.op)
def test_the_kernels_are_chosen_under_jit(case, hopper):
    operands = make_operands(case, seed=1)
    op, arrays = op_of(case, operands, None)
    assert "mosaic_gpu" in jax.jit(op).lower(arrays).as_text()
    check(case, operands, jax.jit(op)(arrays))


@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.op)
def test_inputs_and_states_of_every_dtype_that_is_taken(case, dtype, state, hopper):
    case = dataclasses.replace(case, dtype=dtype, state_dtype=state)
    operands = make_operands(case, seed=2)
    reason = pallas_kernels.dispatch.declines("mosaic", case.op, operands)
    if case.op == "ssd" and dtype != "bfloat16":
        assert reason == f"its products are of bfloat16, and x is {dtype}"
        return
    if case.op == "projected_conv_step" and (dtype, state) != ("bfloat16", "bfloat16"):
        assert "bfloat16" in str(reason) or f"in the dtype of x, {dtype}" in str(reason)
        return
    assert reason is None
    op, arrays = op_of(case, operands, "mosaic")
    check(case, operands, jax.jit(op)(arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_filled_and_others_keep_their_bits(dtype, hopper):
    pool = jax.random.normal(jax.random.key(0), (3, 7, 5, 256), dtype)
    ids = jnp.asarray([4, 0, 2, 0, 7, -1], jnp.int32)
    expected = np.array(pool, np.float32)
    expected[:, [2, 4]] = 0
    fill = jax.jit(lambda pool: pallas_kernels.fill_blocks(pool, ids, 0, implementation="mosaic"))
    np.testing.assert_array_equal(np.asarray(fill(pool), np.float32), expected)


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: case.op)
def test_columns_of_a_wider_array_are_read_where_they_stand(case, hopper):
    """But for those that the recurrences of Mamba take as arrays only."""
    case = dataclasses.replace(case, dtype="bfloat16")
    operands, wide = make_operands(case), {}
    for name in ("x", "dt", "gate", "B", "C", "z"):
        value = operands.get(name)
        if value is None or (name in ("x", "dt") and case.op.startswith("selective")):
            continue
        flat = value.reshape((value.shape[0], -1))
        noise = jnp.full((value.shape[0], 24), jnp.nan, value.dtype)
        array = jnp.concatenate([noise[:, :16], flat, noise[:, 16:]], axis=1)
        array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % 8)))
        columns = pallas_kernels.Columns(array, 16, flat.shape[1])
        wide[name] = columns.reshaped(*value.shape[1:]) if value.ndim > 2 else columns
    call, arrays = op_of(case, operands, "mosaic")
    assert wide
    ours, same = jax.jit(call)({**arrays, **wide}), jax.jit(call)(arrays)
    chex.assert_trees_all_equal(ours, same)
