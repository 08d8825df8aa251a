"""Donated pools are updated in place: no copy of a pool's size, in layers or in a loop."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.cases import POOLS, Case, make_operands

LAYERS, BLOCKS = 3, 23
SIZES = {"H": 4, "P": 8, "G": 2, "N": 16}
CASES = [
    Case("causal_conv", {"D": 24, "K": 4}, (9, 12), 3, 1),
    Case("selective_scan", {"D": 24, "N": 16}, (9, 12), 3, 1),
    Case("ssd", SIZES, (9, 12), 3, 1, options={"chunk": 8}),
    Case("conv_step", {"D": 24, "K": 4}, (1,) * 4),
    Case("selective_step", {"D": 24, "N": 16}, (1,) * 4),
    Case("ssd_step", SIZES, (1,) * 4),
    Case("projected_conv_step", {"I": 8, "O": 40, "D": 24, "K": 4}, (1,) * 4, options={"first": 8}),
]
DECODE = [case for case in CASES if case.decode]


def pool_copies(compiled, pools) -> list[str]:
    """Instructions of the optimized program that copy an array of a pool's shape."""
    shapes = "|".join(re.escape(",".join(map(str, pool.shape))) for pool in pools)
    copies = re.compile(rf"= \w+\[(?:{shapes})\]\S* copy(?:-start)?\(")
    return [line for line in compiled.as_text().splitlines() if copies.search(line)]


def split(case):
    operands = make_operands(case, layers=LAYERS, blocks=BLOCKS)
    static = {k: operands.pop(k) for k in (*case.options, "layer") if k in operands}
    static.pop("layer")
    # A copy, since an array that borrows numpy's memory cannot be updated in place.
    pools = {k: jnp.copy(operands.pop(k)) for k in POOLS if k in operands}
    return operands, pools, static


def layers(case, static, implementation=None):
    """The op for each layer of the stacked pools in turn."""

    def run(pools, operands):
        total = 0.0
        for layer in range(LAYERS):
            op = getattr(pk, case.op)
            y, *updated = op(
                **operands, **pools, **static, layer=layer, implementation=implementation
            )
            pools = dict(zip([k for k in POOLS if k in pools], updated, strict=True))
            total = total + jnp.sum(y)
        return pools, total

    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_layers_in_a_row_update_donated_pools_in_place(case):
    operands, pools, static = split(case)
    step = jax.jit(layers(case, static), donate_argnums=0)
    compiled = step.lower(pools, operands).compile()
    assert pool_copies(compiled, pools.values()) == []
    assert "input_output_alias" in compiled.as_text()
    addresses = {k: v.unsafe_buffer_pointer() for k, v in pools.items()}
    after, _ = compiled(pools, operands)
    assert {k: v.unsafe_buffer_pointer() for k, v in after.items()} == addresses


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.op)
def test_a_loop_of_decode_steps_updates_donated_pools_in_place(case, implementation):
    operands, pools, static = split(case)
    run = layers(case, static, implementation)

    def loop(pools, operands):
        def body(_, carry):
            pools, total = run(carry[0], operands)
            return pools, carry[1] + total

        return jax.lax.fori_loop(0, 3, body, (pools, 0.0))

    compiled = jax.jit(loop, donate_argnums=0).lower(pools, operands).compile()
    assert pool_copies(compiled, pools.values()) == []


def test_blocks_are_filled_in_place_and_padding_costs_nothing():
    # A scatter would make as many blocks of zeros as there are ids, most of them padding.
    pool = jnp.ones((LAYERS, BLOCKS, 3, 24))
    ids = jnp.zeros(500, jnp.int32)
    fill = jax.jit(lambda pool, ids: pk.fill_blocks(pool, ids, 0), donate_argnums=0)
    compiled = fill.lower(pool, ids).compile()
    assert pool_copies(compiled, [pool]) == []
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes


def test_the_search_for_copies_finds_one():
    pool = jnp.ones((LAYERS, BLOCKS, 3, 24))

    def keeps_both(pool):
        return pool, pool.at[0, 1].set(0.0)

    compiled = jax.jit(keeps_both, donate_argnums=0).lower(pool).compile()
    assert len(pool_copies(compiled, [pool])) == 1


def test_br130_the_layer_does_not_make_another_trace():
    case = CASES[3]
    operands, pools, static = split(case)
    outer = jax.jit(
        chex.assert_max_traces(
            lambda layer: pk.conv_step(**operands, **pools, **static, layer=layer), n=1
        )
    )
    outer(jnp.int32(0)), outer(np.int32(1))
    inner = dispatch._compiled(dispatch.IMPLEMENTATIONS["xla"].conv_step, ("activation",))
    inner.clear_cache()
    for layer in (0, 1, np.int32(1), jnp.int32(2)):
        pk.conv_step(**operands, **pools, **static, layer=layer)
    assert inner._cache_size() == 1
