"""Every case of every op compiled for the GPU: XLA's twins, and the kernels where they take the call."""

import jax
import pytest

from pallas_kernels import cases, mosaic
from pallas_kernels.cases import make_operands
from pallas_kernels.mosaic import support
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


@pytest.fixture
def hopper():
    reason = support.device_reason()
    if reason is not None:
        pytest.skip(f"the kernels decline: {reason}")
