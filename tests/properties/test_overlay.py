"""Mappings, queues and holders as values against dicts, heaps and lists; older values stay as they were."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate.plan import Holders
from jaxstate.priorities import Priorities
from jaxstate.state.overlay import Overlay
from tests.properties.profile import examples

keys = st.integers(0, 60)
changes = st.lists(st.tuples(st.sampled_from("pppadoc"), keys), max_size=150)


def _check(mapping: Overlay, want: dict) -> None:
    assert dict(mapping) == want and len(mapping) == len(want) == len(list(mapping))
    assert sorted(mapping.values()) == sorted(want.values()) and mapping == want
    for key in range(61):
        assert (key in mapping) == (key in want) and mapping.get(key, "none") == want.get(
            key, "none"
        )
        if key not in want:
            with pytest.raises(KeyError):
                mapping[key]
    order = [7 * key % 61 for key in range(61)]
    for first, end in ((0, 61), (9, 40), (5, 5)):
        last = max((at for at in range(first, end) if order[at] in want), default=-1)
        assert mapping.last_in(order, first, end) == last


@examples(150)
@given(changes, st.integers(0, 61))
def test_a_mapping_is_what_a_dict_is_after_the_same_changes(changes, first):
    want = dict.fromkeys(range(first), -1)
    mapping, old = Overlay(want), []
    for at, (change, key) in enumerate(changes):
        if change == "o":
            old.append((mapping.close(), dict(want)))
            mapping = old[-1][0].open()
        elif change == "c":
            mapping = mapping.close()
        elif change == "p":
            want[key] = at
            mapping = mapping.put(key, at)
        elif change == "a":
            some = [key, (key + 7) % 61, key]
            want |= dict.fromkeys(some, at)
            mapping = mapping.put_all(some, at)
        elif key in want:
            del want[key]
            mapping = mapping.drop(key)
        else:
            with pytest.raises(KeyError):
                mapping.drop(key)
    _check(mapping, want)
    _check(mapping.close(), want)
    for former, was in old:
        _check(former, was)


def test_ten_thousand_entries_are_copied_once_in_two_hundred_changes():
    mapping, bases = Overlay(dict.fromkeys(range(10_000))), set()
    for i in range(2_000):
        mapping = mapping.put(10_000 + i, None).drop(i)
        bases.add(id(mapping._base))
        assert len(mapping._news) <= 222
    assert len(mapping) == 10_000 and len(bases) <= 2 * 2_000 / 200 + 1


@examples(150)
@given(st.lists(st.integers(0, 40), max_size=400), st.lists(st.integers(-3, 40), max_size=200))
def test_a_queue_gives_what_a_heap_gives(first, changes):
    queue, heap, old = Priorities.of(first), sorted(first), []
    for change in changes:
        if change >= 0:
            queue = queue.push(change)
            heapq.heappush(heap, change)
        elif heap:
            least, queue = queue.pop()
            assert least == heapq.heappop(heap)
        else:
            with pytest.raises(IndexError):
                queue.pop()
        assert queue.size == len(heap)
        old.append((queue, sorted(heap)))
    for queue, want in old[-20:]:
        got = []
        while queue.size:
            least, queue = queue.pop()
            got.append(least)
        assert got == want


@examples(100)
@given(
    st.lists(st.sampled_from([None, "", "a", "b"]), min_size=1, max_size=12),
    st.lists(st.dictionaries(st.integers(0, 11), st.sampled_from([None, "", "c"])), max_size=6),
)
def test_rows_are_vacant_where_nobody_has_them(names, changes):
    holders, old = Holders.of(names), []
    assert Holders.of(holders) is holders
    for change in changes:
        old.append((holders, list(names)))
        change = {row: name for row, name in change.items() if row < len(names)}
        for row, name in change.items():
            names[row] = name
        holders = holders.put(change)
    for value, want in [*old, (holders, names)]:
        assert list(value) == want
        assert value.vacant.tolist() == [name is None for name in want]
        assert not value.vacant.flags.writeable
