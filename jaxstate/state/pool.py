"""Who owns which block: the host's immutable account, one free list per group.

Every operation returns a new pool and leaves the old one valid, so a refusal costs nothing and a caller that drops the
new value has undone the operation. A block is in exactly one of three states: *free*, *live* (one holder, who may write
it) or *sealed* (any number of holders, nobody writes it). Block 0 of each group is null and has no state at all.

Costs are a few small numpy copies; nothing here walks all blocks in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import struct

from jaxstate.state.ledger import Blocks, Ledger
from jaxstate.state.overlay import Overlay
from jaxstate.state.spec import NULL, CacheSpec, format_leaves, has_values

Ids = dict[str, np.ndarray]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _arrays(blocks: Blocks) -> Ids:
    return {group: _frozen(np.array(ids, np.int32)) for group, ids in blocks.items()}


Held = Overlay[str, dict[str, tuple[int, ...]]]
"""The blocks of each holder, by group, in the order in which they came; those that have none are not in it."""


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
            held=Overlay(),
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
        ledger = self.open()
        ids = _arrays(ledger.allocate(holder, need))
        return ledger.close(), ids

    def share(self, holder: str, ids: Mapping[str, Any]) -> BlockPool:
        """Makes `holder` one more holder of sealed blocks.

        Raises:
          OwnershipError: null, out of range, not sealed, or held by this holder already.
        """
        ledger = self.open()
        ledger.share(holder, ids)
        return ledger.close()

    def seal(self, holder: str, ids: Mapping[str, Any]) -> BlockPool:
        """Marks blocks of `holder` as never to be written again, so that they may be shared.

        Raises:
          OwnershipError: null, out of range, or not held by `holder`.
        """
        ledger = self.open()
        ledger.seal(holder, ids)
        return ledger.close()

    def free(self, holder: str, ids: Mapping[str, Any]) -> tuple[BlockPool, Ids]:
        """Ends the hold of `holder` on these blocks; those that nobody holds any more return to the free list.

        Returns the new pool and, per group, the ids that became free.

        Raises:
          OwnershipError: null, out of range, listed twice, or not held by `holder` (a double or foreign free).
        """
        ledger = self.open()
        gone = _arrays(ledger.free(holder, ids))
        return ledger.close(), gone

    def release(self, holder: str) -> tuple[BlockPool, Ids]:
        """Ends every hold of `holder`; as `free` of all that it holds.

        Raises:
          OwnershipError: `holder` holds nothing (it never did, or was released before).
        """
        ledger = self.open()
        gone = _arrays(ledger.release(holder))
        return ledger.close(), gone

    def check_write(self, holder: str, group: str, ids: Any) -> None:
        """Raises OwnershipError unless `holder` may write these blocks: its own, live, each named once."""
        self.open().check_write(holder, group, ids)

    def open(self) -> Ledger:
        """A ledger in which many changes are made at once; `close` gives the pool after them."""
        return Ledger(self)

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
