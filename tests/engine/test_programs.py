"""What XLA made of the two programs: the state is updated in place, and no pool is copied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.engine import Engine
from jaxstate.state import StateCache
from tests.engine.conftest import SIZES
from tests.toy import ToyConfig, ToyLM

BLOCKS = 20_011
"""A size that nothing else has, and that makes a pool larger than everything that a step works with."""


@pytest.fixture(scope="module")
def engine():
    return Engine(ToyLM(ToyConfig(blocks=BLOCKS)), SIZES, poison=False)


def pool_copies(program: str) -> list[str]:
    """Instructions of an optimized program that copy an array with BLOCKS in its shape."""
    copying = re.compile(rf"= \S*\[[\d,]*\b{BLOCKS}\b[^=]* (copy|copy-start|transpose|convert)\(")
    return [line.strip() for line in program.splitlines() if copying.search(line)]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_br144_the_state_is_donated_and_no_pool_is_copied(engine, kind):
    program = engine.lower(kind).compile()
    text, memory = program.as_text(), program.memory_analysis()
    leaves = jax.tree.leaves(engine.state)
    assert f"[2,{BLOCKS}" in text
    assert pool_copies(text) == []
    # Every leaf of the state goes out where it came in.
    assert len(re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", text.splitlines()[0])) == len(
        leaves
    )
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in leaves)
    pools = [x.nbytes for x in jax.tree.leaves(engine.state.cache.groups["whole"])]
    assert memory.temp_size_in_bytes < min(pools), "room for a second pool"


def test_the_search_for_copies_finds_one():
    cache = {"x": jax.ShapeDtypeStruct((2, BLOCKS, 3), jnp.float32)}

    def zero(groups):
        return StateCache({"g": groups}).zero({"g": np.array([3])})

    kept, given = (
        jax.jit(zero, donate_argnums=donate).lower(cache).compile().as_text()
        for donate in ((), (0,))
    )
    assert pool_copies(kept) and not pool_copies(given)
