"""Attention divided over a `context` axis of a real mesh, recurrent state not: the widths of rows on each device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxstate.errors import CapacityError
from jaxstate.state import BlockPool, BlockTables, CacheSpec, Cells, GroupSpec, StateCache

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)
SPEC = CacheSpec(
    groups=(
        GroupSpec("kv", "attention", 1, LEAF, block_size=16),
        GroupSpec("state", "recurrent", 1, LEAF, block_size=16),
    ),
    rows=4, max_len=512, context_shards=2,
)  # fmt: skip
MESH = Mesh(np.array(jax.devices()[:2]), ("context",))


def on_each(function, *given):
    """Runs the function on both devices; results come back with a leading axis of two."""

    def local(*given):
        return jax.tree.map(lambda x: x[None], function(*given))

    return jax.jit(
        jax.shard_map(local, mesh=MESH, in_specs=P(), out_specs=P("context"), check_vma=False)
    )(*given)


def cells(row, ids):
    return {
        g: Cells(np.full(len(b), row, np.int32), np.arange(len(b), dtype=np.int32), b)
        for g, b in ids.items()
    }


def test_br19_a_request_of_257_tokens_between_two_others_on_both_devices():
    """Rows of 16 and 32 ids; 257 tokens need 9 and 17, and the rows beside it keep every id."""
    assert {g: SPEC.capacity(g) for g in SPEC.names} == {"kv": 16, "state": 32}
    assert SPEC.need(257) == {"kv": 9, "state": 17}
    pool, given = BlockPool.create(SPEC), {}
    for row, tokens in enumerate((512, 257, 512)):
        pool, given[row] = pool.allocate(f"r{row}", SPEC.need(tokens))

    def run(ids):
        tables = BlockTables.empty(SPEC)
        for row in (0, 2, 1):
            tables = tables.update(entries=cells(row, ids[row]))
        cache = StateCache.create(SPEC, poison=True).zero(dict(ids[1]))
        return tables.ids, cache.groups

    ids, blocks = on_each(run, given)
    for group in SPEC.names:
        want = np.zeros((4, SPEC.capacity(group)), np.int32)
        for row, held in given.items():
            want[row, : len(held[group])] = held[group]
        chex.assert_trees_all_equal(np.asarray(ids[group]), np.stack([want, want]))
        zeroed = (np.asarray(blocks[group]) == 0).all((1, 3))
        assert [np.flatnonzero(z).tolist() for z in zeroed] == [
            sorted(given[1][group].tolist())
        ] * 2
    # Each device has the keys and values of half the tokens, and the whole of the state.
    assert 9 * 16 * 2 >= 257 > 8 * 16 * 2 and 17 * 16 >= 257 > 16 * 16


@pytest.mark.parametrize(("group", "most"), [("kv", 16), ("state", 32)])
def test_inv08_br19_one_id_more_than_a_row_holds_is_refused_while_it_is_traced(group, most):
    def write(ids):
        return BlockTables.empty(SPEC).write(1, {group: ids}).ids

    full = on_each(write, jnp.arange(1, most + 1))
    assert np.asarray(full[group])[:, 1].tolist() == [list(range(1, most + 1))] * 2
    with pytest.raises(CapacityError) as caught:
        on_each(write, jnp.arange(1, most + 2))
    assert (caught.value.group, caught.value.need, caught.value.capacity) == (group, most + 1, most)
