"""Who waits, who runs in which row, whose each block is, which prefixes are kept: all the host knows, as a value.

Everything here returns a new `Schedule`. What a step computes for others to start from (a checkpoint) is staged when it
is planned and becomes visible by `publish`, once the step was seen to complete; a request that is aborted or breaks
takes its staged checkpoints with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from jaxstate.plan import Holders, HostTables, PlanShape
from jaxstate.prefix import Checkpoint, Key, PrefixIndex, block_keys, holder_of
from jaxstate.request import Request
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import CacheSpec
from jaxstate.values import changed


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A request without a row; after a preemption with its age and the tokens that it is known to have made."""

    request: Request
    tokens: np.ndarray = dataclasses.field(
        compare=False, repr=False
    )  # the prompt's, as a plan takes them
    keys: tuple[Key, ...] = ()
    made: tuple[int, ...] = ()
    reads: str = ""  # for whom it is read: a request, or for later ones, a `pin` or an `answer`
    age: int = 0  # which admission its first one was; 0 if it never had a row

    @property
    def id(self) -> str:
        return self.request.id


@dataclasses.dataclass(frozen=True)
class Running:
    """A request that has a row, and what was settled when it got it; `Counts` say how far it has come."""

    request: Request
    tokens: np.ndarray = dataclasses.field(compare=False, repr=False)
    keys: tuple[Key, ...]
    row: int
    budget: int  # tokens it may generate
    order: int  # of admission
    age: int  # the order of its first admission
    wants: tuple[int, ...]  # positions where it leaves a checkpoint
    source: Checkpoint | None  # what it starts from
    miss: str | None  # why there is none
    known: tuple[int, ...]  # tokens made before a preemption, to be made again
    reads: str = ""  # as in `Waiting`

    @property
    def cached(self) -> int:
        """Prompt tokens taken from the checkpoint."""
        return self.source.position if self.source is not None else 0

    def again(self, made: tuple[int, ...] = ()) -> Waiting:
        """The request as it waits after a preemption."""
        return Waiting(self.request, self.tokens, self.keys, made, self.reads, self.age)


