"""A schedule while the next step is being made of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxstate.plan import Holders, HostTables
from jaxstate.prefix import Checkpoint, Key, holder_of
from jaxstate.schedule import Counts, Running, Schedule, Waiting
from jaxstate.state.ledger import Blocks, Ledger
from jaxstate.state.pool import BlockPool
from jaxstate.values import changed
from pallas_kernels.rows import CHUNK


class Draft:
    """The schedule after a step while the step is being made; a step that is refused leaves `before` as it was."""

    def __init__(self, before: Schedule):
        self.before, self.shape, self.spec = before, before.shape, before.spec
        self._ledger: Ledger | None = None
        self.index = before.index
        # Copied when the first of them gets or loses a request, as the counts are.
        self.rows: SequenceOf[Running | None] = before.rows
        self._seated: dict[int, str | None] = {}
        self.counts, self._owns_counts, self.starting = before.counts, False, before.starting
        self.waiting, self.answers = before.waiting, before.answers
        self.admitted, self.skipped, self.evicted = before.admitted, before.skipped, before.evicted
        # What this step leaves, by holder; and the names of all that is to come.
        self.staged: dict[str, Checkpoint] = {}
        self.coming = {checkpoint.key for checkpoint in before.staged.values()}
        # Checkpoints that rows are yet to start from: letting them go would free nothing.
        self.keep: set[Key] = set()
        self.preempted: list[str] = []

    def schedule(
        self, pool: BlockPool, tables: HostTables, holders: Holders, turn: str
    ) -> Schedule:
        staged = {**self.before.staged, **self.staged} if self.staged else self.before.staged
        return changed(
            self.before, pool=pool, tables=tables, rows=tuple(self.rows), holders=holders,
            counts=self.counts, starting=self.starting, waiting=self.waiting, admitted=self.admitted, turn=turn,
            index=self.index.close(), staged=staged, garbage=(),
            skipped=self.skipped, evicted=self.evicted, answers=self.answers,
        )  # fmt: skip

    @property
    def ledger(self) -> Ledger:
        """The pool's account, which is opened by the first who asks for it."""
        if self._ledger is None:
            self._ledger = self.before.pool.open()
        return self._ledger

    def pool(self) -> tuple[BlockPool, Blocks]:
        """The pool after the step, and what the step gives back: neither what has a new tenant nor a new holder."""
        if self._ledger is None:
            return self.before.pool, {}
        return self._ledger.close(), self._ledger.returned

    def holders(self) -> Holders:
        """Whose each row is."""
        return self.before.holders.put(self._seated)

    def own_counts(self) -> Counts:
        """The counts, in arrays that this draft may write to."""
        if not self._owns_counts:
            self.counts, self._owns_counts = self.counts.copied(), True
        return self.counts

    def seat(self, running: Running) -> None:
        """Gives the request its row, and counts what it has read and made so far."""
        row, counts = running.row, self.own_counts()
        self._put(row, running)
        self.reading.append(row)
        self.admitted = running.order
        counts.prompt[row], counts.budget[row] = len(running.tokens), running.budget
        if running.source is not None:
            counts.read[row] = running.cached
        if running.known:
            counts.known[row] = len(running.known)
        if running.reads == "answer":
            counts.spare[row] = True

    def vacate(self, row: int) -> None:
        """Makes the row nobody's; its counts are the caller's to clear."""
        self._put(row, None)

    def _put(self, row: int, running: Running | None) -> None:
        if not isinstance(self.rows, list):
            self.rows = list(self.rows)
        self.rows[row] = running
        self._seated[row] = running.request.id if running is not None else None

    def running(self, row: int) -> Running:
        """The request of a row that has one."""
        running = self.rows[row]
        assert running is not None, f"row {row} is nobody's"
        return running

    @functools.cached_property
    def reading(self) -> list[int]:
        """Rows that have prompt tokens left to read, those of whoever enters with it."""
        return self.counts.reading.nonzero()[0].tolist()

    def free_rows(self) -> list[int]:
        """Rows that are nobody's, in order."""
        rows = self.before.holders.vacant.nonzero()[0].tolist()
        if not self._seated:
            return rows
        free = {row for row in rows if row not in self._seated}
        return sorted(free.union([row for row, name in self._seated.items() if name is None]))

    def chunks(self) -> list[tuple[Running, int]]:
        """How many prompt tokens each row reads now, oldest first, answers last; cut where a cut changes no bits."""
        if not self.reading:
            return []
        chunks, room = [], self.shape.chunk_tokens
        reading = [self.running(row) for row in self.reading]
        for running in sorted(reading, key=lambda r: (r.reads == "answer", r.order)):
            n = len(running.tokens) - int(self.counts.read[running.row])
            if n > room:
                n = room // CHUNK * CHUNK
            if n > 0:
                chunks.append((running, n))
                room -= n
        return chunks

    def make_room(self, need: Mapping[str, int]) -> bool:
        """Lets go of as many checkpoints as it takes; False, and no change, if all of them do not suffice."""
        short = self.ledger.short(need)
        if not short:
            return True
        # All that may be kept may be; only if that is too many is it looked at.
        sure = len(self.index) - self.index.pinned - len(self.keep)
        if short > sure and short > self.index.evictable(self.keep):
            return False
        return not self._let_go(need)

    def _let_go(self, need: Mapping[str, int]) -> int:
        """Lets go of as many checkpoints as it takes, or of all; how many blocks are missing then."""
        ledger, short = self.ledger, self.ledger.short(need)
        while short:
            self.index, gone = self.index.evict(short, self.keep)
            if not gone:
                break
            for node in gone:
                ledger.release(node.holder)
            self.evicted += len(gone)
            short = ledger.short(need)
        return short

    def room_for(self, count: int) -> int:
        """Lets go of as many checkpoints as so many others take, or of all; for how many there are blocks then."""
        return count - self._let_go(dict.fromkeys(self.spec.names, count)) if count else 0

    def last_before(self, running: Running, position: int) -> int:
        """The last place before this one where a state of the prompt is kept or coming; its start, if there is none."""
        keys, first, last = running.keys, running.cached // CHUNK, position // CHUNK - 1
        at = self.index.nodes.last_in(keys, first, last)
        if not self.coming.isdisjoint(keys[max(first, at + 1) : last]):
            at = max(n for n in range(first, last) if keys[n] in self.coming)
        return (at + 1) * CHUNK if at >= 0 else running.cached

    def stage(self, running: Running, position: int, blocks: dict[str, int], holder: str) -> None:
        """Takes down that the request leaves its state after `position` tokens in these blocks."""
        checkpoint = Checkpoint(
            running.keys[position // CHUNK - 1], position, blocks, holder, running.request.id,
            position - self.last_before(running, position),
            chain=running.keys[: position // CHUNK], salt=running.request.cache_salt,
        )  # fmt: skip
        self.staged[holder] = checkpoint
        self.coming.add(checkpoint.key)

    def hold(self, running: Running) -> None:
        """Has a row that reads nothing in this step hold the checkpoint that it is to start from."""
        assert running.source is not None
        self.ledger.share(running.request.id, one_each(running.source.blocks))
        self.starting = (*self.starting, running.row)

    def keep_last(self, running: Running) -> None:
        """Makes the state that a row leaves behind a checkpoint: its block is sealed and changes hands."""
        position, name = len(running.tokens), running.request.id
        blocks = {
            group: int(self.before.tables[group][running.row, need - 1])
            for group, need in self.spec.need(position).items()
        }
        holder = f"{holder_of(running.keys[-1])} {running.order}"
        self.ledger.seal(name, one_each(blocks))
        self.ledger.share(holder, one_each(blocks))
        self.stage(running, position, blocks, holder)

    def drop_spare(self) -> None:
        """Takes their rows from answers that are not read to the end; they are the next to be forgotten."""
        counts = self.counts
        if not np.count_nonzero(counts.spare):
            return
        rows = (counts.spare & counts.reading).nonzero()[0].tolist()
        if rows:
            self.own_counts().ended[rows] = True
            again = [self.running(row) for row in rows]
            dropped = [Waiting(r.request, r.tokens, r.keys, reads=r.reads) for r in again]
            self.answers = (*dropped, *self.answers)[-self.spec.rows :]

    def preempt(self) -> int:
        """Takes its row from an answer or, if none is being read, from the youngest request; the row."""
        running = max(
            (r for r in self.rows if r is not None), key=lambda r: (r.reads == "answer", r.age)
        )
        row = running.row
        self.ledger.release(running.request.id)
        self.vacate(row)
        for count in self.own_counts():
            count[row] = 0
        self.starting = tuple(other for other in self.starting if other != row)
        sources = [self.running(other).source for other in self.starting]
        self.keep = {source.key for source in sources if source is not None}
        if running.reads == "answer":
            self.answers = (running.again(), *self.answers)[-self.spec.rows :]
            return row
        self.waiting = (running.again(), *self.waiting)
        if not running.reads:
            self.preempted.append(running.request.id)
        return row

    def lacking(self, steps: int) -> dict[str, np.ndarray]:
        """By group with several blocks a sequence: how many each row needs beside its own for its next decode steps."""
        spec, counts, lacks = self.spec, self.counts, {}
        for group in spec.groups:
            per_block = group.tokens_per_block(spec.context_shards)
            if per_block is not None:
                tokens = counts.prompt + np.minimum(counts.made + steps, counts.budget)
                has = np.count_nonzero(self.before.tables[group.name], axis=1)
                lacks[group.name] = (-(-tokens // per_block) - has) * counts.decoding
        return lacks


def one_each(blocks: Mapping[str, int]) -> dict[str, list[int]]:
    return {group: [block] for group, block in blocks.items()}
