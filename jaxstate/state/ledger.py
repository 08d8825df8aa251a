"""Changes to a pool's account, several for the price of one: a pool is opened, changed in place and closed again.

A ledger is the only thing here that changes; it copies what it changes, so the pool that it was opened from stays as it
was, and dropping a ledger undoes everything. Each change looks before it writes: one that refuses has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        self._free, self._refs = dict(pool.free_lists), dict(pool.refs)
        self._sealed = dict(pool.sealed)
        # What became free and was not handed out again; it lies above the free lists.
        self.returned: Blocks = {group: [] for group in pool.refs}
        self._copied: set[tuple[str, str]] = set()
        self.held: Changes[str, dict[str, tuple[int, ...]]] = pool.held.open()

    def close(self) -> BlockPool:
        """The pool that the changes come to; the ledger is not to be used any more."""
        if not self._copied:
            return self._pool
        for group, blocks in self.returned.items():
            if blocks:
                self._free[group] = np.concatenate([self._free[group], np.array(blocks, np.int32)])
        for arrays in (self._free, self._refs, self._sealed):
            for array in arrays.values():
                array.setflags(write=False)
        return type(self._pool)(self._free, self._refs, self._sealed, self.held.close())

    def free_count(self, group: str) -> int:
        return len(self._free[group]) + len(self.returned[group])

    def short(self, need: Mapping[str, int]) -> int:
        """Blocks that are missing for `allocate`, in the group where most are; 0 if it would succeed."""
        short = 0
        for group, n in need.items():
            short = max(short, n - len(self._free[group]) - len(self.returned[group]))
        return short

    def allocate(self, holder: str, need: Mapping[str, int]) -> Blocks:
        for group, n in need.items():
            if type(n) is not int or group not in self._refs:
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
        taken = {group: self._take(group, int(n)) for group, n in need.items()}
        self._hold(holder, taken)
        return taken

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
        self._hold(holder, taken)

    def seal(self, holder: str, ids: Mapping[str, Any]) -> None:
        blocks = {group: self._checked(group, given) for group, given in ids.items()}
        for group, mine in blocks.items():
            self._require_held(holder, group, mine)
        for group, mine in blocks.items():
            sealed = self._own("sealed", group)
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
        before = self.held.get(holder, {})
        mine = dict(before)
        for group, blocks in taken.items():
            self._count(group, blocks, +1)
            mine[group] = before.get(group, ()) + tuple(blocks)
        self._put(holder, mine)

    def _put(self, holder: str, blocks: dict[str, tuple[int, ...]]) -> None:
        """Makes these all that the holder has."""
        if any(blocks.values()):
            self.held.put(holder, blocks)
        elif holder in self.held:
            self.held.drop(holder)

    def _let_go(self, group: str, blocks: Iterable[int]) -> list[int]:
        """Ends a hold on the blocks; those that nobody holds any more, which are free from now on."""
        refs = self._count(group, blocks, -1)
        gone = [block for block in blocks if not refs[block]]
        # Freed first to last, so that the last one freed is the next one handed out.
        self.returned[group] += gone[::-1]
        sealed = self._sealed[group]
        for block in gone:
            if sealed[block]:
                sealed = self._own("sealed", group)
                sealed[block] = False
        return gone

    def _count(self, group: str, blocks: Iterable[int], by: int) -> np.ndarray:
        refs = self._own("refs", group)
        for block in blocks:
            refs[block] += by
        return refs

    def _own(self, what: str, group: str) -> np.ndarray:
        """The group's counts or seals, copied before they are first written to."""
        arrays = self._refs if what == "refs" else self._sealed
        if (what, group) not in self._copied:
            arrays[group] = arrays[group].copy()
            self._copied.add((what, group))
        return arrays[group]

    def _check_group(self, group: str) -> None:
        if group not in self._refs:
            raise OwnershipError(
                "known groups", f"there is no group {group!r}; the groups are {sorted(self._refs)}"
            )

    def _checked(self, group: str, ids: Any) -> list[int]:
        self._check_group(group)
        if not (type(ids) in (list, tuple) and all(type(block) is int for block in ids)):
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
