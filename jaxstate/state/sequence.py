"""One sequence as the host knows it: the tokens that its state has read and the blocks that hold the state."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import CacheSpec

Moves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Per group, blocks of one cache and the blocks of another that are to hold the same."""


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence's tokens and, per group, the blocks of its row in the order of the columns.

    `row` is where its scores lie; its `id` keys its draws. While `forked`, the blocks are read by others too: its next
    token starts from them and leaves the new state in blocks of its own.
    """

    id: str
    tokens: tuple[int, ...]
    blocks: dict[str, tuple[int, ...]]
    row: int
    forked: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def source(self, spec: CacheSpec) -> dict[str, int]:
        """The blocks that a fork starts from, one per group; empty for a sequence that goes on in its own."""
        return {g: self.blocks[g][-1] for g in spec.names} if self.forked else {}

    def kept(self, spec: CacheSpec) -> dict[str, tuple[int, ...]]:
        """The blocks that stay in its row when it goes on: a fork leaves the one that is not full yet."""
        if not self.forked:
            return self.blocks
        full = {}
        for name in spec.names:
            per_block = spec.group(name).tokens_per_block(spec.context_shards)
            full[name] = len(self.tokens) // per_block if per_block is not None else 0
        return {name: self.blocks[name][:n] for name, n in full.items()}


def assign(
    spec: CacheSpec, sequences: Iterable[Sequence]
) -> tuple[BlockPool, tuple[Sequence, ...], Moves]:
    """Blocks of a fresh pool for the sequences, row after row; what was shared is shared again.

    Returns the pool, the sequences with their new blocks, and which block moves where.
    """
    sequences = tuple(sequences)
    pool, placed = BlockPool.create(spec), []
    moved: dict[str, dict[int, int]] = {name: {} for name in spec.names}
    holders = {g: collections.Counter(b for s in sequences for b in s.blocks[g]) for g in moved}
    for row, sequence in enumerate(sequences):
        fresh = {g: [b for b in sequence.blocks[g] if b not in moved[g]] for g in moved}
        shared = {g: [moved[g][b] for b in sequence.blocks[g] if b in moved[g]] for g in moved}
        pool, ids = pool.allocate(sequence.id, {g: len(blocks) for g, blocks in fresh.items()})
        pool = pool.share(sequence.id, shared)
        for group, blocks in fresh.items():
            moved[group].update(zip(blocks, ids[group].tolist(), strict=True))
        sealed = {
            g: [moved[g][b] for b in blocks if sequence.forked or holders[g][b] > 1]
            for g, blocks in fresh.items()
        }
        pool = pool.seal(sequence.id, sealed)
        blocks = {g: tuple(moved[g][b] for b in sequence.blocks[g]) for g in moved}
        placed.append(dataclasses.replace(sequence, blocks=blocks, row=row))
    moves = {
        g: (np.array(list(pairs), np.int32), np.array(list(pairs.values()), np.int32))
        for g, pairs in moved.items()
    }
    return pool, tuple(placed), moves
