"""Changes to a pool's account, several for the price of one: a pool is opened, changed in place and closed again.

A ledger is the only thing here that changes; it copies what it changes, so the pool that it was opened from stays as it
was, and dropping a ledger undoes everything. Each change looks before it writes: one that refuses has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxstate.errors import CapacityError, OwnershipError
from jaxstate.state.ids import whole_number, whole_numbers
from jaxstate.state.spec import NULL

if TYPE_CHECKING:
    from jaxstate.state.overlay import Changes
    from jaxstate.state.pool import BlockPool

Blocks = dict[str, list[int]]


class Ledger:
    """An open account. Its operations are those of `BlockPool`, which says what they do and what they raise."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._free = dict(pool.free_lists)
        self._arrays = {g: (pool.refs[g].copy(), pool.sealed[g].copy()) for g in pool.refs}
        # Numbers go in and out of a memory view in a fraction of the time that they take with an array.
        self._refs = {group: memoryview(refs) for group, (refs, _) in self._arrays.items()}
        self._sealed = {group: memoryview(sealed) for group, (_, sealed) in self._arrays.items()}
        # What became free and was not handed out again; it lies above the free lists.
        self.returned: Blocks = {group: [] for group in pool.refs}
        self.held: Changes[str, dict[str, tuple[int, ...]]] = pool.held.open()

    def close(self) -> BlockPool:
        """The pool that the changes come to; the ledger is not to be used any more."""
        free, refs, sealed = self._free, {}, {}
        for group, arrays in self._arrays.items():
            refs[group], sealed[group] = arrays
            if self.returned[group]:
                new = np.array(self.returned[group], np.int32)
                free[group] = np.concatenate([free[group], new])
            for array in (free[group], *arrays):
                array.setflags(write=False)
        return type(self._pool)(free, refs, sealed, self.held.close())

    def free_count(self, group: str) -> int:
        return len(self._free[group]) + len(self.returned[group])

    def short(self, need: Mapping[str, int]) -> int:
        """Blocks that are missing for `allocate`, in the group where most are; 0 if it would succeed."""
        short, free, returned = 0, self._free, self.returned
        for group, n in need.items():
            missing = n - len(free[group]) - len(returned[group])
            if missing > short:
                short = missing
        return short

    def allocate(self, holder: str, need: Mapping[str, int]) -> Blocks:
        for group, n in need.items():
            known = type(n) is int and group in self._refs
            if not known or not 0 <= n <= len(self._free[group]) + len(self.returned[group]):
                self._check_need(holder, group, n)
        taken = {}
        for group, n in need.items():
            returned, refs = self.returned[group], self._refs[group]
            if n == 1 and returned:
                blocks = [returned.pop()]
            else:
                blocks = self._take(group, int(n))
            for block in blocks:
                refs[block] = 1
            taken[group] = blocks
        self._hold(holder, taken)
        return taken

    def _check_need(self, holder: str, group: str, n: Any) -> None:
        self._check_group(group)
        n = whole_number(n, f"group {group!r}: what {holder!r} asks for")
        if n < 0:
            raise OwnershipError(
                "needs are counts", f"group {group!r}: {holder!r} asks for {n} blocks"
            )
        if n > self.free_count(group):
            raise CapacityError(
                request=holder, group=group, need=n, capacity=self.free_count(group), unit="free blocks",
                remedy=f"wait for other requests to end, or raise the group's {len(self._refs[group])} blocks",
            )  # fmt: skip

    def share(self, holder: str, ids: Mapping[str, Any]) -> None:
        taken, mine = {}, self.held.get(holder, {})
        for group, given in ids.items():
            taken[group] = self._checked(group, given)
            for block in taken[group]:
                if not self._sealed[group][block]:
                    raise OwnershipError(
                        "only sealed blocks are shared",
                        f"group {group!r}: block {block} is not sealed",
                    )
                if block in mine.get(group, ()):
                    raise OwnershipError(
                        "one hold each", f"group {group!r}: {holder!r} holds block {block} already"
                    )
        for group, blocks in taken.items():
            refs = self._refs[group]
            for block in blocks:
                refs[block] += 1
        self._hold(holder, taken)

    def seal(self, holder: str, ids: Mapping[str, Any]) -> None:
        blocks = {group: self._checked(group, given) for group, given in ids.items()}
        for group, mine in blocks.items():
            self._require_held(holder, group, mine)
        for group, mine in blocks.items():
            sealed = self._sealed[group]
            for block in mine:
                sealed[block] = True

    def free(self, holder: str, ids: Mapping[str, Any]) -> Blocks:
        leaving = {group: self._checked(group, given) for group, given in ids.items()}
        for group, blocks in leaving.items():
            self._require_held(holder, group, blocks)
        held = dict(self.held.get(holder, {}))
        for group, blocks in leaving.items():
            held[group] = tuple([b for b in held.get(group, ()) if b not in blocks])
        self._put(holder, held)
        return {group: self._let_go(group, blocks) for group, blocks in leaving.items()}

    def release(self, holder: str) -> Blocks:
        held = self.held.get(holder)
        if held is None:
            raise OwnershipError(
                "no double free",
                f"{holder!r} holds no blocks; it was released before, or never had any",
            )
        self.held.drop(holder)
        return {group: self._let_go(group, blocks) for group, blocks in held.items()}

    def check_write(self, holder: str, group: str, ids: Any) -> None:
        blocks = self._checked(group, ids)
        self._require_held(holder, group, blocks)
        for block in blocks:
            if self._sealed[group][block]:
                raise OwnershipError(
                    "sealed blocks are never written", f"group {group!r}: block {block} is sealed"
                )

    def _take(self, group: str, n: int) -> list[int]:
        """The last `n` free blocks, the last one first."""
        returned, stack = self.returned[group], self._free[group]
        new = min(n, len(returned))
        taken = returned[len(returned) - new :][::-1]
        del returned[len(returned) - new :]
        if n > new:
            rest = len(stack) - (n - new)
            taken += stack[rest:][::-1].tolist()
            self._free[group] = stack[:rest]
        return taken

    def _hold(self, holder: str, taken: Mapping[str, list[int]]) -> None:
        before = self.held.get(holder)
        mine = {} if before is None else dict(before)
        for group, blocks in taken.items():
            mine[group] = (*mine.get(group, ()), *blocks)
        self._put(holder, mine)

    def _put(self, holder: str, blocks: dict[str, tuple[int, ...]]) -> None:
        """Makes these all that the holder has."""
        if any(blocks.values()):
            self.held.put(holder, blocks)
        elif holder in self.held:
            self.held.drop(holder)

    def _let_go(self, group: str, blocks: SequenceOf[int]) -> list[int]:
        """Ends a hold on the blocks; those that nobody holds any more, which are free from now on."""
        refs, sealed, gone = self._refs[group], self._sealed[group], []
        for block in blocks:
            left = refs[block] = refs[block] - 1
            if not left:
                sealed[block] = False
                gone.append(block)
        # Freed first to last, so that the last one freed is the next one handed out.
        self.returned[group] += gone[::-1]
        return gone

    def _check_group(self, group: str) -> None:
        if group not in self._refs:
            raise OwnershipError(
                "known groups", f"there is no group {group!r}; the groups are {sorted(self._refs)}"
            )

    def _checked(self, group: str, ids: Any) -> list[int]:
        self._check_group(group)
        if type(ids) not in (list, tuple) or not {int}.issuperset(map(type, ids)):
            ids = whole_numbers(ids, f"group {group!r}: blocks").tolist()
        blocks, size = list(ids), len(self._refs[group])
        for block in blocks:
            if not 0 <= block < size:
                raise OwnershipError(
                    "ids are in range",
                    f"group {group!r}: block {block} is outside the pool of {size}",
                )
        if NULL in blocks:
            raise OwnershipError(
                "null is nobody's", f"group {group!r}: block {NULL} is the null block"
            )
        if len(set(blocks)) != len(blocks):
            raise OwnershipError(
                "each block once", f"group {group!r}: a block is named twice in {blocks}"
            )
        return blocks

    def _require_held(self, holder: str, group: str, blocks: Iterable[int]) -> None:
        mine = self.held.get(holder, {}).get(group, ())
        for block in blocks:
            if block not in mine:
                free = self._refs[group][block] == 0
                rule = "no double free" if free else "only a holder frees, seals and writes"
                state = "free" if free else "held by another"
                raise OwnershipError(
                    rule, f"group {group!r}: block {block} is {state}, not {holder!r}'s"
                )
