"""Which prefixes have a checkpoint: an immutable index from token blocks to sealed state blocks.

A prompt is cut into blocks of 64 tokens, each named by a hash of itself and all before it, so that a name stands for
a whole prefix. A node of the index says that the state after such a prefix is kept, in one sealed block of every group
together: a hit is a hit for all groups or for none. Looking up changes nothing, so a match that comes to nothing needs
no undoing; what is learned is a new value.

The index also remembers names of prefixes that were read and not kept. They say where a new prompt branches off from
what others share, which is where a checkpoint pays.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxstate.priorities import Priorities
from jaxstate.state.overlay import Overlay
from jaxstate.values import changed
from pallas_kernels.rows import CHUNK

Key = bytes

OWN = "\x00"
"""How ids begin that the engine gives itself, and no request of a user's does."""


class Checkpoint(NamedTuple):
    """A kept state: after `position` tokens, in `blocks[group]`, which the pool lists under `holder`."""

    key: Key
    position: int
    blocks: dict[str, int]
    holder: str
    writer: str  # the request that computed it
    cost: int  # tokens to compute again if it is lost
    uses: int = 0
    priority: float = 0.0
    pinned: bool = False
    chain: tuple[Key, ...] = ()  # names of all 64-token prefixes up to this one
    salt: str = ""

    def ranked(self, uses: int, priority: float) -> Checkpoint:
        """The same state, used so often and worth so much."""
        return Checkpoint._make((*self[:6], uses, priority, *self[8:]))


class Match(NamedTuple):
    """What the index has for a prompt: the deepest usable checkpoint, or why there is none.

    `shared` is how many tokens of the prompt have been read before by anyone, whether or not their state was kept.
    """

    checkpoint: Checkpoint | None
    shared: int
    miss: str | None


@dataclasses.dataclass(frozen=True)
class PrefixIndex:
    """Kept states by name, and names that were seen.

    Nodes are let go by the greedy dual rule (Cao & Irani 1997, "Cost-aware WWW proxy caching algorithms"): the least
    `clock at last use + uses * cost` goes first, and the clock moves up to it, so that what is dear to compute again
    stays longer and what nobody asks for goes in the end. All nodes take equally many bytes.
    """

    nodes: Overlay[Key, Checkpoint] = dataclasses.field(default_factory=Overlay)
    seen: Overlay[Key, None] = dataclasses.field(default_factory=Overlay)
    seen_before: Overlay[Key, None] = dataclasses.field(default_factory=Overlay)
    clock: float = 0.0
    pinned: int = 0  # nodes that are
    seen_limit: int = 65_536
    # Each node's priority when it was put here, at most what it is now, and some that are gone.
    queue: Priorities = dataclasses.field(default=Priorities(), compare=False, repr=False)
    opened: bool = dataclasses.field(default=False, compare=False, repr=False)

    def match(self, keys: Sequence[Key], length: int) -> Match:
        """The deepest checkpoint of a prompt with these names; at least one of its tokens is left to compute."""
        usable = max(length - 1, 0) // CHUNK
        shared = self.seen.last_in(keys, 0, len(keys)) + 1
        shared = max(shared, self.seen_before.last_in(keys, shared, len(keys)) + 1)
        at = self.nodes.last_in(keys, 0, min(usable, len(keys)))
        if at >= 0:
            return Match(self.nodes[keys[at]], shared * CHUNK, None)
        if not usable:
            miss = "too_short"
        elif shared:
            miss = "not_kept"
        else:
            miss = "unknown"
        return Match(None, shared * CHUNK, miss)

    def open(self) -> PrefixIndex:
        """The same index for a series of changes, of which only the last value is good; `close` ends it."""
        return changed(self, nodes=self.nodes.open(), seen=self.seen.open(), opened=True)

    def close(self) -> PrefixIndex:
        """What the changes come to."""
        if not self.opened:
            return self
        seen, before = self.seen.close(), self.seen_before.close()
        nodes = self.nodes.close()
        return changed(self, nodes=nodes, seen=seen, seen_before=before, opened=False)

    def _with(self, **fields: Any) -> PrefixIndex:
        """The index with other fields: this one, if it is open."""
        if not self.opened:
            return changed(self, **fields)
        self.__dict__.update(fields)
        return self

    def see(self, keys: Sequence[Key]) -> PrefixIndex:
        """The index after a prompt with these names was read; what was not read for long is forgotten in the end."""
        seen, before = self.seen, self.seen_before
        if len(seen) >= self.seen_limit // 2:
            seen, before = type(seen)(), seen
        # Whoever saw a prefix saw all that it begins with.
        new = keys[seen.last_in(keys, 0, len(keys)) + 1 :]
        return self._with(seen=seen.put_all(new, None), seen_before=before) if new else self

    def insert(self, checkpoint: Checkpoint) -> PrefixIndex:
        """The index with this checkpoint, which is readable from now on."""
        return self._queued(checkpoint.ranked(checkpoint.uses, self.clock + checkpoint.cost))

    def adopt(self, checkpoint: Checkpoint) -> PrefixIndex:
        """The index with a checkpoint that another index has valued before, at `priority` above its clock."""
        index = self.see(checkpoint.chain)
        return index._queued(checkpoint.ranked(checkpoint.uses, self.clock + checkpoint.priority))

    def use(self, key: Key) -> PrefixIndex:
        """The index after a hit."""
        nodes = self.nodes
        node = nodes[key]
        used = node.ranked(node.uses + 1, self.clock + (node.uses + 2) * node.cost)
        return self._with(nodes=nodes.put(key, used))

    def remove(self, key: Key) -> PrefixIndex:
        """The index without this checkpoint."""
        pinned = self.pinned - self.nodes[key].pinned
        return self._with(nodes=self.nodes.drop(key), pinned=pinned)

    def pin(self, key: Key, pinned: bool = True) -> PrefixIndex:
        """The index with this checkpoint kept whatever happens, or no longer."""
        node = self.nodes[key]._replace(pinned=pinned)
        return self._put(node, self.queue) if pinned else self._queued(node)

    def evictable(self, keep: Collection[Key]) -> int:
        """How many checkpoints are neither pinned nor in `keep`."""
        nodes = [self.nodes.get(key) for key in keep]
        kept = [node for node in nodes if node is not None and not node.pinned]
        return len(self.nodes) - self.pinned - len(kept)

    def evict(
        self, count: int = 1, keep: Collection[Key] = ()
    ) -> tuple[PrefixIndex, list[Checkpoint]]:
        """The index without its least valuable checkpoints that are neither pinned nor in `keep`, and these.

        There are `count` of them, or as many as there are, the least valuable first.
        """
        queue, nodes, clock, kept, gone = self.queue, self.nodes.open(), self.clock, [], []
        while len(gone) < count and queue.size:
            (priority, key), queue = queue.pop()
            node = nodes.get(key)
            if node is None or node.pinned or node.priority < priority:
                continue  # the place of one that has gone, or has another place
            if node.priority > priority:
                queue = queue.push((node.priority, key))  # used since
            elif key in keep:
                kept.append((priority, key))
            else:
                nodes.drop(key)
                gone.append(node)
                clock = priority
        if not gone:
            return self, gone  # what is kept has its places yet
        for place in kept:
            queue = queue.push(place)
        nodes = nodes if self.opened else nodes.close()
        return self._with(nodes=nodes, clock=clock, queue=queue), gone

    def _put(self, node: Checkpoint, queue: Priorities) -> PrefixIndex:
        before = self.nodes.get(node.key)
        pinned = self.pinned + node.pinned - (before is not None and before.pinned)
        return self._with(nodes=self.nodes.put(node.key, node), pinned=pinned, queue=queue)

    def _queued(self, node: Checkpoint) -> PrefixIndex:
        index = self._put(node, self.queue.push((node.priority, node.key)))
        if index.queue.size > 2 * len(index.nodes) + 64:
            # Most of it are places of checkpoints that were dropped.
            places = ((other.priority, other.key) for other in index.nodes.values())
            return index._with(queue=Priorities.of(places))
        return index

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        seen = len(self.seen) + len(self.seen_before)
        return f"PrefixIndex({len(self.nodes)} checkpoints, {self.pinned} pinned, {seen} prefixes seen)"


