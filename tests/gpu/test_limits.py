"""The kernels at the ends of what they take: long rows, extreme steps, huge pools, and many repetitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cases import POOLS, Case, make_operands
from tests.kernels.test_cases import check, op_of, written

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

MAMBA, MAMBA2 = {"D": 5120, "N": 16}, {"H": 80, "P": 64, "G": 1, "N": 128}
PROJECTED = {"I": 2560, "O": 10576, "D": 5376, "K": 4}
RAGGED = (1, 130, 64, 0, 257, 63, 77, 5)
HALF = {"dtype": "bfloat16"}
# At the sizes of real models: rows that start fresh, go on in place, fork and are null.
REAL = (
    Case("causal_conv", {"D": 5376, "K": 4}, RAGGED, 7, 2, **HALF, state_dtype="bfloat16"),
    Case("conv_step", {"D": 5376, "K": 4}, (1,) * 33, **HALF, state_dtype="bfloat16"),
    Case("selective_step", MAMBA, (1,) * 33, **HALF),
    *(Case("selective_step", {**MAMBA, "rank": 160}, (1,) * rows, **HALF) for rows in (1, 8, 33)),
    Case("ssd_step", MAMBA2, (1,) * 33, **HALF),
    Case(
        "projected_conv_step",
        PROJECTED,
        (1,) * 33,
        options={"first": 5120},
        **HALF,
        state_dtype="bfloat16",
    ),
    Case("selective_scan", MAMBA, RAGGED, 7, 2, **HALF),
    Case("ssd", MAMBA2, RAGGED, 7, 2, **HALF),
)
of_each_op = pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)


@of_each_op
def test_the_sizes_of_real_models_equal_the_loops(case):
    operands = make_operands(case)
    op, arrays = op_of(case, operands, "mosaic")
    check(case, operands, jax.jit(op)(arrays))


@of_each_op
def test_200_calls_give_the_same_bits(case):
    op, arrays = op_of(case, make_operands(case), "mosaic")
    op = jax.jit(op)
    first = op(arrays)

    @jax.jit
    def differs(ours, first):
        """How many numbers differ in a bit; NaN equals NaN."""
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(first), strict=True)
        return sum(jnp.sum((a != b) & ~((a != a) & (b != b))) for a, b in pairs)

    counts = [differs(op(arrays), first) for _ in range(200)]
    assert not np.asarray(jnp.stack(counts)).any()


@of_each_op
def test_pools_past_two_to_the_31_numbers(case):
    """What a call does at the end of such a pool it does in a small one."""
    operands = make_operands(case)
    op, arrays = op_of(case, operands, "mosaic")
    y, *pools = jax.jit(op)(arrays)
    names = [name for name in POOLS if name in arrays]
    large, changed = dict(arrays), written(operands)
    blocks = arrays[names[-1]].shape[1]
    layers = 2**31 // int(np.prod(arrays[names[-1]].shape[1:])) + 2
    large["layer"] = jnp.int32(layers - 1)

    @jax.jit
    def enlarged(small):
        pool = jnp.zeros((layers, *small.shape[1:]), small.dtype)
        return pool.at[-1].set(jnp.nan_to_num(small[-1]))

    own = {name: enlarged(large.pop(name)) for name in names}

    def step(own, rest):
        return op({**rest, **own})

    assert own[names[-1]].size > 2**31
    z, *after = jax.jit(step, donate_argnums=0)(own, large)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(z, np.float32))
    for name, small, pool in zip(names, pools, after, strict=True):
        np.testing.assert_array_equal(small[-1, np.array(changed)], pool[-1, np.array(changed)])
        rest = np.setdiff1d(np.arange(blocks), changed)
        np.testing.assert_array_equal(pool[-1, rest], jnp.nan_to_num(arrays[name][-1, rest]))
        assert not jax.jit(lambda pool: jnp.any(pool[:-1] != 0))(pool)


LONG = (
    Case("causal_conv", {"D": 128, "K": 4}, (65_536,), 1, 3, **HALF),
    Case("selective_scan", {"D": 32, "N": 16}, (65_536,), 1, 3),
    Case("selective_scan", {"D": 32, "N": 16}, (65_536,), 1, 3, **HALF),
    Case("ssd", {"H": 2, "P": 64, "G": 1, "N": 128}, (65_536,), 1, 3, **HALF),
)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_a_row_of_65536_tokens_equals_the_loops(case):
    operands = make_operands(case)
    op, arrays = op_of(case, operands, "mosaic")
    check(case, operands, jax.jit(op)(arrays))


STEPS = (
    Case("selective_step", {"D": 256, "N": 16}, (1,) * 6),
    Case("ssd_step", {"H": 4, "P": 32, "G": 2, "N": 32}, (1,) * 6),
    Case("selective_scan", {"D": 64, "N": 16}, (70, 3, 40), 1, 2),
    Case("selective_scan", {"D": 64, "N": 16}, (70, 3, 40), 1, 2, **HALF),
    Case("ssd", {"H": 2, "P": 64, "G": 1, "N": 64}, (70, 3, 40), 1, 2, **HALF),
)


@pytest.mark.parametrize("steps", ["zero", "large", "mixed"])
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_extreme_step_sizes_equal_the_loops(case, steps):
    """A step of 0 leaves the state as it is; after one of 100 nothing of it is left."""
    case = dataclasses.replace(case, absent=("dt_bias",))
    operands = make_operands(case)
    values = {"zero": (-200.0,), "large": (100.0,), "mixed": (-200.0, 0.0, 100.0)}[steps]
    choice = np.random.default_rng(0).integers(0, len(values), operands["dt"].shape)
    operands["dt"] = jnp.asarray(np.asarray(values)[choice], case.dtype)
    op, arrays = op_of(case, operands, "mosaic")
    check(case, operands, jax.jit(op)(arrays))
