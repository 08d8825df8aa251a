"""Which prefixes have a checkpoint: an immutable index from token blocks to sealed state blocks.

A prompt is cut into blocks of 64 tokens, each named by a hash of itself and all before it, so that a name stands for
a whole prefix. A node of the index says that the state after such a prefix is kept, in one sealed block of every group
together: a hit is a hit for all groups or for none. Looking up changes nothing, so a match that comes to nothing needs
no undoing; what is learned is a new value.

The index also remembers names of prefixes that were read and not kept. They say where a new prompt branches off from
what others share, which is where a checkpoint pays.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from rpds import HashTrieMap

from pallas_kernels.rows import CHUNK

Key = bytes


@dataclasses.dataclass(frozen=True)
class Checkpoint:
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


@dataclasses.dataclass(frozen=True)
class Match:
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

    nodes: HashTrieMap = dataclasses.field(default_factory=HashTrieMap)
    seen: HashTrieMap = dataclasses.field(default_factory=HashTrieMap)
    clock: float = 0.0
    victims: tuple[tuple[float, Key], ...] = ()
    seen_limit: int = 65_536

    def match(self, keys: Sequence[Key], length: int) -> Match:
        """The deepest checkpoint of a prompt with these names; at least one of its tokens is left to compute."""
        usable = max(length - 1, 0) // CHUNK
        shared = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self.seen), 0)
        for n in range(usable, 0, -1):
            node = self.nodes.get(keys[n - 1])
            if node is not None:
                return Match(node, shared * CHUNK, None)
        if not usable:
            miss = "too_short"
        elif shared:
            miss = "not_kept"
        else:
            miss = "unknown"
        return Match(None, shared * CHUNK, miss)

    def see(self, keys: Iterable[Key]) -> PrefixIndex:
        """The index after a prompt with these names was read; the oldest half is forgotten when there are too many."""
        seen = self.seen
        for key in keys:
            if key not in seen:
                seen = seen.insert(key, len(seen))
        if len(seen) > self.seen_limit:
            kept = sorted(seen.items(), key=lambda item: item[1])[len(seen) // 2 :]
            seen = HashTrieMap({key: order for order, (key, _) in enumerate(kept)})
        return dataclasses.replace(self, seen=seen)

    def insert(self, checkpoint: Checkpoint) -> PrefixIndex:
        """The index with this checkpoint, which is readable from now on."""
        return self._put(dataclasses.replace(checkpoint, priority=self.clock + checkpoint.cost))

    def adopt(self, checkpoint: Checkpoint) -> PrefixIndex:
        """The index with a checkpoint that another index has valued before, at `priority` above its clock."""
        index = self.see(checkpoint.chain)
        return index._put(
            dataclasses.replace(checkpoint, priority=self.clock + checkpoint.priority)
        )

    def use(self, key: Key) -> PrefixIndex:
        """The index after a hit."""
        node, uses = self.nodes[key], self.nodes[key].uses + 1
        priority = self.clock + (uses + 1) * node.cost
        return self._put(dataclasses.replace(node, uses=uses, priority=priority))

    def _put(self, node: Checkpoint) -> PrefixIndex:
        victims = self.victims
        if victims and (node.priority, node.key) < victims[-1]:
            at = bisect.bisect(victims, (node.priority, node.key))
            victims = (*victims[:at], (node.priority, node.key), *victims[at:])
        return dataclasses.replace(self, nodes=self.nodes.insert(node.key, node), victims=victims)

    def remove(self, key: Key) -> PrefixIndex:
        """The index without this checkpoint."""
        return dataclasses.replace(self, nodes=self.nodes.remove(key))

    def pin(self, key: Key, pinned: bool = True) -> PrefixIndex:
        """The index with this checkpoint kept whatever happens, or no longer."""
        node = dataclasses.replace(self.nodes[key], pinned=pinned)
        return dataclasses.replace(self, nodes=self.nodes.insert(key, node))

    def evict(self, keep: frozenset[Key] = frozenset()) -> tuple[PrefixIndex, Checkpoint] | None:
        """The index without its least valuable checkpoint that is neither pinned nor in `keep`; None if all are."""
        victims = self.victims
        for fresh in (False, True):
            if fresh:
                # A queue of the least valuable, sorted once for many evictions. Places that a node had before it was
                # used are passed over.
                nodes = (n for n in self.nodes.values() if not n.pinned)
                victims = tuple(sorted((n.priority, n.key) for n in nodes)[:64])
            for i, (priority, key) in enumerate(victims):
                node = self.nodes.get(key)
                if node is None or node.priority != priority or node.pinned or key in keep:
                    continue
                rest = victims[:i] + victims[i + 1 :]
                index = dataclasses.replace(self.remove(key), clock=priority, victims=rest)
                return index, node
        return None

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        pinned = sum(node.pinned for node in self.nodes.values())
        return f"PrefixIndex({len(self.nodes)} checkpoints, {pinned} pinned, {len(self.seen)} prefixes seen)"


def holder_of(key: Key) -> str:
    """How the names begin under which the pool lists checkpoints of this prefix; no request's id begins like it."""
    return f"\x00checkpoint {key.hex()}"


def block_keys(tokens: Sequence[int], salt: str = "") -> tuple[Key, ...]:
    """The names of every whole 64-token prefix of a text; texts with different salts never share one."""
    data = np.asarray(tokens, dtype="<i4").tobytes()
    key, size, keys = hashlib.blake2b(salt.encode(), digest_size=16).digest(), 4 * CHUNK, []
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
    candidates = [last, match.shared]
    step = ladder
    while step < last:
        candidates.append(step)
        step *= 2
    # The ladder's upper rungs save more than its lower ones.
    candidates = candidates[:2] + candidates[:1:-1]
    picked: list[int] = []
    for position in candidates:
        if start < position <= last and position not in picked:
            picked.append(position)
    return tuple(sorted(picked[:most]))
