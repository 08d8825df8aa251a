"""Who waits, who runs in which row, whose each block is, which prefixes are kept: all the host knows, as a value.

Everything here returns a new `Schedule`. What a step computes for others to start from (a checkpoint) is staged when it
is planned and becomes visible by `publish`, once the step was seen to complete; a request that is aborted or breaks
takes its staged checkpoints with it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxstate.plan import HostTables, PlanShape
from jaxstate.prefix import Checkpoint, Key, PrefixIndex, block_keys, holder_of
from jaxstate.request import Request
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request without a row; after a preemption, with the tokens that it has made already."""

    request: Request
    keys: tuple[Key, ...] = ()
    made: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.request.id


@dataclasses.dataclass(frozen=True)
class Running:
    """A request that has a row: how much of it has been planned so far."""

    request: Request
    row: int
    budget: int  # tokens it may generate
    order: int  # of admission
    read: int = 0  # prompt tokens planned, or taken from a checkpoint
    made: int = 0  # generated tokens planned, if it does not stop early
    ended: bool = False
    at: int = 0  # generated tokens planned before the step that it was last part of
    keys: tuple[Key, ...] = ()
    wants: tuple[int, ...] = ()  # positions where it is yet to leave a checkpoint
    source: dict[str, int] | None = None  # the checkpoint it starts from, until it has
    cached: int = 0  # prompt tokens taken from the checkpoint
    miss: str | None = None  # why there was none
    known: tuple[int, ...] = ()  # tokens made before a preemption, to be made again

    @property
    def reading(self) -> bool:
        return not self.ended and self.read < len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        return not self.ended and self.read == len(self.request.prompt) and self.made < self.budget

    def decoded(self, steps: int) -> Running:
        """The request after so many more decode steps were planned; `dataclasses.replace` several times as fast."""
        now, after = self.__dict__.copy(), object.__new__(Running)
        made = now["at"] = now["made"]
        now["made"] = min(made + steps, now["budget"])
        object.__setattr__(after, "__dict__", now)
        return after

    @property
    def leaving(self) -> bool:
        """Whether nothing more is to be planned for it but the clearing of its row."""
        return self.ended or self.made >= self.budget


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who waits, who runs in which row, which blocks are whose, and what the tables hold once all planned steps ran.

    `staged` are checkpoints that a planned step writes and that nobody may read yet, by holder; `garbage` are holders
    whose blocks the next plan frees; `skipped` counts checkpoints for which there was no block.
    """

    shape: PlanShape
    pool: BlockPool
    tables: HostTables
    rows: tuple[Running | None, ...]
    waiting: tuple[Waiting, ...] = ()
    admitted: int = 0
    turn: str = "prefill"
    index: PrefixIndex = dataclasses.field(default_factory=PrefixIndex)
    staged: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)
    garbage: tuple[str, ...] = ()
    skipped: int = 0
    evicted: int = 0

    @classmethod
    def create(cls, shape: PlanShape) -> Schedule:
        """A schedule with all rows and blocks free."""
        spec = shape.spec
        tables = {g: np.zeros((spec.rows, spec.capacity(g)), np.int32) for g in spec.names}
        return cls(shape, BlockPool.create(spec), tables, (None,) * spec.rows)

    @property
    def spec(self) -> CacheSpec:
        return self.shape.spec

    @property
    def running(self) -> tuple[Running, ...]:
        return tuple(r for r in self.rows if r is not None)

    @property
    def idle(self) -> bool:
        """Whether no plan is needed: nobody waits, every row is null and nothing is to be freed."""
        return not self.waiting and not self.running and not self.garbage

    @property
    def holders(self) -> list[str | None]:
        return [r.request.id if r is not None else None for r in self.rows]

    def __repr__(self) -> str:
        rows = f"{len(self.running)} of {self.spec.rows} rows running"
        kept = f", {self.index}" if self.shape.checkpoints else ""
        return f"Schedule({rows}, {len(self.waiting)} waiting, {self.pool}{kept})"


def budget_of(request: Request, spec: CacheSpec) -> int:
    """Tokens that the request may generate: what it asks for, as far as `max_len` has room.

    Raises:
      CapacityError: the prompt leaves no room for even one token.
    """
    spec.need(len(request.prompt) + 1, request.id)
    return min(request.sampling.max_tokens, spec.max_len - len(request.prompt))


def submit(schedule: Schedule, request: Request) -> Schedule:
    """Puts the request at the end of the queue; CapacityError when it can never fit."""
    budget_of(request, schedule.spec)
    keys = block_keys(request.prompt, request.cache_salt) if schedule.shape.checkpoints else ()
    return dataclasses.replace(schedule, waiting=(*schedule.waiting, Waiting(request, keys)))


def end(schedule: Schedule, request_id: str, *, discard: bool = False) -> Schedule:
    """Ends the request wherever it is; the next plan clears its row. Unknown or ended requests change nothing.

    With `discard` nothing that it wrote and that is not visible yet ever becomes so.
    """
    waiting = tuple(w for w in schedule.waiting if w.id != request_id)
    rows = tuple(
        dataclasses.replace(r, ended=True) if r is not None and r.request.id == request_id else r
        for r in schedule.rows
    )
    schedule = dataclasses.replace(schedule, waiting=waiting, rows=rows)
    if discard:
        mine = [h for h, c in schedule.staged.items() if c.writer == request_id]
        schedule = _discard(schedule, mine)
    return schedule


def distrust(schedule: Schedule, request_id: str) -> Schedule:
    """Forgets every checkpoint that the request wrote, visible or not: its scores turned out not to be finite."""
    index, garbage = schedule.index, []
    for node in list(index.nodes.values()):
        if node.writer == request_id:
            index = index.remove(node.key)
            garbage.append(node.holder)
    schedule = dataclasses.replace(schedule, index=index, garbage=(*schedule.garbage, *garbage))
    return end(schedule, request_id, discard=True)


def preempt(schedule: Schedule, request_id: str, made: tuple[int, ...]) -> Schedule:
    """Takes the request's row away and puts it first in the queue; it will make the tokens in `made` again."""
    running = next((r for r in schedule.running if r.request.id == request_id), None)
    if running is None or running.ended:
        return schedule
    ended = end(schedule, request_id, discard=True)
    waiting = Waiting(running.request, running.keys, made)
    return dataclasses.replace(ended, waiting=(waiting, *ended.waiting))


