"""A priority queue as a value: a leftist heap (Crane 1972), kept lopsided by weight (Cho & Sahni 1998).

Putting in and taking out cost the logarithm of the size and leave the heap before as it was.
"""

from __future__ import annotations

from typing import Any

Heap = tuple[Any, int, "Heap | None", "Heap | None"]
"""The least item, how many there are, and two heaps of the others, the larger first. An empty heap is None."""


def push(heap: Heap | None, item: Any) -> Heap:
    """The heap with one more item."""
    return _merged(heap, (item, 1, None, None))  # type: ignore[return-value]


def pop(heap: Heap) -> tuple[Any, Heap | None]:
    """The least item, and the heap without it."""
    return heap[0], _merged(heap[2], heap[3])


def size(heap: Heap | None) -> int:
    """How many items there are."""
    return 0 if heap is None else heap[1]


def _merged(a: Heap | None, b: Heap | None) -> Heap | None:
    if a is None or b is None:
        return a or b
    if b[0] < a[0]:
        a, b = b, a
    # Only right branches are walked, and each is at most half of its heap.
    item, count, left, right = a
    right = _merged(right, b)
    if left is None or right is None or left[1] < right[1]:
        left, right = right, left
    return item, count + b[1], left, right
