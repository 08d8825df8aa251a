"""A schedule while the next step is being made of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxstate.plan import HostTables
from jaxstate.prefix import Checkpoint, Key, holder_of
from jaxstate.schedule import Running, Schedule, Waiting
from jaxstate.state.pool import BlockPool
from jaxstate.values import changed
from pallas_kernels.rows import CHUNK


class Draft:
    """The schedule after a step while the step is being made; a step that is refused leaves `before` as it was."""

    def __init__(self, before: Schedule):
        self.before, self.shape, self.spec = before, before.shape, before.spec
        self.ledger, self.index = before.pool.open(), before.index
        self.rows, self.holders = list(before.rows), list(before.holders)
        self.counts, self.starting = before.counts, before.starting
        self.waiting, self.answers = before.waiting, before.answers
        self.admitted, self.skipped, self.evicted = before.admitted, before.skipped, before.evicted
        # What this step leaves, by holder; and the names of all that is to come.
        self.staged: dict[str, Checkpoint] = {}
        self.coming = {checkpoint.key for checkpoint in before.staged.values()}
        # Checkpoints that rows are yet to start from: letting them go would free nothing.
        self.keep: set[Key] = set()
        self.preempted: list[str] = []

    def schedule(self, pool: BlockPool, tables: HostTables, turn: str) -> Schedule:
        return changed(
            self.before, pool=pool, tables=tables, rows=tuple(self.rows), holders=tuple(self.holders),
            counts=self.counts, starting=self.starting, waiting=self.waiting, admitted=self.admitted, turn=turn,
            index=self.index.close(), staged={**self.before.staged, **self.staged}, garbage=(),
            skipped=self.skipped, evicted=self.evicted, answers=self.answers,
        )  # fmt: skip

    def width(self, group: str) -> int:
        """How many block ids a row of this group's table holds."""
        return self.before.tables[group].shape[1]

    def seat(self, running: Running) -> None:
        """Gives the request its row."""
        self.rows[running.row], self.holders[running.row] = running, running.request.id
        self.admitted = running.order

    def vacate(self, row: int) -> None:
        """Makes the row nobody's; its counts are the caller's to clear."""
        self.rows[row] = self.holders[row] = None

    def running(self, row: int) -> Running:
        """The request of a row that has one."""
        running = self.rows[row]
        assert running is not None, f"row {row} is nobody's"
        return running

    def make_room(self, need: Mapping[str, int]) -> bool:
        """Lets go of as many checkpoints as it takes; False, and no change, if all of them do not suffice."""
        short = self.ledger.short(need)
        if not short:
            return True
        # All that may be kept may be; only if that is too many is it looked at.
        sure = len(self.index) - self.index.pinned - len(self.keep)
        if short > sure and short > self.index.evictable(self.keep):
            return False
        while short:
            step = self.index.evict(self.keep)
            if step is None:
                return False
            self.index, node = step
            self.ledger.release(node.holder)
            self.evicted += 1
            short = self.ledger.short(need)
        return True

    def last_before(self, running: Running, position: int) -> int:
        """The last place before this one where a state of the prompt is kept or coming; its start, if there is none."""
        nodes, first, last = self.index.nodes, running.cached // CHUNK, position // CHUNK - 1
        for n, key in zip(range(last, first, -1), running.keys[first:last][::-1], strict=True):
            if key in self.coming or key in nodes:
                return n * CHUNK
        return running.cached

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
        counts, rows = self.counts, (self.counts.spare & self.counts.reading).nonzero()[0].tolist()
        if rows:
            self.counts = counts.put(rows, ended=True)
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
        self.counts = self.counts.put(
            [row], prompt=0, budget=0, known=0, read=0, made=0, ended=False, spare=False
        )
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
