"""A priority queue as a value: items in order, in runs of at most a hundred or so, of which the first is partly taken.

Taking the least item costs nothing but a look; putting one in copies its run. For 10,000 items that is a hundred
references, no more at any time: nothing is merged or put in order again now and then.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any, NamedTuple

RUN = 64
"""Items in a run that was just made; twice as many are cut in two."""


class Priorities(NamedTuple):
    """Items by their order; the lists are never written to."""

    runs: tuple[list[Any], ...] = ()  # none of them empty
    taken: int = 0  # of the first run; less than it has
    size: int = 0  # how many items there are

    @classmethod
    def of(cls, items: Iterable[Any]) -> Priorities:
        ordered = sorted(items)
        runs = tuple([ordered[at : at + RUN] for at in range(0, len(ordered), RUN)])
        return cls(runs, 0, len(ordered))

    def push(self, item: Any) -> Priorities:
        """The queue with one more item."""
        runs, taken, size = self
        if not runs:
            return Priorities(([item],), 0, 1)
        at = max(bisect.bisect_right(runs, [item]) - 1, 0)
        run = runs[at].copy()
        if at == 0:
            del run[:taken]
            taken = 0
        bisect.insort(run, item)
        after = list(runs)
        after[at : at + 1] = [run] if len(run) < 2 * RUN else [run[:RUN], run[RUN:]]
        return Priorities(tuple(after), taken, size + 1)

    def pop(self) -> tuple[Any, Priorities]:
        """The least item, and the queue without it; IndexError when there is none."""
        runs, taken, size = self
        run = runs[0]
        if taken + 1 < len(run):
            return run[taken], Priorities(runs, taken + 1, size - 1)
        return run[taken], Priorities(runs[1:], 0, size - 1)
