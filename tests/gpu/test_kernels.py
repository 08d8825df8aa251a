"""Every case of every op compiled for the GPU: XLA's twins, and the kernels where they take the call."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import cases, mosaic
from pallas_kernels.cases import make_operands
from tests.kernels.test_cases import check, op_of
from tests.kernels.test_mosaic import CALLS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.TESTS, ids=lambda case: case.name)
def test_xla_equals_the_loops(case):
    operands = make_operands(case)
    op, arrays = op_of(case, operands, "xla")
    check(case, operands, jax.jit(op)(arrays))


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_a_kernel_equals_the_loops(case, chosen, hopper):
    operands = make_operands(case)
    check(case, operands, getattr(mosaic, case.op)(**operands, config=chosen))


@pytest.mark.parametrize("case", {case.op: case for case, _ in CALLS}.values(), ids=lambda c: c.op)
def test_the_kernels_are_chosen_under_jit(case, hopper):
    operands = make_operands(case, seed=1)
    op, arrays = op_of(case, operands, None)
    assert "mosaic_gpu" in jax.jit(op).lower(arrays).as_text()
    check(case, operands, jax.jit(op)(arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_filled_and_others_keep_their_bits(dtype, hopper):
    pool = jax.random.normal(jax.random.key(0), (3, 7, 5, 256), dtype)
    ids = jnp.asarray([4, 0, 2, 0, 7, -1], jnp.int32)
    expected = np.array(pool, np.float32)
    expected[:, [2, 4]] = 0
    fill = jax.jit(lambda pool: pallas_kernels.fill_blocks(pool, ids, 0, implementation="mosaic"))
    np.testing.assert_array_equal(np.asarray(fill(pool), np.float32), expected)


@pytest.mark.parametrize("op", ["conv_step", "selective_step", "mamba2_step"])
def test_columns_of_a_wider_array_are_read_where_they_stand(op, hopper):
    (case,) = [case for case, _ in CALLS if case.op == op and case.dtype == "bfloat16"][-1:]
    operands, wide = make_operands(case), {}
    for name in ("x", "xbc", "dt", "gate", "B", "C", "z"):
        value = operands.get(name)
        if value is None or (name in ("x", "dt") and op == "selective_step"):
            continue
        noise = jax.random.normal(jax.random.key(1), (value.shape[0], 24), value.dtype)
        array = jnp.concatenate([noise[:, :16], value, noise[:, 16:]], axis=1)
        wide[name] = pallas_kernels.Columns(array, 16, value.shape[1])
    call, arrays = op_of(case, operands, "mosaic")
    assert wide
    chex.assert_trees_all_equal(jax.jit(call)({**arrays, **wide}), jax.jit(call)(arrays))
