"""Every rule of a plan, each broken by the smallest plan that breaks it; nothing is changed by a refusal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import CapacityError, PlanError
from jaxstate.plan import PlanShape, apply_cells, null_plan
from jaxstate.rules import check_plan
from jaxstate.state import BlockPool, CacheSpec, GroupSpec

LEAF = jax.ShapeDtypeStruct((1,), jnp.float32)
SPEC = CacheSpec(
    (
        GroupSpec("whole", "recurrent", 1, LEAF, blocks=12),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=16, blocks=20),
    ),
    rows=4,
    max_len=64,
)
SHAPE = PlanShape(SPEC, chunk_tokens=64, copies=3)


class World:
    """Row 0 is a's, 32 tokens in blocks 1 and 1-2; row 1 is b's, about to start in 2 and 3-4; c holds sealed ones."""

    def __init__(self, *, prefill=True):
        pool = BlockPool.create(SPEC)
        pool, self.a = pool.allocate("a", {"whole": 1, "paged": 2})
        self.tables = {g: np.zeros((4, SPEC.capacity(g)), np.int32) for g in SPEC.names}
        for group, ids in self.a.items():
            self.tables[group][0, : len(ids)] = ids
        pool, self.b = pool.allocate("b", {"whole": 1, "paged": 2})
        pool, self.c = pool.allocate("c", {"whole": 1, "paged": 1})
        self.pool = pool.seal("c", self.c)
        self.holders: list[str | None] = ["a", "b", None, None]
        self.plan = null_plan(SHAPE, prefill=prefill)
        for group, ids in self.b.items():
            self.cells(group, [(1, i, int(b)) for i, b in enumerate(ids)])
            self.plan.zero[group][: len(ids)] = ids
        if prefill:
            self.tokens({1: 20})
            self.plan.prefill.sample[1] = True

    def cells(self, group, entries):
        cells = self.plan.cells[group]
        for i, entry in enumerate(entries):
            cells.rows[i], cells.columns[i], cells.ids[i] = entry

    def copies(self, group, *pairs):
        for i, (source, destination) in enumerate(pairs):
            self.plan.copies[group][0][i], self.plan.copies[group][1][i] = source, destination

    def tokens(self, lengths, starts=None):
        p = self.plan.prefill
        n = np.array([lengths.get(row, 0) for row in range(4)])
        p.offsets[1:] = np.cumsum(n)
        p.tokens[: n.sum()] = np.arange(n.sum()) % 7 + 1
        for row, start in (starts or {}).items():
            p.starts[row] = start

    def check(self):
        return check_plan(self.plan, SHAPE, self.tables, self.pool, self.holders)

    def refused(self, rule, error=PlanError):
        """The plan is refused for this rule, and plan, tables and pool are as they were."""
        held = (self.plan, self.tables, self.pool.free_lists, self.pool.refs, self.pool.sealed)
        before = [x.copy() for x in jax.tree.leaves(held)]
        with pytest.raises(error) as caught:
            self.check()
        for old, new in zip(before, jax.tree.leaves(held), strict=True):
            np.testing.assert_array_equal(old, new)
        if error is PlanError:
            assert caught.value.rule == rule and rule in str(caught.value)
        return caught.value


def test_a_good_plan_gives_the_tables_after_it():
    for prefill in (True, False):
        world = World(prefill=prefill)
        after = world.check()
        assert after["whole"].tolist() == [[1], [2], [0], [0]]
        assert after["paged"].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [0] * 4, [0] * 4]
        assert world.tables["paged"][1].tolist() == [0] * 4, "the tables before are kept"


def test_a_null_plan_is_good_with_and_without_rows():
    world = World()
    for prefill in (True, False):
        plan = null_plan(SHAPE, prefill=prefill)
        after = check_plan(plan, SHAPE, world.tables, world.pool, ["a", None, None, None])
        for group in SPEC.names:
            np.testing.assert_array_equal(after[group], world.tables[group])
        zeros = {g: 0 * t for g, t in world.tables.items()}
        check_plan(plan, SHAPE, zeros, BlockPool.create(SPEC), [None] * 4)


@pytest.mark.parametrize("column", [4, 5, 400, -1])
def test_inv08_br19_a_cell_past_the_row_is_a_capacity_error(column):
    world = World()
    world.cells("paged", [(1, 0, 3), (1, column, 4)])
    error = world.refused("", CapacityError)
    assert (error.request, error.group) == ("b", "paged")
    assert (error.need, error.capacity) == (column + 1, 4)
    assert "raise max_len from 64" in str(error)


def test_inv08_one_group_at_fault_refuses_both():
    """The group checked last is at fault, so the first must not have been touched."""
    world = World()
    world.cells("paged", [(1, 0, 3), (1, 4, 4)])
    assert SPEC.names[-1] == "paged"
    world.refused("", CapacityError)


@pytest.mark.parametrize("row", [-1, 4])
def test_inv22_a_row_that_is_not_there(row):
    world = World()
    world.cells("whole", [(row, 0, 2)])
    world.refused("rows are in range")


@pytest.mark.parametrize("block", [-1, 20, 2**31 - 1])
@pytest.mark.parametrize("where", ["cells", "zero", "source", "destination"])
def test_inv22_br141_ids_out_of_range(where, block):
    world = World()
    if where == "cells":
        world.cells("paged", [(1, 0, block)])
    elif where == "zero":
        world.plan.zero["paged"][3] = block
    elif where == "source":
        world.copies("paged", (block, 4))
    else:
        world.copies("paged", (1, block))
    world.refused("ids are in range")


def test_br143_a_cell_written_twice():
    world = World()
    world.cells("paged", [(1, 0, 3), (1, 0, 4)])
    world.refused("each cell is written once")


def test_inv16_copies_from_or_to_null():
    for pair in [(0, 4), (1, 0)]:
        world = World()
        world.copies("paged", pair)
        world.refused("copies go from a block to a block")


def test_inv16_br143_two_copies_to_one_block():
    world = World()
    world.copies("paged", (1, 4), (2, 4))
    world.refused("each block is written once")


def test_inv15_a_copy_from_a_block_zeroed_in_the_same_plan():
    world = World()
    world.copies("paged", (3, 4))
    world.refused("nothing fresh is copied from")


def test_a_copy_from_a_block_freed_in_the_same_plan():
    world = World()
    world.plan.freed["paged"][9] = True
    world.copies("paged", (9, 4))
    world.refused("nothing freed is copied from")


def test_inv15_br15_a_block_zeroed_and_copied_to_is_right():
    world = World()
    world.copies("paged", (1, 4))
    assert world.check()["paged"][1].tolist() == [3, 4, 0, 0]


def test_sealed_blocks_are_not_zeroed_or_copied_to():
    sealed = 5
    for spoil in (
        lambda w: w.plan.zero["paged"].__setitem__(3, sealed),
        lambda w: w.copies("paged", (1, sealed)),
    ):
        world = World()
        assert world.pool.sealed["paged"][sealed]
        spoil(world)
        world.refused("sealed blocks are never written")


def test_a_prompt_does_not_write_a_sealed_block():
    world = World()
    world.pool = world.pool.seal("a", {"paged": [2]})
    world.tokens({0: 5, 1: 20}, starts={0: 20})  # tokens 20 to 24 leave their state in column 1
    world.refused("sealed blocks are never written")
    # Read from it, and written to the next: a continued prefix.
    world = World()
    pool, more = world.pool.allocate("a", {"paged": 1})
    world.pool = pool.seal("a", {"paged": [2]})
    world.cells("paged", [(1, 0, 3), (1, 1, 4), (0, 2, int(more["paged"][0]))])
    world.plan.zero["paged"][3] = more["paged"][0]
    world.tokens({0: 5, 1: 20}, starts={0: 32})
    world.check()


@pytest.mark.parametrize("group", SPEC.names)
def test_inv13_br11_a_block_handed_out_and_not_zeroed(group):
    """In every group, and for every block of the row."""
    for i in range(len(World().b[group])):
        world = World()
        world.plan.zero[group][i] = 0
        error = world.refused("blocks are zeroed when handed out")
        assert f"group {group!r}" in str(error) and f"[{world.b[group][i]}]" in str(error)


def test_inv13_a_sealed_block_in_a_new_row_is_not_zeroed():
    """A prefix hit: the row starts from c's sealed block."""
    world = World()
    pool, _ = world.pool.free("b", {"paged": [3]})
    world.pool = pool.share("b", {"paged": [5]})
    world.cells("paged", [(1, 0, 5), (1, 1, 4)])
    world.plan.zero["paged"][:2] = [4, 0]
    world.tokens({1: 4}, starts={1: 16})
    world.plan.prefill.sample[1] = True
    assert world.check()["paged"][1].tolist() == [5, 4, 0, 0]


