"""The host's account of blocks: immutable, conserved, and quick to refuse."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import CapacityError, OwnershipError
from jaxstate.state import BlockPool, BlockTables, CacheSpec, GroupSpec, StateCache

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)


def pool_of(*sizes: int) -> BlockPool:
    """A pool whose groups `a`, `b`, … have so many blocks, null included."""
    names = "abc"[: len(sizes)]
    groups = (
        GroupSpec(name, "recurrent", 1, LEAF, blocks=n)
        for name, n in zip(names, sizes, strict=True)
    )
    return BlockPool.create(CacheSpec(tuple(groups), rows=2, max_len=4))


def content(pool: BlockPool):
    """All that a pool knows, as plain values to compare."""
    return (
        {g: a.tolist() for g, a in pool.free_lists.items()},
        {g: a.tolist() for g, a in pool.refs.items()},
        {g: a.tolist() for g, a in pool.sealed.items()},
        {h: dict(ids) for h, ids in pool.held.items()},
    )


def refuses(rule, call, pool):
    """The call raises OwnershipError for this rule and leaves the pool as it was."""
    before = content(pool)
    with pytest.raises(OwnershipError) as caught:
        call()
    assert caught.value.rule == rule
    assert rule in str(caught.value)
    assert content(pool) == before
    pool.check()


def test_inv01_br31_a_pool_of_eight_hands_out_one_to_seven_and_never_null():
    pool = pool_of(8)
    assert pool.free_count("a") == 7
    got = []
    for i in range(7):
        pool, ids = pool.allocate(f"r{i}", {"a": 1})
        got += ids["a"].tolist()
        pool.check()
    assert got == [1, 2, 3, 4, 5, 6, 7]
    assert pool.free_count("a") == 0 and not pool.fits({"a": 1}) and pool.fits({"a": 0})
    before = content(pool)
    with pytest.raises(CapacityError) as caught:
        pool.allocate("r7", {"a": 1})
    error = caught.value
    assert (error.request, error.group, error.need, error.capacity) == ("r7", "a", 1, 0)
    assert error.remedy in str(error) and "raise the group's 8 blocks" in error.remedy
    assert content(pool) == before


def test_inv02_exhaustion_is_clean_over_all_groups():
    pool, _ = pool_of(8, 4).allocate("x", {"a": 3})
    before = content(pool)
    for need in ({"a": 4, "b": 4}, {"a": 5, "b": 1}, {"b": 4, "a": 1}):
        assert not pool.fits(need)
        with pytest.raises(CapacityError):
            pool.allocate("y", need)
        assert content(pool) == before
    pool, ids = pool.allocate("y", {"a": 4, "b": 3})
    assert (ids["a"].tolist(), ids["b"].tolist()) == ([4, 5, 6, 7], [1, 2, 3])


def test_inv03_br137_double_free_is_an_error_at_once():
    pool, _ = pool_of(8).allocate("x", {"a": 2})
    after, gone = pool.free("x", {"a": [1]})
    assert gone["a"].tolist() == [1]
    refuses("no double free", lambda: after.free("x", {"a": [1]}), after)
    refuses("no double free", lambda: after.free("x", {"a": [1, 2]}), after)
    refuses("each block once", lambda: after.free("x", {"a": [2, 2]}), after)
    released, _ = pool.release("x")
    refuses("no double free", lambda: released.release("x"), released)
    refuses("no double free", lambda: released.release("never was"), released)
    assert released.free_count("a") == 7


def test_inv03_inv06_a_shared_block_is_returned_by_its_last_holder_once():
    pool, _ = pool_of(8).allocate("x", {"a": 2})
    pool = pool.seal("x", {"a": [2]}).share("y", {"a": [2]})
    assert pool.refs["a"][2] == 2
    pool, gone = pool.release("x")
    assert (gone["a"].tolist(), pool.refs["a"][2], pool.sealed["a"][2]) == ([1], 1, True)
    assert 2 not in pool.free_lists["a"]
    refuses("only a holder frees, seals and writes", lambda: pool.free("x", {"a": [2]}), pool)
    pool, gone = pool.release("y")
    assert gone["a"].tolist() == [2]
    assert pool.free_lists["a"].tolist().count(2) == 1 and pool.free_count("a") == 7
    assert not pool.sealed["a"].any(), "a free block is not sealed"
    pool.check()


def test_inv04_null_is_nobodys():
    pool, _ = pool_of(8).allocate("x", {"a": 2})
    for call in (pool.free, pool.seal, pool.share):
        refuses("null is nobody's", lambda call=call: call("x", {"a": [1, 0]}), pool)
    refuses("null is nobody's", lambda: pool.check_write("x", "a", [0]), pool)
    assert pool.refs["a"][0] == 0


@pytest.mark.parametrize("block", [-1, -8, 8, 9, 2**33])
def test_inv22_ids_are_never_wrapped(block):
    pool, _ = pool_of(8).allocate("x", {"a": 7})
    pool = pool.seal("x", {"a": [7]})
    for call in (pool.free, pool.seal, pool.share):
        refuses("ids are in range", lambda call=call: call("x", {"a": [block]}), pool)
    refuses("ids are in range", lambda: pool.check_write("x", "a", [block]), pool)


def test_foreign_blocks_are_refused():
    pool, _ = pool_of(8, 8).allocate("x", {"a": 2, "b": 1})
    pool, _ = pool.allocate("y", {"a": 1})
    rule = "only a holder frees, seals and writes"
    refuses(rule, lambda: pool.free("y", {"a": [1]}), pool)
    refuses(rule, lambda: pool.seal("y", {"a": [1]}), pool)
    refuses(rule, lambda: pool.check_write("y", "a", [1]), pool)
    # One bad id among good ones, or in the second group, refuses all.
    refuses(rule, lambda: pool.free("x", {"b": [1], "a": [1, 3]}), pool)
    refuses("no double free", lambda: pool.check_write("x", "a", [5]), pool)
    refuses("known groups", lambda: pool.free("x", {"c": [1]}), pool)


def test_br143_writes_name_each_block_once_and_never_a_sealed_one():
    pool, _ = pool_of(8).allocate("x", {"a": 3})
    pool.check_write("x", "a", [1, 2, 3])
    refuses("each block once", lambda: pool.check_write("x", "a", [1, 2, 1]), pool)
    pool = pool.seal("x", {"a": [2]})
    pool.check_write("x", "a", [1, 3])
    refuses("sealed blocks are never written", lambda: pool.check_write("x", "a", [1, 2]), pool)


def test_only_sealed_blocks_are_shared_and_held_once_each():
    pool, _ = pool_of(8).allocate("x", {"a": 2})
    refuses("only sealed blocks are shared", lambda: pool.share("y", {"a": [1]}), pool)
    refuses("only sealed blocks are shared", lambda: pool.share("y", {"a": [5]}), pool)
    pool = pool.seal("x", {"a": [1, 2]})
    refuses("one hold each", lambda: pool.share("x", {"a": [1]}), pool)
    shared = pool.share("y", {"a": [1]})
    refuses("one hold each", lambda: shared.share("y", {"a": [2, 1]}), shared)


def test_a_need_that_is_no_count_or_no_group_is_refused():
    pool = pool_of(8)
    refuses("known groups", lambda: pool.allocate("x", {"z": 1}), pool)
    refuses("needs are counts", lambda: pool.allocate("x", {"a": -1}), pool)
    same, ids = pool.allocate("x", {"a": 0})
    assert ids["a"].tolist() == [] and content(same) == content(pool)


def test_the_last_block_freed_is_the_next_handed_out():
    pool, _ = pool_of(8).allocate("x", {"a": 4})
    pool, _ = pool.free("x", {"a": [3]})
    pool, _ = pool.free("x", {"a": [1]})
    pool, ids = pool.allocate("y", {"a": 3})
    assert ids["a"].tolist() == [1, 3, 5]


def test_inv05_br136_conservation_over_random_operations():
    """An independent account, kept with sets, agrees after every operation; so does the pool's own check."""
    rng = np.random.default_rng(5)
    pool = pool_of(9, 6)
    sizes = {"a": 9, "b": 6}
    held: dict[str, dict[str, list[int]]] = {}
    sealed = {"a": set(), "b": set()}
    for step in range(600):
        kind = rng.choice(["allocate", "release", "seal", "share", "free"])
        holder = f"h{rng.integers(6)}"
        mine = held.get(holder, {"a": [], "b": []})
        group = str(rng.choice(["a", "b"]))
        if kind == "allocate":
            need = {g: int(rng.integers(0, 3)) for g in sizes}
            busy = {g: {b for h in held.values() for b in h[g]} for g in sizes}
            fits = all(n <= sizes[g] - 1 - len(busy[g]) for g, n in need.items())
            assert pool.fits(need) == fits
            if fits:
                pool, ids = pool.allocate(holder, need)
                for g in sizes:
                    assert not set(ids[g].tolist()) & busy[g] and 0 not in ids[g]
                    mine[g] = mine[g] + ids[g].tolist()
                held[holder] = mine
        elif kind == "seal" and mine[group]:
            block = int(rng.choice(mine[group]))
            pool, _ = pool.seal(holder, {group: [block]}), sealed[group].add(block)
        elif kind == "share" and sealed[group] - set(mine[group]):
            block = int(rng.choice(sorted(sealed[group] - set(mine[group]))))
            pool = pool.share(holder, {group: [block]})
            mine[group] = [*mine[group], block]
            held[holder] = mine
        elif kind == "free" and mine[group]:
            block = int(rng.choice(mine[group]))
            pool, _ = pool.free(holder, {group: [block]})
            mine[group] = [b for b in mine[group] if b != block]
        elif kind == "release" and any(mine.values()):
            pool, _ = pool.release(holder)
            held.pop(holder)
        for g, size in sizes.items():
            count = [sum(b in h[g] for h in held.values()) for b in range(size)]
            sealed[g] &= {b for b in range(size) if count[b]}
            assert pool.refs[g].tolist() == count
            assert set(np.flatnonzero(pool.sealed[g]).tolist()) == sealed[g]
            assert pool.free_count(g) + sum(c > 0 for c in count) + 1 == size
        pool.check()
        assert {h for h, ids in held.items() if any(ids.values())} == set(pool.held), step
    for holder in list(pool.held):
        pool, _ = pool.release(holder)
    assert (pool.free_count("a"), pool.free_count("b"), pool.held) == (8, 5, {})
    assert not any(refs.any() for refs in pool.refs.values())


