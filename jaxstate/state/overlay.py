"""A mapping as a value: a dict that nobody writes to any more, and the changes since, at most a few hundred.

A new value with a change copies the other changes and nothing else. When there are more of them than twice the square
root of the entries, they are merged into a dict of their own, so that a change costs the square root on average: for
10,000 entries less than a tree of hashes, whose every step is a Python call or a cache miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_GONE: Any = object()


class Overlay[K, V](Mapping[K, V]):
    """A mapping that never changes; `put` and `drop` give another one, `open` one that does change until it is closed.

    Example:
      >>> one = Overlay({"a": 1})
      >>> one.put("b", 2), one
      (Overlay({'a': 1, 'b': 2}), Overlay({'a': 1}))
    """

    __slots__ = ("_base", "_count", "_news")

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()):
        self._base: dict[K, V] = dict(entries)
        self._news: dict[K, V] = {}
        self._count = len(self._base)

    def put(self, key: K, value: V) -> Overlay[K, V]:
        """The mapping with this entry."""
        return self.open().put(key, value).close()

    def put_all(self, keys: Iterable[K], value: V) -> Overlay[K, V]:
        """The mapping with this value for each of these keys."""
        return self.open().put_all(keys, value).close()

    def drop(self, key: K) -> Overlay[K, V]:
        """The mapping without this entry; KeyError when there is none."""
        return self.open().drop(key).close()

    def open(self) -> Changes[K, V]:
        """The same entries, to be changed in place; this mapping stays as it is."""
        return _made(Changes, self._base, self._news.copy(), self._count)

    def close(self) -> Overlay[K, V]:
        """What the changes come to: here there are none."""
        return self

    def get(self, key: K, default: Any = None) -> Any:
        if key in self._news:
            value = self._news[key]
            return default if value is _GONE else value
        return self._base.get(key, default)

    def last_in(self, keys: Sequence[K], first: int, end: int) -> int:
        """The last place from `first` on and before `end` whose key has an entry here; -1 when there is none."""
        news, base = self._news, self._base
        for at in range(end - 1, first - 1, -1):
            key = keys[at]
            if key in news:
                if news[key] is not _GONE:
                    return at
            elif key in base:
                return at
        return -1

    def __getitem__(self, key: K) -> V:
        value = self._news[key] if key in self._news else self._base[key]
        if value is _GONE:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        if key in self._news:
            return self._news[key] is not _GONE  # type: ignore[index]
        return key in self._base

    def __iter__(self) -> Iterator[K]:
        yield from (key for key in self._base if key not in self._news)
        yield from (key for key, value in self._news.items() if value is not _GONE)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


class Changes[K, V](Overlay[K, V]):
    """An overlay while it is changed, in place: `put` and `drop` give it back."""

    __slots__ = ()

    def put(self, key: K, value: V) -> Changes[K, V]:
        news = self._news
        if key in news:
            self._count += news[key] is _GONE
        elif key not in self._base:
            self._count += 1
        news[key] = value
        return self

    def put_all(self, keys: Iterable[K], value: V) -> Changes[K, V]:
        news, base = self._news, self._base
        for key in keys:
            if key in news:
                self._count += news[key] is _GONE
            elif key not in base:
                self._count += 1
            news[key] = value
        return self

    def open(self) -> Changes[K, V]:
        """Itself."""
        return self

    def drop(self, key: K) -> Changes[K, V]:
        news, base = self._news, self._base
        if (news[key] is _GONE) if key in news else key not in base:
            raise KeyError(key)
        self._count -= 1
        if key in base:
            news[key] = _GONE
        else:
            del news[key]
        return self

    def close(self) -> Overlay[K, V]:
        """What the changes come to; this is not to be changed any more."""
        base, news = self._base, self._news
        if len(news) ** 2 > 4 * len(base) + 256:
            base, news = base.copy(), {}
            for key, value in self._news.items():
                if value is _GONE:
                    del base[key]
                else:
                    base[key] = value
        return _made(Overlay, base, news, self._count)


def _made(kind: Any, base: dict, news: dict, count: int) -> Any:
    made = kind.__new__(kind)
    made._base, made._news, made._count = base, news, count
    return made