def test_br05_a_live_block_is_not_zeroed_or_copied_to():
    for spoil in (
        lambda w: w.plan.zero["paged"].__setitem__(3, 2),
        lambda w: w.copies("paged", (1, 2)),
    ):
        world = World()
        spoil(world)
        assert "[2]" in str(world.refused("only what is handed out is zeroed or copied to"))


def test_inv05_a_block_in_two_rows():
    world = World()
    world.cells("paged", [(1, 0, 3), (1, 1, 2)])
    world.plan.zero["paged"][:2] = [3, 0]
    world.copies("paged", (1, 2))
    world.plan.copies["paged"][1][0] = 0
    world.plan.copies["paged"][0][0] = 0
    with pytest.raises(PlanError):
        world.check()
    # Even where the block is zeroed, so that no other rule speaks first.
    world = World()
    world.cells("paged", [(1, 0, 3), (1, 1, 3)])
    assert "two cells" in str(world.refused("one owner"))


def test_inv05_a_block_that_its_row_does_not_hold():
    world = World()
    world.cells("paged", [(1, 0, 3), (1, 1, 9)])
    world.plan.zero["paged"][1] = 9
    assert "'b' does not hold" in str(world.refused("one owner"))


def test_a_freed_block_in_a_row():
    world = World()
    world.plan.freed["paged"][2] = True
    world.refused("no freed block in a row")


