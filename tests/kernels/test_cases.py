"""Every implementation of every op, on the table of cases, against float64 loops."""

import chex
import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import cases, dispatch
from pallas_kernels.cases import POOLS, Case, make_operands
from tests.kernels import loops

BFLOAT16_STATE = 2.0**-8


def written(operands) -> list[int]:
    """Blocks that a call may change."""
    if "rows" not in operands:
        return [int(i) for i in operands["write_ids"] if i]
    rows = operands["rows"]
    lengths = np.diff(rows.offsets)
    alive = (np.asarray(rows.write_ids) != 0) & (lengths > 0)
    ids = np.concatenate(
        [np.asarray(rows.write_ids)[alive], np.asarray(rows.checkpoint_ids)[alive].ravel()]
    )
    return [int(i) for i in ids if i]


def assert_close(actual, expected, tolerance: float):
    actual = np.asarray(actual, np.float64)
    scale = np.nanmax(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


def check(case: Case, operands, result):
    expected = getattr(loops, case.op)(**operands)
    y, *pools = result
    assert y.dtype == case.dtype
    assert_close(y, expected[0], case.tolerance)
    names = [name for name in POOLS if name in operands]
    for name, pool, wanted in zip(names, pools, expected[1:], strict=True):
        before, after = np.asarray(operands[name]), np.asarray(pool)
        assert after.dtype == before.dtype
        changed = written(operands)
        tolerance = max(case.tolerance if case.dtype != case.state_dtype else 0, 2e-6)
        if case.state_dtype == "bfloat16":
            tolerance = BFLOAT16_STATE
        assert_close(after[-1, changed], wanted[-1, changed], tolerance)
        # Blocks that the call does not name keep every bit, NaN or not; so does the other layer.
        rest = np.setdiff1d(np.arange(before.shape[1]), changed)
        assert after[-1, rest].tobytes() == before[-1, rest].tobytes()
        assert after[:-1].tobytes() == before[:-1].tobytes()


def op_of(case: Case, operands, implementation):
    """The op as a function of its arrays alone."""
    static = {k: v for k, v in operands.items() if k in case.options}
    arrays = {k: v for k, v in operands.items() if k not in static}
    op = getattr(pallas_kernels, case.op)
    return lambda arrays: op(**arrays, **static, implementation=implementation), arrays


EVERYWHERE = [
    (case, name)
    for case in cases.TESTS
    for name in ("cpu", *dispatch.PORTABLE)
    if hasattr(dispatch.IMPLEMENTATIONS[name], case.op)
]


@pytest.mark.parametrize(
    "case, implementation", EVERYWHERE, ids=[f"{case.name}-{name}" for case, name in EVERYWHERE]
)
def test_case_equals_the_loops(case, implementation):
    operands = make_operands(case)
    if reason := dispatch.declines(implementation, case.op, operands):
        pytest.skip(reason)
    op, arrays = op_of(case, operands, implementation)
    check(case, operands, jax.jit(op)(arrays))


FIRST_OF_EACH_OP = {case.op: case for case in reversed(cases.TESTS)}


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_ops_equal_the_loops_with_and_without_jit(self):
        for name in ("causal_conv", "selective_step", "ssd_step", "projected_conv_step"):
            case = FIRST_OF_EACH_OP[name]
            operands = make_operands(case, seed=1)
            op, arrays = op_of(case, operands, None)
            check(case, operands, self.variant(op)(arrays))


DECODE = [case for case in FIRST_OF_EACH_OP.values() if case.decode]


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.op)
def test_br29_br140_a_stray_id_of_a_step_touches_no_other_row(case, implementation):
    operands = make_operands(case)
    op, arrays = op_of(case, operands, implementation)
    op = jax.jit(op)
    y, *pools = op(arrays)
    blocks = arrays["read_ids"].shape[0] * 2 + 3
    row = 2
    others = np.arange(len(y)) != row
    # Of a projection the columns that are convolved.
    own = slice(None)
    if case.op == "projected_conv_step":
        own = slice(case.options["first"], case.options["first"] + case.sizes["D"])
    assert arrays["read_ids"][row] != 0 != arrays["write_ids"][row]
    for stray in (-1, -blocks, blocks, 2**31 - 1):
        strayed, *after = op(arrays | {"write_ids": arrays["write_ids"].at[row].set(stray)})
        np.testing.assert_array_equal(strayed[others], y[others])
        assert np.isnan(strayed[row]).all() or (strayed[row] == y[row]).all()
        for name, pool, other in zip([n for n in POOLS if n in arrays], pools, after, strict=True):
            write = int(arrays["write_ids"][row])
            expected = np.asarray(pool.at[-1, write].set(arrays[name][-1, write]))
            assert np.asarray(other).tobytes() == expected.tobytes()
        lost, *_ = op(arrays | {"read_ids": arrays["read_ids"].at[row].set(stray)})
        np.testing.assert_array_equal(lost[others], y[others])
        assert np.isnan(lost[row][own]).all()


def test_the_table_covers_every_op():
    assert set(FIRST_OF_EACH_OP) == set(cases.SHAPES)
    assert len({case.name for case in cases.TESTS + cases.BENCHMARKS}) == len(
        cases.TESTS + cases.BENCHMARKS
    )
