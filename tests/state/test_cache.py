"""State caches: every leaf of every container is zeroed, copied, read and written; nothing else changes a bit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import OwnershipError, SpecError
from jaxstate.state import CacheSpec, GroupSpec, StateCache
from jaxstate.state.cache import poison_value
from tests.state.layouts import (
    BLOCKS,
    LAYOUTS,
    SPEC,
    changed_blocks,
    everywhere,
    leaf,
    noise,
    noisy_cache,
    raw,
)


def blocks_of(cache: StateCache, *ids: int):
    """The blocks' content by plain numpy indexing, leaves `[layers, n, …]`."""
    return jax.tree.map(lambda x: np.asarray(x)[:, list(ids)], cache.groups)


def assert_same_bits(got, expect):
    chex.assert_trees_all_equal_structs(got, expect)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expect), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(raw(a), raw(b))


def assert_zeros(tree):
    assert jax.tree.leaves(tree)
    for array in jax.tree.leaves(tree):
        assert not raw(array).any()


def assert_changed(before: StateCache, after: StateCache, *ids: int):
    """Exactly these blocks differ, in every group."""
    assert changed_blocks(before, after) == everywhere(set(ids))


def read_all(cache: StateCache, ids):
    return {group: cache.read(group, ids) for group in LAYOUTS}


def write_all(cache: StateCache, ids, state) -> StateCache:
    for group in LAYOUTS:
        cache = cache.write(group, ids, state[group])
    return cache


def test_br18_a_fresh_cache_is_zeros_in_every_leaf():
    cache = StateCache.create(SPEC)
    for group in SPEC.groups:
        got, like = cache.groups[group.name], group.leaves
        assert jax.tree.structure(got) == jax.tree.structure(like)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True):
            assert (x.shape, x.dtype) == ((group.layers, BLOCKS, *y.shape), y.dtype)
        assert cache.blocks(group.name) == BLOCKS
    assert_zeros(cache)


def test_br18_a_poisoned_cache_shows_in_every_leaf():
    for got in jax.tree.leaves(StateCache.create(SPEC, poison=True)):
        values = np.asarray(got)
        assert (values != 0).all()  # nor is NaN equal to 0
        if jnp.issubdtype(got.dtype, jnp.inexact):
            assert np.isnan(values.astype(np.float64)).all()


class EveryLeafTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_inv13_inv14_br11_allocated_blocks_are_zero_in_every_leaf(self):
        allocate = self.variant(lambda c, i: c.allocate(everywhere(i)))
        for before in (StateCache.create(SPEC, poison=True), noisy_cache()):
            after, slices = allocate(before, np.array([4, 2], np.int32))
            assert_changed(before, after, 2, 4)
            assert_zeros(blocks_of(after, 4, 2))
            assert_zeros(slices)
            expect = jax.tree.map(lambda x: np.asarray(x)[:, :2], before.groups)
            chex.assert_trees_all_equal_shapes_and_dtypes(slices, expect)

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv14_poison_reaches_every_leaf_of_the_named_blocks_only(self):
        before = StateCache.create(SPEC)
        after = self.variant(lambda c, i: c.poison(everywhere(i)))(before, np.array([3, 0, 0]))
        assert_changed(before, after, 3)
        assert_same_bits(blocks_of(after, 3), blocks_of(StateCache.create(SPEC, poison=True), 3))

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv14_inv16_copies_are_simultaneous_in_every_leaf(self):
        before = noisy_cache()
        copy = self.variant(lambda c, s, d: c.copy(everywhere((s, d))))
        for source, destination in [
            ([1, 2, 0], [2, 3, 0]),  # a chain
            ([1, 5, 0], [5, 1, 0]),  # a swap
            ([0, 4, 0], [0, 2, 0]),  # padded at both ends
            ([3, 1, 2], [1, 2, 3]),  # a ring
        ]:
            after = copy(before, np.array(source, np.int32), np.array(destination, np.int32))
            expect = np.arange(BLOCKS)
            expect[destination] = source
            assert_same_bits(blocks_of(after, *range(BLOCKS)), blocks_of(before, *expect))

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv15_br15_a_block_zeroed_and_copied_to_ends_as_the_copy(self):
        before = noisy_cache()

        def prepare(cache):
            cache = cache.zero(everywhere(np.array([4, 3])))
            return cache.copy(everywhere((np.array([5]), np.array([4]))))

        after = self.variant(prepare)(before)
        assert_same_bits(blocks_of(after, 4), blocks_of(before, 5))
        assert_zeros(blocks_of(after, 3))

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv18_br13_null_reads_as_zeros_whatever_it_holds(self):
        for cache in (noisy_cache(), StateCache.create(SPEC, poison=True)):
            got = self.variant(read_all)(cache, np.array([0, 3, 0]))
            assert_zeros(jax.tree.map(lambda x: x[:, ::2], got))
            assert_same_bits(jax.tree.map(lambda x: x[:, 1:2], got), blocks_of(cache, 3))

    @chex.variants(with_jit=True, without_jit=True)
    def test_inv19_inv20_writes_change_the_named_blocks_and_never_null(self):
        before = StateCache.create(SPEC)
        new = noise(jax.eval_shape(lambda: read_all(before, np.array([1, 1, 1]))), seed=9)
        after = self.variant(write_all)(before, np.array([5, 0, 1]), new)
        assert_changed(before, after, 1, 5)
        expect = jax.tree.map(lambda x: x[:, [0, 2]], new)
        assert_same_bits(blocks_of(after, 5, 1), expect)
        assert_same_bits(self.variant(read_all)(after, np.array([5, 1])), expect)