def publish(schedule: Schedule, staged: tuple[str, ...]) -> Schedule:
    """Makes the checkpoints of a step that was seen to complete visible, but for those discarded meanwhile."""
    for holder in staged:
        checkpoint = schedule.staged.get(holder)
        if checkpoint is None:
            continue
        if checkpoint.key in schedule.index.nodes:
            schedule = _discard(schedule, [holder])
            continue
        blocks = {group: [block] for group, block in checkpoint.blocks.items()}
        pool = schedule.pool.seal(holder, blocks)
        rest = {h: c for h, c in schedule.staged.items() if h != holder}
        index = schedule.index.insert(checkpoint)
        schedule = dataclasses.replace(schedule, pool=pool, staged=rest, index=index)
    return schedule


def adopt(schedule: Schedule, stored: Checkpoint) -> tuple[Schedule, dict[str, int]] | None:
    """The schedule with a checkpoint that was computed elsewhere, and the blocks that its state is to be put in.

    None when it is there already, or when there is no free block: nothing is let go for it.
    """
    pool, one = schedule.pool, dict.fromkeys(schedule.spec.names, 1)
    holder = f"{holder_of(stored.key)} stored"
    if stored.key in schedule.index.nodes or holder in pool.held or not pool.fits(one):
        return None
    pool, ids = pool.allocate(holder, one)
    blocks = {group: int(block[0]) for group, block in ids.items()}
    pool = pool.seal(holder, ids)
    checkpoint = dataclasses.replace(stored, blocks=blocks, holder=holder, writer=holder)
    index = schedule.index.adopt(checkpoint)
    return dataclasses.replace(schedule, pool=pool, index=index), blocks


def forget_prefixes(schedule: Schedule) -> Schedule:
    """Drops every checkpoint that is not pinned; the next plan frees their blocks."""
    index, garbage = schedule.index, []
    for node in list(index.nodes.values()):
        if not node.pinned:
            index = index.remove(node.key)
            garbage.append(node.holder)
    return dataclasses.replace(schedule, index=index, garbage=(*schedule.garbage, *garbage))


def _discard(schedule: Schedule, holders: list[str]) -> Schedule:
    staged = {h: c for h, c in schedule.staged.items() if h not in holders}
    return dataclasses.replace(schedule, staged=staged, garbage=(*schedule.garbage, *holders))