def test_br137_many_tenants_in_turn_leave_nothing_behind():
    pool, peak = pool_of(3, 5), set()
    for i in range(128):
        pool, _ = pool.allocate(f"t{i}", {"a": 2, "b": 4})
        peak.add((pool.free_count("a"), pool.free_count("b"), len(pool.held)))
        pool, _ = pool.release(f"t{i}")
    assert peak == {(0, 0, 1)}
    assert (pool.free_count("a"), pool.free_count("b"), pool.held) == (2, 4, {})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: {"refs": {"a": p.refs["a"] + (np.arange(8) == 1)}},
        lambda p: {"free_lists": {"a": p.free_lists["a"][:-1]}},
        lambda p: {"free_lists": {"a": np.append(p.free_lists["a"], 1)}},
        lambda p: {"free_lists": {"a": np.append(p.free_lists["a"], 0)}},
        lambda p: {"sealed": {"a": np.arange(8) == 0}},
        lambda p: {"sealed": {"a": np.arange(8) == 7}},
        lambda p: {"held": {}},
        lambda p: {"refs": {"a": 2 * p.refs["a"]}, "held": {**p.held, "y": p.held["x"]}},
    ],
)
def test_br136_the_checker_sees_a_pool_that_does_not_add_up(spoil):
    pool, _ = pool_of(8).allocate("x", {"a": 2})
    pool.check()
    with pytest.raises(AssertionError):
        pool.replace(**spoil(pool)).check()


