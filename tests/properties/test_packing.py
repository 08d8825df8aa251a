"""What the device unpacks is the plan that the host packed, whatever it holds, for one rank and for several."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate.packing import Packing
from jaxstate.plan import PlanShape, StepPlan, null_plan
from jaxstate.state import CacheSpec, GroupSpec
from tests.properties.profile import examples

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)
SPEC = CacheSpec(
    groups=(
        GroupSpec("whole", "recurrent", 1, LEAF),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=32),
    ),
    rows=3, max_len=160,
)  # fmt: skip
SHAPES = (
    PlanShape(SPEC, chunk_tokens=64, decode_steps=5, copies=2, checkpoints=3),
    PlanShape(SPEC, chunk_tokens=64),
)


def filled(seed: int, shape: PlanShape, prefill: bool) -> StepPlan:
    """A plan of any bits at all: NaN, infinities and numbers above 2**31 among them."""
    rng = np.random.default_rng(seed)

    def fill(array: np.ndarray) -> np.ndarray:
        bits = rng.integers(0, 256, array.nbytes, np.uint8)
        return (bits > 127 if array.dtype == bool else bits.view(array.dtype)).reshape(array.shape)

    return jax.tree.map(fill, null_plan(shape, prefill=prefill))


@functools.cache
def _packing(shape: int, prefill: bool, poison: bool):
    packing = Packing.of(SHAPES[shape], prefill=prefill, poison=poison)
    return packing, jax.jit(packing.unpack)


def _same(a: StepPlan, b: StepPlan) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), map(np.asarray, jax.tree.leaves(b)), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


@examples(60)
@given(
    st.integers(0, 2**32), st.integers(0, 1), st.booleans(), st.booleans(), st.integers(1, 3)
)  # fmt: skip
def test_a_plan_is_unpacked_as_it_was_packed(seed, shape, prefill, poison, ranks):
    packing, unpack = _packing(shape, prefill, poison)
    plans = [filled(seed + rank, SHAPES[shape], prefill) for rank in range(ranks)]
    packed = packing.pack(plans)
    for rank, plan in enumerate(plans):
        share = packed.reshape(ranks, -1)[rank]
        _same(plan if poison else plan.replace(freed={}), unpack(share))
        assert not any(np.shares_memory(packed, leaf) for leaf in jax.tree.leaves(plan))


def test_a_plan_of_another_kind_is_not_taken():
    packing, _ = _packing(0, False, True)
    other, _ = _packing(0, True, True)
    with pytest.raises(ValueError, match="is packed in"):
        packing.unpack(jnp.asarray(other.pack([null_plan(SHAPES[0], prefill=True)])))
