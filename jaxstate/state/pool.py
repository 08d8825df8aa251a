"""Who owns which block: the host's immutable account, one free list per group.

Every operation returns a new pool and leaves the old one valid, so a refusal costs nothing and a caller that drops the
new value has undone the operation. A block is in exactly one of three states: *free*, *live* (one holder, who may write
it) or *sealed* (any number of holders, nobody writes it). Block 0 of each group is null and has no state at all.

Costs are a few small numpy copies; nothing here walks all blocks in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import struct
from rpds import HashTrieMap

from jaxstate.errors import CapacityError, OwnershipError
from jaxstate.state.ids import whole_number, whole_numbers
from jaxstate.state.spec import NULL, CacheSpec, format_leaves, has_values

Ids = dict[str, np.ndarray]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


class Held(Mapping[str, dict[str, tuple[int, ...]]]):
    """The blocks of each holder; a new one with a change costs the same however many holders there are."""

    __slots__ = ("_map",)

    def __init__(self, holders: Mapping[str, Any] | HashTrieMap = HashTrieMap()):  # noqa: B008 (immutable)
        self._map = holders if isinstance(holders, HashTrieMap) else HashTrieMap(holders)

    def __getitem__(self, holder: str) -> dict[str, tuple[int, ...]]:
        return self._map[holder]

    def __contains__(self, holder: object) -> bool:
        return holder in self._map

    def __iter__(self) -> Iterator[str]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def get(self, key: str, default: Any = None) -> Any:
        return self._map.get(key, default)

    def put(self, holder: str, blocks: dict[str, tuple[int, ...]]) -> Held:
        """The account with these blocks as all that the holder has; without the holder if they are none."""
        if any(blocks.values()):
            return Held(self._map.insert(holder, blocks))
        return Held(self._map.discard(holder))

    def __repr__(self) -> str:
        return repr(dict(self))


class BlockPool(struct.PyTreeNode):
    """Free lists, reference counts, seals and holders of all groups.

    `free_lists` has a stack per group (its end is handed out first), `refs` counts holders per block, `sealed` marks
    blocks that are never written again, `held` lists the blocks of each holder in the order in which they came.
    """

    free_lists: dict[str, np.ndarray]
    refs: dict[str, np.ndarray]
    sealed: dict[str, np.ndarray]
    held: Held = struct.field(pytree_node=False)

    @classmethod
    def create(cls, spec: CacheSpec) -> BlockPool:
        """A pool with every block but null free; the lowest ids are handed out first."""
        sizes = {name: spec.blocks(name) for name in spec.names}
        return cls(
            free_lists={
                name: _frozen(np.arange(n - 1, 0, -1, dtype=np.int32)) for name, n in sizes.items()
            },
            refs={name: _frozen(np.zeros(n, np.int32)) for name, n in sizes.items()},
            sealed={name: _frozen(np.zeros(n, bool)) for name, n in sizes.items()},
            held=Held(),
        )

    def free_count(self, group: str) -> int:
        """Blocks of this group that nobody holds."""
        return len(self.free_lists[group])

    def fits(self, need: Mapping[str, int]) -> bool:
        """Whether `allocate` would succeed."""
        return all(n <= self.free_count(group) for group, n in need.items())

    def allocate(self, holder: str, need: Mapping[str, int]) -> tuple[BlockPool, Ids]:
        """Hands `need[group]` fresh blocks of every group to `holder`: all of them or none.

        The ids returned are to be zeroed before anything reads them (`StateCache.allocate`, or a plan's zero list).

        Raises:
          CapacityError: some group has too few free blocks; nothing changed.
          OwnershipError: an unknown group, or a need that is no count.
        """
        for group, n in need.items():
            self._check_group(group)
            n = whole_number(n, f"group {group!r}: what {holder!r} asks for")
            if n < 0:
                raise OwnershipError(
                    "needs are counts", f"group {group!r}: {holder!r} asks for {n} blocks"
                )
            if n > self.free_count(group):
                raise CapacityError(
                    request=holder, group=group, need=n, capacity=self.free_count(group), unit="free blocks",
                    remedy=f"wait for other requests to end, or raise the group's {len(self.refs[group])} blocks",
                )  # fmt: skip
        free, refs, ids = dict(self.free_lists), dict(self.refs), {}
        for group, n in need.items():
            stack = free[group]
            ids[group] = _frozen(stack[len(stack) - n :][::-1].copy())
            free[group] = stack[: len(stack) - n]
            refs[group] = self._counted(group, ids[group], +1)
        return self.replace(free_lists=free, refs=refs, held=self._with(holder, ids)), ids

    def share(self, holder: str, ids: Mapping[str, Any]) -> BlockPool:
        """Makes `holder` one more holder of sealed blocks.

        Raises:
          OwnershipError: null, out of range, not sealed, or held by this holder already.
        """
        refs, taken = dict(self.refs), {}
        for group, given in ids.items():
            taken[group] = self._checked(group, given)
            for block in taken[group].tolist():
                if not self.sealed[group][block]:
                    raise OwnershipError(
                        "only sealed blocks are shared",
                        f"group {group!r}: block {block} is not sealed",
                    )
                if block in self.held.get(holder, {}).get(group, ()):
                    raise OwnershipError(
                        "one hold each", f"group {group!r}: {holder!r} holds block {block} already"
                    )
            refs[group] = self._counted(group, taken[group], +1)
        return self.replace(refs=refs, held=self._with(holder, taken))

    def seal(self, holder: str, ids: Mapping[str, Any]) -> BlockPool:
        """Marks blocks of `holder` as never to be written again, so that they may be shared.

        Raises:
          OwnershipError: null, out of range, or not held by `holder`.
        """
        sealed = dict(self.sealed)
        for group, given in ids.items():
            blocks = self._checked(group, given)
            self._require_held(holder, group, blocks)
            sealed[group] = sealed[group].copy()
            sealed[group][blocks] = True
            _frozen(sealed[group])
        return self.replace(sealed=sealed)

    def free(self, holder: str, ids: Mapping[str, Any]) -> tuple[BlockPool, Ids]:
        """Ends the hold of `holder` on these blocks; those that nobody holds any more return to the free list.

        Returns the new pool and, per group, the ids that became free.

        Raises:
          OwnershipError: null, out of range, listed twice, or not held by `holder` (a double or foreign free).
        """
        free, refs, sealed, gone = dict(self.free_lists), dict(self.refs), dict(self.sealed), {}
        held = dict(self.held.get(holder, {}))
        for group, given in ids.items():
            blocks = self._checked(group, given)
            self._require_held(holder, group, blocks)
            refs[group] = self._counted(group, blocks, -1)
            gone[group] = _frozen(blocks[refs[group][blocks] == 0])
            # Freed first to last, so that the last one freed is the next one handed out.
            free[group] = _frozen(np.concatenate([free[group], gone[group][::-1]]))
            if sealed[group][gone[group]].any():
                sealed[group] = sealed[group].copy()
                sealed[group][gone[group]] = False
                _frozen(sealed[group])
            leaving = set(blocks.tolist())
            held[group] = tuple(b for b in held.get(group, ()) if b not in leaving)
        everyone = self.held.put(holder, held)
        return self.replace(free_lists=free, refs=refs, sealed=sealed, held=everyone), gone

    def release(self, holder: str) -> tuple[BlockPool, Ids]:
        """Ends every hold of `holder`; as `free` of all that it holds.

        Raises:
          OwnershipError: `holder` holds nothing (it never did, or was released before).
        """
        if holder not in self.held:
            raise OwnershipError(
                "no double free",
                f"{holder!r} holds no blocks; it was released before, or never had any",
            )
        return self.free(holder, self.held[holder])

    def release_all(self, holders: Iterable[str]) -> BlockPool:
        """The pool after `release` of each of these in turn, for the price of one.

        Raises:
          OwnershipError: one of them holds nothing.
        """
        everyone, refs, gone = self.held, {}, {}
        for holder in holders:
            if holder not in everyone:
                self.replace(held=everyone).release(holder)
            for group, blocks in everyone[holder].items():
                if group not in refs:
                    refs[group], gone[group] = self.refs[group].copy(), []
                count, last = refs[group], []
                for block in blocks:
                    count[block] -= 1
                    if count[block] == 0:
                        last.append(block)
                gone[group] += last[::-1]
            everyone = everyone.put(holder, {})
        free, sealed = dict(self.free_lists), dict(self.sealed)
        for group, blocks in gone.items():
            _frozen(refs[group])
            free[group] = _frozen(np.concatenate([free[group], np.array(blocks, np.int32)]))
            if sealed[group][blocks].any():
                sealed[group] = sealed[group].copy()
                sealed[group][blocks] = False
                _frozen(sealed[group])
        return self.replace(
            free_lists=free, refs={**self.refs, **refs}, sealed=sealed, held=everyone
        )

    def check_write(self, holder: str, group: str, ids: Any) -> None:
        """Raises OwnershipError unless `holder` may write these blocks: its own, live, each named once."""
        blocks = self._checked(group, ids)
        self._require_held(holder, group, blocks)
        for block in blocks[self.sealed[group][blocks]].tolist():
            raise OwnershipError(
                "sealed blocks are never written", f"group {group!r}: block {block} is sealed"
            )

    def check(self) -> None:
        """Raises AssertionError unless the account adds up: every block is free, held or null, and counted right."""
        for group, refs in self.refs.items():
            counted = np.zeros_like(refs)
            for ids in self.held.values():
                np.add.at(counted, list(ids.get(group, ())), 1)
            free = self.free_lists[group]
            assert (counted == refs).all(), f"group {group!r}: holders and reference counts differ"
            assert len(set(free.tolist())) == len(free) and NULL not in free, (
                f"group {group!r}: bad free list"
            )
            assert (refs[free] == 0).all() and len(free) + (refs > 0).sum() + 1 == len(refs), (
                f"{group!r}: blocks lost"
            )
            assert not self.sealed[group][free].any() and not self.sealed[group][NULL], (
                f"{group!r}: a free seal"
            )
            assert (refs[~self.sealed[group]] <= 1).all(), (
                f"group {group!r}: a live block with two holders"
            )

    def _check_group(self, group: str) -> None:
        if group not in self.refs:
            raise OwnershipError(
                "known groups", f"there is no group {group!r}; the groups are {sorted(self.refs)}"
            )

    def _checked(self, group: str, ids: Any) -> np.ndarray:
        self._check_group(group)
        wide, size = whole_numbers(ids, f"group {group!r}: blocks"), len(self.refs[group])
        for block in [b for b in wide.tolist() if not 0 <= b < size]:
            raise OwnershipError(
                "ids are in range", f"group {group!r}: block {block} is outside the pool of {size}"
            )
        if (wide == NULL).any():
            raise OwnershipError(
                "null is nobody's", f"group {group!r}: block {NULL} is the null block"
            )
        if wide.size > 1 and len(np.unique(wide)) != len(wide):
            raise OwnershipError(
                "each block once", f"group {group!r}: a block is named twice in {wide.tolist()}"
            )
        return wide.astype(np.int32)

    def _require_held(self, holder: str, group: str, blocks: np.ndarray) -> None:
        mine = self.held.get(holder, {}).get(group, ())
        for block in blocks.tolist():
            if block not in mine:
                rule = (
                    "no double free"
                    if self.refs[group][block] == 0
                    else "only a holder frees, seals and writes"
                )
                state = "free" if self.refs[group][block] == 0 else "held by another"
                raise OwnershipError(
                    rule, f"group {group!r}: block {block} is {state}, not {holder!r}'s"
                )

    def _counted(self, group: str, blocks: np.ndarray, by: int) -> np.ndarray:
        refs = self.refs[group].copy()
        refs[blocks] += by
        return _frozen(refs)

    def _with(self, holder: str, ids: Mapping[str, Iterable[int]]) -> Held:
        mine = dict(self.held.get(holder, {}))
        for group, blocks in ids.items():
            mine[group] = mine.get(group, ()) + tuple(np.asarray(blocks).tolist())
        return self.held.put(holder, mine)

    def __repr__(self) -> str:
        account = (self.free_lists, self.refs, self.sealed)
        if not has_values(account):
            return "BlockPool(\n" + "\n".join(format_leaves(account)) + "\n)"
        groups = []
        for group, refs in self.refs.items():
            live = int(((refs > 0) & ~self.sealed[group]).sum())
            sealed = int(self.sealed[group].sum())
            groups.append(
                f"{group}: {self.free_count(group)} free, {live} live, {sealed} sealed of {len(refs) - 1}"
            )
        return f"BlockPool({'; '.join(groups)}; {len(self.held)} holders)"