def test_inv22_br140_br141_ids_known_only_on_the_device_never_wrap_or_clamp():
    before = noisy_cache()
    value = noise(jax.eval_shape(lambda: read_all(before, np.array([1]))), seed=3)

    @jax.jit
    def uses(cache, block):
        ids = block[None]
        return (
            cache.zero(everywhere(ids)),
            cache.poison(everywhere(ids)),
            cache.copy(everywhere((jnp.array([1]), ids))),
            write_all(cache, ids, value),
        ), read_all(cache, ids)

    for block in (-1, -BLOCKS, BLOCKS, BLOCKS + 1, 2**31 - 1, -(2**31)):
        written, read = uses(before, jnp.int32(block))
        for after in written:
            assert_changed(before, after)
        for array in jax.tree.leaves(read):
            if jnp.issubdtype(array.dtype, jnp.inexact):
                assert np.isnan(np.asarray(array, np.float32)).all(), block
            else:
                worst = True if array.dtype == bool else jnp.iinfo(array.dtype).max
                assert (np.asarray(array) == worst).all(), block


def test_br10_a_fork_copies_every_leaf():
    """One state into three blocks, then read in another order: each is the solo state."""
    before = noisy_cache()
    forked = before.copy(everywhere(([1, 1, 1], [2, 3, 4])))
    assert_same_bits(blocks_of(forked, 4, 2, 3), blocks_of(before, 1, 1, 1))
    assert_same_bits(read_all(forked, [3, 4, 2]), blocks_of(before, 1, 1, 1))


def test_br144_donation_changes_no_bit():
    def work(cache):
        cache, _ = cache.allocate(everywhere(jnp.array([1, 2])))
        return cache.copy(everywhere((jnp.array([3]), jnp.array([1]))))

    plain = jax.jit(work)(noisy_cache())
    donated = jax.jit(work, donate_argnums=0)(noisy_cache())
    assert_changed(plain, donated)
    expect = noisy_cache()
    assert_same_bits(blocks_of(donated, 0, 1, 3, 4, 5), blocks_of(expect, 0, 3, 3, 4, 5))
    assert_zeros(blocks_of(donated, 2))


def test_inv16_br143_a_destination_named_twice_is_refused():
    cache = noisy_cache()
    for call in (
        lambda: cache.copy({"dict": ([1, 2], [3, 3])}),
        lambda: cache.write("dict", [2, 2], cache.read("dict", [1, 3])),
        lambda: cache.zero({"dict": [1, 4, 1]}),
        lambda: cache.allocate({"dict": [1, 1]}),
    ):
        with pytest.raises(OwnershipError, match="named twice"):
            call()


@pytest.mark.parametrize("block", [-1, -BLOCKS, BLOCKS, 100, 2**40])
def test_inv22_br141_ids_that_are_known_are_refused_when_out_of_range(block):
    cache = noisy_cache()
    for call in (
        lambda: cache.read("tuple", [1, block]),
        lambda: cache.zero({"tuple": [block]}),
        lambda: cache.copy({"tuple": ([block], [1])}),
        lambda: cache.copy({"tuple": ([1], [block])}),
        lambda: cache.allocate({"dict": [1], "tuple": [block]}),
    ):
        with pytest.raises(OwnershipError, match=f"block {block} is outside the cache of 6"):
            call()


def test_inv01_null_is_not_allocated():
    with pytest.raises(OwnershipError, match="null is never handed out"):
        noisy_cache().allocate({"dict": [1, 0]})


def test_unknown_groups_and_misshapen_states_are_refused():
    cache = noisy_cache()
    for call in (
        lambda: cache.read("conv", [1]),
        lambda: cache.zero({"conv": [1]}),
        lambda: cache.blocks("conv"),
    ):
        with pytest.raises(SpecError, match=r"no group 'conv'; the groups are \['bytes', "):
            call()
    good = cache.read("dict", [1, 2])
    with pytest.raises(ValueError):
        cache.write("dict", [1, 2], {"conv": good["conv"]})  # a leaf is missing
    with pytest.raises(ValueError):
        cache.write("dict", [1, 2], {**good, "ssm": good["ssm"][..., :1, :1, :0]})


def test_ids_may_be_lists_or_one_number_or_none():
    cache = noisy_cache()
    after, slices = cache.allocate({"dict": [1, 2]})
    assert changed_blocks(cache, after)["dict"] == {1, 2} and slices["dict"]["ssm"].shape[1] == 2
    assert changed_blocks(cache, cache.zero({"dict": 3}))["dict"] == {3}
    assert_changed(cache, cache.zero(everywhere([])))
    assert_changed(cache, cache.copy(everywhere(([], []))))