def test_an_operation_leaves_the_old_pool_valid():
    old = pool_of(8)
    before = content(old)
    new, _ = old.allocate("x", {"a": 3})
    new.seal("x", {"a": [1]}).share("y", {"a": [1]}).release("x")
    assert content(old) == before
    again, ids = old.allocate("z", {"a": 2})
    assert ids["a"].tolist() == [1, 2] and "x" not in again.held
    for pool in (old, new, again):
        for arrays in (pool.free_lists, pool.refs, pool.sealed):
            with pytest.raises(ValueError, match="read-only"):
                arrays["a"][0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        old.held = {}
    with pytest.raises(ValueError, match="read-only"):
        ids["a"][0] = 5


def test_a_pool_is_a_pytree_and_says_what_it_holds():
    pool, _ = pool_of(8, 4).allocate("x", {"a": 3, "b": 1})
    pool = pool.seal("x", {"a": [2]})
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x, pool), pool)
    assert (
        repr(pool)
        == "BlockPool(a: 4 free, 2 live, 1 sealed of 7; b: 2 free, 1 live, 0 sealed of 3; 1 holders)"
    )
    for odd in (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pool),
        jax.tree.map(lambda x: None, pool),
        jax.tree.map(lambda x: x.shape, pool),
    ):
        assert "BlockPool(" in repr(odd)


@pytest.mark.parametrize("ids", [[1.9], [True], 1.0, ["1"], [[1]], [2**64 - 1]], ids=repr)
def test_what_is_no_whole_number_is_no_block(ids):
    """A float is not cut to a block that somebody holds, and True is not block 1."""
    spec = CacheSpec((GroupSpec("g", "recurrent", 1, LEAF, blocks=8),), rows=2, max_len=4)
    pool, _ = BlockPool.create(spec).allocate("a", {"g": 2})
    cache, tables = StateCache.create(spec), BlockTables.empty(spec)
    for refused in (
        lambda: pool.free("a", {"g": ids}),
        lambda: pool.allocate("b", {"g": ids}),
        lambda: cache.zero({"g": ids}),
        lambda: tables.write(0, {"g": ids}),
        lambda: tables.clear_row(ids),
    ):
        with pytest.raises(OwnershipError):
            refused()
    assert pool.free_count("g") == 5