def holder_of(key: Key) -> str:
    """How the names begin under which the pool lists checkpoints of this prefix; no request's id begins like it."""
    return f"{OWN}checkpoint {key.hex()}"


def salt_bytes(salt: str) -> bytes:
    """What stands for a salt in hashes; any text has it, also one that is not valid Unicode."""
    return salt.encode("utf-8", "surrogatepass")


def block_keys(tokens: Sequence[int] | np.ndarray, salt: str = "") -> tuple[Key, ...]:
    """The names of every whole 64-token prefix of a text; texts with different salts never share one."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    key, size, keys = hashlib.blake2b(salt_bytes(salt), digest_size=16).digest(), 4 * CHUNK, []
    for at in range(0, len(data) - size + 1, size):
        key = hashlib.blake2b(key + data[at : at + size], digest_size=16).digest()
        keys.append(key)
    return tuple(keys)


def wanted(match: Match, length: int, *, ladder: int = 512, most: int = 4) -> tuple[int, ...]:
    """Where a prompt that is about to be read should leave checkpoints: at most `most` positions, ascending.

    In this order of worth: the last one before its end, where it branches off from what others read, and a geometric
    ladder (512, 1024, 2048, …) for those who will share part of it.
    """
    start = match.checkpoint.position if match.checkpoint is not None else 0
    last = max(length - 1, 0) // CHUNK * CHUNK
    if last <= start:
        return ()
    picked = [last, match.shared] if start < match.shared < last else [last]
    step = ladder
    while 2 * step < last:
        step *= 2
    # The ladder's upper rungs save more than its lower ones.
    while max(start, ladder - 1) < step and len(picked) < most:
        if step < last and step != match.shared:
            picked.append(step)
        step //= 2
    return tuple(sorted(picked[:most]))
