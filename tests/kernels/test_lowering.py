"""What a CPU runs also lowers for NVIDIA GPUs, by the path that a GPU takes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cases
from pallas_kernels.cases import make_operands
from pallas_kernels.xla.ssd import ssd_dense
from tests.kernels.test_cases import FIRST_OF_EACH_OP, op_of


def lower(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", FIRST_OF_EACH_OP.values(), ids=lambda case: case.op)
def test_ops_lower_for_cuda(case):
    op, arrays = op_of(case, make_operands(case), "xla")
    assert "stablehlo.scatter" in lower(op, arrays)


def test_training_multiplies_in_low_precision_forwards_and_backwards():
    shapes = [(2, 32, 4, 8), (2, 32, 4), (4,), (2, 32, 1, 16), (2, 32, 1, 16)]
    args = [jnp.ones(shape, jnp.float32) for shape in shapes]

    def loss(*args):
        return jnp.sum(ssd_dense(*args, chunk=16, matmul_dtype=jnp.bfloat16)[0] ** 2)

    text = lower(jax.grad(loss, argnums=range(5)), *args)
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    low = [line for line in dots if "bf16" in line.split(" : ")[-1]]
    # Four products in a chunk, each with two gradients; the recurrence between chunks has none.
    assert (len(low), len(dots) - len(low)) == (12, 0)
    assert all(line.rstrip().endswith("xf32>") for line in low)


def test_the_benchmarks_name_public_ops():
    assert {case.op for case in cases.BENCHMARKS} <= set(cases.SHAPES)