class Counts(NamedTuple):
    """How far each row has come; a null row's counts are zero. The arrays are never written to."""

    prompt: np.ndarray  # tokens
    budget: np.ndarray  # tokens it may generate
    known: np.ndarray  # tokens made before a preemption, to be made again
    read: np.ndarray  # prompt tokens planned, or taken from a checkpoint
    made: np.ndarray  # generated tokens planned, if it does not stop early
    ended: np.ndarray
    spare: np.ndarray  # reads an answer, where there is room for it

    @classmethod
    def zeros(cls, rows: int) -> Counts:
        prompt, budget, known, read, made = np.zeros((5, rows), np.int64)
        return cls(prompt, budget, known, read, made, *np.zeros((2, rows), bool))

    @property
    def reading(self) -> np.ndarray:
        """Rows that have prompt tokens left to plan."""
        return (self.read < self.prompt) & ~self.ended

    @property
    def decoding(self) -> np.ndarray:
        """Rows that have read their prompt and may yet generate."""
        return (self.read == self.prompt) & (self.made < self.budget) & ~self.ended

    @property
    def leaving(self) -> np.ndarray:
        """Rows for which nothing more is to be planned but that they are cleared."""
        return (self.prompt > 0) & (self.ended | (self.made >= self.budget))

    def copied(self) -> Counts:
        """The same counts in arrays of their own, for whoever makes them to write to."""
        return Counts(*[array.copy() for array in self])

    def put(self, rows: SequenceOf[int] | np.ndarray | slice, **values: object) -> Counts:
        """The counts with these values in these rows."""
        after = self._asdict()
        rows = rows if isinstance(rows, slice) else np.asarray(rows, np.int64)
        for name, value in values.items():
            after[name] = after[name].copy()
            after[name][rows] = value
        return Counts(**after)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who waits, who runs in which row, which blocks are whose, and what the tables hold once all planned steps ran.

    `starting` are rows that have read nothing yet and hold the checkpoint that they are to start from. `staged` are
    checkpoints that a planned step writes and that nobody may read yet, by holder; `garbage` are holders whose blocks
    the next plan frees; `skipped` counts checkpoints for which there was no block. `answers` are texts that somebody
    may go on from, to be read when there is nothing better to do; `pins` are prefixes that are never let go, with who
    reads them if need be.
    """

    shape: PlanShape
    pool: BlockPool
    tables: HostTables
    rows: tuple[Running | None, ...]
    holders: Holders
    counts: Counts
    starting: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    admitted: int = 0
    turn: str = "prefill"
    index: PrefixIndex = dataclasses.field(default_factory=PrefixIndex)
    staged: dict[str, Checkpoint] = dataclasses.field(default_factory=dict)
    garbage: tuple[str, ...] = ()
    skipped: int = 0
    evicted: int = 0
    answers: tuple[Waiting, ...] = ()
    pins: Mapping[Key, Waiting] = dataclasses.field(default_factory=dict)

    @classmethod
    def create(cls, shape: PlanShape) -> Schedule:
        """A schedule with all rows and blocks free."""
        spec = shape.spec
        tables = {g: np.zeros((spec.rows, spec.capacity(g)), np.int32) for g in spec.names}
        return cls(
            shape, BlockPool.create(spec), tables, (None,) * spec.rows,
            Holders.of((None,) * spec.rows), Counts.zeros(spec.rows),
        )  # fmt: skip

    @property
    def spec(self) -> CacheSpec:
        return self.shape.spec

    @property
    def running(self) -> tuple[Running, ...]:
        return tuple(r for r in self.rows if r is not None)

    @property
    def idle(self) -> bool:
        """Whether no plan is needed: nobody waits, nothing is to be freed, and every row is null or reads an answer."""
        if self.waiting or self.garbage:
            return False
        spare = self.counts.spare & self.counts.reading
        return all(r is None or spare[r.row] for r in self.rows)

    @property
    def unsettled(self) -> bool:
        """Whether there are answers to read."""
        return bool(self.answers) or bool(np.count_nonzero(self.counts.spare))

    def __repr__(self) -> str:
        rows = f"{len(self.running)} of {self.spec.rows} rows running"
        kept = f", {self.index}" if self.shape.checkpoints else ""
        return f"Schedule({rows}, {len(self.waiting)} waiting, {self.pool}{kept})"


def budget_of(request: Request, spec: CacheSpec) -> int:
    """Tokens that the request may generate: what it asks for, as far as `max_len` has room.

    Raises:
      CapacityError: the prompt leaves no room for even one token.
    """
    room = spec.max_len - len(request.prompt)
    if room < 1:
        spec.need(len(request.prompt) + 1, request.id)
    return min(request.sampling.max_tokens, room)


def submit(schedule: Schedule, request: Request) -> Schedule:
    """Puts the request at the end of the queue; CapacityError when it can never fit."""
    budget_of(request, schedule.spec)
    tokens = np.array(request.prompt, np.int32)
    keys = block_keys(tokens, request.cache_salt) if schedule.shape.checkpoints else ()
    return dataclasses.replace(
        schedule, waiting=(*schedule.waiting, Waiting(request, tokens, keys))
    )


def end(schedule: Schedule, request_id: str, *, discard: bool = False) -> Schedule:
    """Ends the request wherever it is; the next plan clears its row. Unknown or ended requests change nothing.

    With `discard` nothing that it wrote and that is not visible yet ever becomes so.
    """
    schedule = _leave(schedule, lambda request: request.id == request_id)
    return _discard_of(schedule, request_id) if discard else schedule


def distrust(schedule: Schedule, request: Request) -> Schedule:
    """Ends a request whose scores turned out not to be finite, and forgets every checkpoint that it wrote.

    Another request may have its id by now; that one goes on.
    """
    index, garbage, request_id = schedule.index, [], request.id
    for node in list(index.nodes.values()):
        if node.writer == request_id:
            index = index.remove(node.key)
            garbage.append(node.holder)
    lost = {key: pin for key, pin in schedule.pins.items() if key not in index.nodes}
    # A pin whose own reader broke would break again.
    pins = {k: p for k, p in schedule.pins.items() if p.id != request_id}
    again = [p for k, p in lost.items() if k in schedule.index.nodes and p.id != request_id]
    schedule = dataclasses.replace(
        schedule, index=index, garbage=(*schedule.garbage, *garbage), pins=pins,
        waiting=(*schedule.waiting, *again),
    )  # fmt: skip
    return _discard_of(_leave(schedule, lambda other: other is request), request_id)


def _leave(schedule: Schedule, leaves: Callable[[Request], bool]) -> Schedule:
    rows = [i for i, r in enumerate(schedule.rows) if r is not None and leaves(r.request)]
    if rows:
        counts = schedule.counts.put(rows, ended=True)
        schedule = dataclasses.replace(schedule, counts=counts)
    # One that was preempted may be in both places until its row is cleared.
    if any(leaves(w.request) for w in schedule.waiting):
        waiting = tuple(w for w in schedule.waiting if not leaves(w.request))
        schedule = dataclasses.replace(schedule, waiting=waiting)
    return schedule


def _discard_of(schedule: Schedule, request_id: str) -> Schedule:
    return _discard(schedule, [h for h, c in schedule.staged.items() if c.writer == request_id])


def preempt(schedule: Schedule, request_id: str, made: tuple[int, ...]) -> Schedule:
    """Takes the request's row away and puts it first in the queue; it will make the tokens in `made` again."""
    running = next((r for r in schedule.running if r.request.id == request_id), None)
    if running is None or schedule.counts.ended[running.row]:
        return schedule
    ended = end(schedule, request_id)
    return dataclasses.replace(ended, waiting=(running.again(made), *ended.waiting))


