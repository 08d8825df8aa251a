"""The pool against a model made of plain sets, over any sequence of operations, sensible or not."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxstate.errors import CapacityError, OwnershipError
from jaxstate.state import BlockPool, CacheSpec, GroupSpec
from tests.properties.profile import examples

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)
SPEC = CacheSpec(
    groups=(
        GroupSpec("whole", "recurrent", 1, LEAF, blocks=5),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=4, blocks=8),
    ),
    rows=2, max_len=16,
)  # fmt: skip

holders = st.sampled_from(["a", "b", "c", "d"])
groups = st.sampled_from(["whole", "paged"])
ids = st.lists(st.integers(-1, 8), max_size=3)


@dataclasses.dataclass
class Model:
    """Who holds what: per group, the free blocks, the sealed ones, and the holders of each block."""

    free: dict[str, set[int]]
    sealed: dict[str, set[int]]
    holders: dict[str, dict[int, set[str]]]

    @classmethod
    def create(cls) -> Model:
        blocks = {name: range(1, SPEC.blocks(name)) for name in SPEC.names}
        return cls(
            {name: set(b) for name, b in blocks.items()},
            {name: set() for name in blocks},
            {name: {block: set() for block in b} for name, b in blocks.items()},
        )

    def of(self, holder: str, group: str) -> set[int]:
        return {block for block, who in self.holders[group].items() if holder in who}

    def real(self, group: str, ids: list[int]) -> bool:
        """Whether these are blocks of the group, each named once."""
        return len(set(ids)) == len(ids) and all(i in self.holders[group] for i in ids)

    def drop(self, holder: str, group: str, ids: set[int]) -> set[int]:
        gone = set()
        for block in ids:
            self.holders[group][block].discard(holder)
            if not self.holders[group][block]:
                gone.add(block)
        self.free[group] |= gone
        self.sealed[group] -= gone
        return gone


def fingerprint(pool: BlockPool) -> tuple:
    """All that a pool holds, by value."""
    arrays = (pool.free_lists, pool.refs, pool.sealed)
    return (
        [(g, a.tobytes()) for tree in arrays for g, a in sorted(tree.items())],
        {holder: dict(held) for holder, held in pool.held.items()},
    )


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool, self.model = BlockPool.create(SPEC), Model.create()
        self.old: list[tuple[BlockPool, tuple]] = []

    @contextlib.contextmanager
    def _either(self, allowed: bool, error: type[Exception] = OwnershipError):
        """What the model allows has to work; what it forbids has to be refused and leave the pool as it was."""
        before = self.pool
        mark = fingerprint(before)
        self.old = [*self.old[-6:], (before, mark)]
        if allowed:
            yield
        else:
            with pytest.raises(error):
                yield
            assert self.pool is before

    @rule(holder=holders, whole=st.integers(0, 3), paged=st.integers(0, 4))
    def allocate(self, holder, whole, paged):
        need = {"whole": whole, "paged": paged}
        fits = all(n <= len(self.model.free[g]) for g, n in need.items())
        assert self.pool.fits(need) == fits
        with self._either(fits, CapacityError):
            self.pool, given = self.pool.allocate(holder, need)
        if fits:
            for group, blocks in given.items():
                assert len(blocks) == need[group] == len(set(blocks.tolist()))
                assert set(blocks.tolist()) <= self.model.free[group]
                self.model.free[group] -= set(blocks.tolist())
                for block in blocks.tolist():
                    self.model.holders[group][block] = {holder}

    @rule(holder=holders, group=groups, ids=ids)
    def free(self, holder, group, ids):
        allowed = self.model.real(group, ids) and set(ids) <= self.model.of(holder, group)
        with self._either(allowed):
            self.pool, gone = self.pool.free(holder, {group: ids})
        if allowed:
            assert set(gone[group].tolist()) == self.model.drop(holder, group, set(ids))

    @rule(holder=holders, group=groups, data=st.data())
    def free_some_of_its_own(self, holder, group, data):
        mine = sorted(self.model.of(holder, group))
        if mine:
            self.free(holder, group, data.draw(st.lists(st.sampled_from(mine), unique=True)))

    @rule(holder=holders)
    def release(self, holder):
        mine = {group: self.model.of(holder, group) for group in SPEC.names}
        allowed = any(mine.values())
        with self._either(allowed):
            self.pool, gone = self.pool.release(holder)
        if allowed:
            for group, blocks in mine.items():
                dropped = self.model.drop(holder, group, blocks)
                assert set(gone.get(group, np.zeros(0)).tolist()) == dropped

    @rule(names=st.lists(holders, unique=True, min_size=1))
    def release_several_in_one_ledger(self, names):
        allowed, one_by_one = all(self._holds(name) for name in names), self.pool
        with self._either(allowed):
            ledger = self.pool.open()
            for name in names:
                ledger.release(name)
            self.pool = ledger.close()
        if allowed:
            for name in names:
                one_by_one, _ = one_by_one.release(name)
                for group in SPEC.names:
                    self.model.drop(name, group, self.model.of(name, group))
            assert fingerprint(self.pool) == fingerprint(one_by_one)

    @rule(
        steps=st.lists(
            st.tuples(holders, st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=2
        )
    )
    def any_changes_in_one_ledger_are_those_changes_one_by_one(self, steps):
        """Blocks are taken, sealed and given back in turn; what is refused on the way has changed nothing."""
        ledger, one_by_one = self.pool.open(), self.pool
        for holder, whole, paged, back in steps:
            need = {"whole": whole, "paged": paged}
            with contextlib.suppress(CapacityError, OwnershipError):
                if back:
                    ledger.release(holder)
                    one_by_one, _ = one_by_one.release(holder)
                    continue
                ids = ledger.allocate(holder, need)
                one_by_one, same = one_by_one.allocate(holder, need)
                assert ids == {g: i.tolist() for g, i in same.items()}
                if whole and paged:
                    ledger.seal(holder, ids)
                    one_by_one = one_by_one.seal(holder, ids)
        closed = ledger.close()
        closed.check()
        assert fingerprint(closed) == fingerprint(one_by_one)

    def _holds(self, holder):
        return any(self.model.of(holder, group) for group in SPEC.names)

    @rule(holder=holders, group=groups, ids=ids)
    def seal(self, holder, group, ids):
        allowed = self.model.real(group, ids) and set(ids) <= self.model.of(holder, group)
        with self._either(allowed):
            self.pool = self.pool.seal(holder, {group: ids})
        if allowed:
            self.model.sealed[group] |= set(ids)

    @rule(holder=holders, group=groups, data=st.data())
    def seal_some_of_its_own(self, holder, group, data):
        mine = sorted(self.model.of(holder, group))
        if mine:
            self.seal(holder, group, data.draw(st.lists(st.sampled_from(mine), unique=True)))

    @rule(holder=holders, group=groups, ids=ids)
    def share(self, holder, group, ids):
        sealed = self.model.sealed[group] - self.model.of(holder, group)
        allowed = self.model.real(group, ids) and set(ids) <= sealed
        with self._either(allowed):
            self.pool = self.pool.share(holder, {group: ids})
        if allowed:
            for block in ids:
                self.model.holders[group][block].add(holder)

    @rule(holder=holders, group=groups, data=st.data())
    def share_some_that_are_sealed(self, holder, group, data):
        sealed = sorted(self.model.sealed[group] - self.model.of(holder, group))
        if sealed:
            self.share(holder, group, data.draw(st.lists(st.sampled_from(sealed), unique=True)))

    @rule(holder=holders, group=groups, ids=ids)
    def write(self, holder, group, ids):
        mine = self.model.of(holder, group) - self.model.sealed[group]
        with self._either(self.model.real(group, ids) and set(ids) <= mine):
            self.pool.check_write(holder, group, ids)

    @invariant()
    def the_account_is_the_models(self):
        self.pool.check()
        for group in SPEC.names:
            model = self.model
            assert set(self.pool.free_lists[group].tolist()) == model.free[group]
            assert set(np.flatnonzero(self.pool.sealed[group]).tolist()) == model.sealed[group]
            live = {b for b, who in model.holders[group].items() if who} - model.sealed[group]
            total = len(model.free[group]) + len(live) + len(model.sealed[group]) + 1
            assert total == SPEC.blocks(group)
            for holder in "abcd":
                held = self.pool.held.get(holder, {}).get(group, ())
                assert len(held) == len(set(held)) and set(held) == model.of(holder, group)

    @invariant()
    def old_pools_are_as_they_were(self):
        for pool, mark in self.old:
            assert fingerprint(pool) == mark


PoolMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestPool = PoolMachine.TestCase
