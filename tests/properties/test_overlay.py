"""Mappings and queues as values against dicts and heaps, over any changes; older values stay as they were."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate.priorities import Priorities
from jaxstate.state.overlay import Overlay
from tests.properties.profile import examples

keys = st.integers(0, 60)
changes = st.lists(st.tuples(st.sampled_from("ppppdoc"), keys), max_size=150)


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
@given(st.lists(st.integers(0, 40), max_size=60), st.lists(st.integers(-3, 40), max_size=200))
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