def test_inv14_leaves_keep_their_dtypes_when_wider_values_come():
    cache = noisy_cache()
    wide = jax.tree.map(lambda x: x[:, :1].astype(jnp.float32) + 1 / 512, cache.groups["dict"])
    got = cache.write("dict", [2], wide).groups["dict"]
    assert (got["conv"].dtype, got["ssm"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(got["conv"][:, 2], wide["conv"][:, 0].astype(jnp.bfloat16))


def test_br72_dtypes_of_leaves_are_independent():
    groups = (
        GroupSpec("m", "recurrent", 1, {"conv": leaf(2, dtype=jnp.bfloat16), "ssm": leaf(2)}),
        GroupSpec("n", "recurrent", 1, {"conv": leaf(2), "ssm": leaf(2, dtype=jnp.float16)}),
    )
    cache = StateCache.create(CacheSpec(groups, rows=1, max_len=2))
    kinds = {g: {k: v.dtype.name for k, v in s.items()} for g, s in cache.groups.items()}
    assert kinds == {
        "m": {"conv": "bfloat16", "ssm": "float32"},
        "n": {"conv": "float32", "ssm": "float16"},
    }


def test_operations_leave_the_old_cache_valid():
    """No call but the engine's step takes the caller's buffers."""
    cache, same = noisy_cache(), noisy_cache()
    cache.zero({"tuple": [1]})
    cache.copy({"tuple": ([1], [2])})
    cache.write("tuple", [3], cache.read("tuple", [4]))
    cache.poison({"tuple": [1, 2, 3]})
    cache.allocate({"tuple": [1], "dict": [2]})
    assert_changed(cache, same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.groups = {}


def test_br16_ids_are_taken_by_value():
    """One host array, changed between two dispatches, clears just what it named at each."""
    cache = noisy_cache()
    ids = np.array([3], np.int32)
    after = cache.zero({"dict": ids})
    ids[0] = 5
    after = after.zero({"dict": ids})
    ids[0] = 1
    assert changed_blocks(cache, after)["dict"] == {3, 5}


def test_a_repr_names_every_leaf_and_never_fails():
    cache = noisy_cache()
    count = len(jax.tree.leaves(cache))
    seen = [repr(cache)]
    jax.jit(lambda c: seen.append(repr(c)))(cache)
    jax.eval_shape(lambda c: seen.append(repr(c)), cache)
    seen.append(repr(jax.eval_shape(lambda: cache)))
    donated = jax.tree.map(jnp.copy, cache)
    copy = jax.jit(lambda c: jax.tree.map(jnp.flip, c), donate_argnums=0)
    copy(donated)
    assert jax.tree.leaves(donated)[0].is_deleted()
    seen.append(repr(donated))
    seen.append(repr(jax.tree.map(lambda x: x.shape[0], cache)))
    for text in seen:
        lines = text.splitlines()
        assert (lines[0], lines[-1], len(lines)) == ("StateCache(", ")", count + 2)
        assert sum(line.startswith("  tuple.") for line in lines) == 4
    for text in seen[:5]:
        assert "  one array: float32[2, 6, 2, 2] 192 B" in text
        assert "  dict.conv: bfloat16[2, 6, 2, 2] 96 B" in text
    assert repr(jax.tree.map(lambda x: None, cache)).startswith("StateCache(")
    assert repr(StateCache(None)).startswith("StateCache(")


def test_a_cache_is_a_pytree():
    cache = noisy_cache()
    leaves, tree = jax.tree.flatten(cache)
    chex.assert_trees_all_equal(jax.tree.unflatten(tree, leaves), cache)
    chex.assert_trees_all_equal_structs(jax.jit(lambda c: c)(cache), cache)
    assert len(leaves) == sum(len(jax.tree.leaves(layout)) for layout in LAYOUTS.values())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", -128), ("int32", -(2**31)), ("uint8", 255), ("uint32", 2**32 - 1), ("bool", True)],
)
def test_poison_is_never_a_plausible_zero(dtype, value):
    assert poison_value(dtype) == value
    assert np.isnan(poison_value("float16")) and np.isnan(poison_value(jnp.bfloat16))


def test_a_write_that_is_not_shaped_like_the_state_is_refused():
    spec = CacheSpec(
        (GroupSpec("g", "recurrent", 2, jax.ShapeDtypeStruct((3,), jnp.float32), blocks=6),), 2, 8
    )
    cache = StateCache.create(spec)
    for shape in ((2, 1, 3), (1, 2, 3), (2, 2, 1), ()):
        with pytest.raises(ValueError, match="must be"):
            cache.write("g", [1, 2], jnp.ones(shape))
    with pytest.raises(OwnershipError, match="1 sources for 2"):
        cache.copy({"g": ([1], [2, 3])})
    forked = cache.write("g", [1], jnp.full((2, 1, 3), 5.0)).copy({"g": ([1, 1], [2, 3])})
    chex.assert_trees_all_equal(forked.read("g", [2, 3]), jnp.full((2, 2, 3), 5.0))