def test_a_freed_block_that_somebody_holds():
    world = World()
    world.plan.freed["paged"][5] = True  # c's
    assert "[5]" in str(world.refused("freed blocks are nobody's"))


def test_br32_a_row_that_names_less_than_its_request_holds():
    """Its prompt would fit, and decoding would run on into null."""
    world = World()
    world.cells("paged", [(1, 0, 3), (0, 0, 0)])
    world.plan.zero["paged"][1] = 0
    world.tokens({1: 10})
    assert "'b' holds [3, 4]" in str(world.refused("rows name all that they hold"))


def test_inv10_br01_a_row_of_nobody_that_still_names_blocks():
    world = World()
    world.holders[0] = None
    assert "names [1]" in str(world.refused("finished rows are null"))
    world.plan.clear[0] = True
    assert world.check()["paged"][0].tolist() == [0] * 4


def test_inv12_br32_a_live_row_without_blocks():
    world = World(prefill=False)
    world.plan.clear[0] = True
    world.refused("live rows have blocks")
    world = World(prefill=False)
    world.holders[2] = "d"
    world.refused("live rows have blocks")


def test_br32_a_row_that_would_write_to_null():
    world = World()
    world.tokens({0: 8, 1: 20}, starts={0: 32})  # a has blocks for 32 tokens
    error = world.refused("no live row resolves to null")
    assert "'a' has no block in column 2" in str(error)


def test_br32_a_row_that_would_start_from_null():
    """16 tokens computed, and the cell that should hold their state is null: a fresh start, unnoticed."""
    world = World()
    world.tables["paged"][0, 0] = 0
    world.tokens({0: 8, 1: 20}, starts={0: 16})
    assert "'a' has no block in column 0" in str(world.refused("no live row resolves to null"))
    world.tokens({0: 8, 1: 20}, starts={0: 17})
    world.check()  # then it starts from column 1


def test_inv21_tokens_for_a_row_of_nobody():
    world = World()
    world.tokens({1: 20, 2: 4})
    world.refused("only live rows read tokens")
    world = World()
    world.tokens({0: 3, 1: 20}, starts={0: -3})
    world.refused("only live rows read tokens")


def test_a_row_without_tokens_is_not_sampled():
    world = World()
    world.plan.prefill.sample[0] = True
    assert "[0]" in str(world.refused("only rows with tokens are sampled"))


@pytest.mark.parametrize(
    "offsets", [[0, 0, 65, 65, 65], [0, 5, 3, 3, 3], [-1, 0, 3, 3, 3], [0, 0, 20, 20, 19]]
)
def test_tokens_fit_the_step(offsets):
    world = World()
    world.plan.prefill.offsets[:] = offsets
    world.refused("tokens fit the step")


def test_a_negative_token():
    world = World()
    world.plan.prefill.tokens[3] = -1
    world.refused("tokens are ids")


def test_inv08_a_prompt_past_max_len_is_a_capacity_error():
    world = World()
    world.tokens({1: 20}, starts={1: 50})
    error = world.refused("", CapacityError)
    assert (error.request, error.need, error.capacity) == ("b", 70, 64)


def test_apply_cells_is_what_the_device_does():
    """Random clears and cells: host tables equal the device's, cell by cell."""
    from jaxstate.state import BlockTables

    rng = np.random.default_rng(1)
    tables = {g: rng.integers(0, 9, (4, SPEC.capacity(g))).astype(np.int32) for g in SPEC.names}
    for _ in range(10):
        plan = null_plan(SHAPE, prefill=False)
        plan.clear[:] = rng.random(4) < 0.3
        for group in SPEC.names:
            cells = plan.cells[group]
            places = rng.permutation(4 * SPEC.capacity(group))[: len(cells.ids)]
            cells.rows[:], cells.columns[:] = np.divmod(places, SPEC.capacity(group))
            cells.ids[:] = rng.integers(0, 12, len(places))
        host = apply_cells(tables, plan)
        device = BlockTables({g: jnp.asarray(t) for g, t in tables.items()})
        device = device.update(plan.clear, plan.cells)
        for group in SPEC.names:
            np.testing.assert_array_equal(device.ids[group], host[group])
        tables = host


def test_a_plans_repr_never_fails():
    world = World()
    text = repr(world.plan)
    assert "zero {'whole': [2], 'paged': [3, 4]}" in text and "prefill [(1, 20)]" in text
    seen = []
    jax.eval_shape(lambda p: seen.append(repr(p)), world.plan)
    seen.append(repr(jax.tree.map(lambda x: x.shape, world.plan)))
    seen.append(repr(dataclasses.replace(world.plan, prefill=None)))
    assert all(text.startswith("StepPlan(") for text in seen)