def recall(schedule: Schedule, request_id: str, made: tuple[int, ...]) -> Schedule:
    """Tells a request that was preempted which tokens it has made, so that it makes these again."""
    waiting = tuple(
        dataclasses.replace(w, made=made) if w.id == request_id else w for w in schedule.waiting
    )
    return dataclasses.replace(schedule, waiting=waiting)


def publish(schedule: Schedule, staged: tuple[str, ...]) -> Schedule:
    """Makes the checkpoints of a step that was seen to complete visible, but for those discarded meanwhile."""
    if not staged:
        return schedule
    ledger, index = schedule.pool.open(), schedule.index.open()
    rest, known = dict(schedule.staged), []
    for holder in staged:
        checkpoint = rest.pop(holder, None)
        if checkpoint is None:
            continue
        if checkpoint.key in index.nodes:
            known.append(holder)
            continue
        ledger.seal(holder, {group: [block] for group, block in checkpoint.blocks.items()})
        index = index.insert(checkpoint)
        if checkpoint.key in schedule.pins:
            index = index.pin(checkpoint.key)
    garbage = (*schedule.garbage, *known)
    return changed(schedule, pool=ledger.close(), index=index.close(), staged=rest, garbage=garbage)


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
    checkpoint = stored._replace(blocks=blocks, holder=holder, writer=holder)
    index = schedule.index.adopt(checkpoint)
    if stored.key in schedule.pins:
        index = index.pin(stored.key)
    return dataclasses.replace(schedule, pool=pool, index=index), blocks


def forget_prefixes(schedule: Schedule) -> Schedule:
    """Drops every checkpoint that is not pinned, and the answers to read; the next plan frees their blocks."""
    index, garbage = schedule.index, []
    for node in list(index.nodes.values()):
        if not node.pinned:
            index = index.remove(node.key)
            garbage.append(node.holder)
    return dataclasses.replace(
        schedule, index=index, garbage=(*schedule.garbage, *garbage), answers=()
    )


def _discard(schedule: Schedule, holders: list[str]) -> Schedule:
    staged = {h: c for h, c in schedule.staged.items() if h not in holders}
    return dataclasses.replace(schedule, staged=staged, garbage=(*schedule.garbage, *holders))
