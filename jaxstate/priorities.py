"""A priority queue as a value: items in order, of which so many are taken, and a few that came since, in order too.

Taking the least item costs nothing but a comparison; putting one in copies those that came lately. When these are more
than twice the square root of all, they are merged, which for two sorted lists takes one pass.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any, NamedTuple


class Priorities(NamedTuple):
    """Items by their order; the lists are never written to."""

    items: list[Any] = []  # noqa: RUF012 (never written to)
    taken: int = 0  # of the items
    news: list[Any] = []  # noqa: RUF012 (never written to)

    @classmethod
    def of(cls, items: Iterable[Any]) -> Priorities:
        return cls(sorted(items))

    @property
    def size(self) -> int:
        """How many items there are."""
        return len(self.items) - self.taken + len(self.news)

    def push(self, item: Any) -> Priorities:
        """The queue with one more item."""
        news = self.news.copy()
        bisect.insort(news, item)
        if len(news) ** 2 > 4 * len(self.items) + 256:
            return Priorities.of(self.items[self.taken :] + news)
        return Priorities(self.items, self.taken, news)

    def pop(self) -> tuple[Any, Priorities]:
        """The least item, and the queue without it; IndexError when there is none."""
        items, taken, news = self
        if taken < len(items) and not (news and news[0] < items[taken]):
            return items[taken], Priorities(items, taken + 1, news)
        return news[0], Priorities(items, taken, news[1:])
