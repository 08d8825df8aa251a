"""Which rows and blocks go to whom, and what the next step does: pure functions of an immutable `Schedule`.

A request waits until a row and all the blocks it can ever need are free, so one that was admitted always finishes. It
then reads its prompt in chunks, cut only at multiples of the scan chunk (a cut there changes no bit of the state), and
decodes until it ends. Prompt and decode steps take turns while there is work for both.

The host plans ahead of the device: a row that must have reached its length by the end of the last planned step is
cleared and handed on by the next plan, without waiting to see the tokens. Steps run in order, so this is safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxstate.plan import (
    HostTables,
    PlanShape,
    StepPlan,
    check_plan,
    null_plan,
)
from jaxstate.request import Request
from jaxstate.sampling import request_hash
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import CacheSpec
from pallas_kernels.rows import CHUNK


@dataclasses.dataclass(frozen=True)
class Running:
    """A request that has a row: how much of it has been planned so far."""

    request: Request
    row: int
    budget: int  # tokens it may generate
    order: int  # of admission
    read: int = 0  # prompt tokens planned
    made: int = 0  # generated tokens planned, if it does not stop early
    ended: bool = False

    @property
    def reading(self) -> bool:
        return not self.ended and self.read < len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        return not self.ended and self.read == len(self.request.prompt) and self.made < self.budget

    @property
    def leaving(self) -> bool:
        """Whether nothing more is to be planned for it but the clearing of its row."""
        return self.ended or self.made >= self.budget


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Who waits, who runs in which row, which blocks are whose, and what the tables hold once all planned steps ran."""

    shape: PlanShape
    pool: BlockPool
    tables: HostTables
    rows: tuple[Running | None, ...]
    waiting: tuple[Request, ...] = ()
    admitted: int = 0
    turn: str = "prefill"

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
        """Whether no plan is needed: nobody waits and every row is null."""
        return not self.waiting and not self.running

    @property
    def holders(self) -> list[str | None]:
        return [r.request.id if r is not None else None for r in self.rows]

    def __repr__(self) -> str:
        rows = f"{len(self.running)} of {self.spec.rows} rows running"
        return f"Schedule({rows}, {len(self.waiting)} waiting, {self.pool})"


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
    return dataclasses.replace(schedule, waiting=(*schedule.waiting, request))


def end(schedule: Schedule, request_id: str) -> Schedule:
    """Ends the request wherever it is; the next plan clears its row. Unknown or ended requests change nothing."""
    waiting = tuple(r for r in schedule.waiting if r.id != request_id)
    rows = tuple(
        dataclasses.replace(r, ended=True) if r is not None and r.request.id == request_id else r
        for r in schedule.rows
    )
    return dataclasses.replace(schedule, waiting=waiting, rows=rows)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A checked plan, and which request each row serves in it (None for null rows)."""

    kind: str  # "prefill" or "decode"
    plan: StepPlan
    serves: tuple[Running | None, ...]


def plan_next(
    schedule: Schedule, *, decode_steps: int, extra_stop_ids: SequenceOf[int] = ()
) -> tuple[Schedule, Planned] | None:
    """The next step and the schedule after it; None when there is nothing to do.

    `extra_stop_ids` are the model's end tokens, which end every request that does not ignore them.
    """
    leaving = [r for r in schedule.running if r.leaving]
    stays = _release(schedule, leaving)
    admits = _admit(stays)
    can_read = bool(admits) or any(r.reading for r in stays.running)
    can_decode = any(r.decoding for r in stays.running)
    if not can_read and not can_decode and not leaving:
        return None
    kind = "prefill" if can_read and not (can_decode and schedule.turn == "decode") else "decode"
    plan = null_plan(schedule.shape, prefill=kind == "prefill")
    for running in leaving:
        plan.clear[running.row] = True
    if kind == "prefill":
        after, serves = _plan_prefill(stays, admits, plan, tuple(extra_stop_ids))
    else:
        after, serves = _plan_decode(stays, decode_steps)
    for group, freed in plan.freed.items():
        # Not what has a new tenant already, nor what is sealed and has other holders.
        freed[:] = (schedule.pool.refs[group] > 0) & (after.pool.refs[group] == 0)
    tables = check_plan(plan, schedule.shape, schedule.tables, after.pool, after.holders)
    after = dataclasses.replace(
        after, tables=tables, turn="decode" if kind == "prefill" else "prefill"
    )
    return after, Planned(kind, plan, serves)


def _release(schedule: Schedule, leaving: SequenceOf[Running]) -> Schedule:
    pool, rows = schedule.pool, list(schedule.rows)
    for running in leaving:
        pool, _ = pool.release(running.request.id)
        rows[running.row] = None
    return dataclasses.replace(schedule, pool=pool, rows=tuple(rows))


def _admit(schedule: Schedule) -> list[tuple[int, Request, BlockPool]]:
    """Waiting requests in order, with their rows and the pool after each; the first misfit ends the list."""
    spec, pool, admits = schedule.spec, schedule.pool, []
    room = {g: schedule.shape.width(g) for g in spec.names}
    free_rows = [row for row, r in enumerate(schedule.rows) if r is None]
    for row, request in zip(free_rows, schedule.waiting, strict=False):
        need = spec.need(len(request.prompt) + budget_of(request, spec), request.id)
        if not pool.fits(need) or any(room[g] < n for g, n in need.items()):
            break
        pool, _ = pool.allocate(request.id, need)
        room = {g: room[g] - n for g, n in need.items()}
        admits.append((row, request, pool))
    return admits


def _plan_prefill(
    schedule: Schedule,
    admits: SequenceOf[tuple[int, Request, BlockPool]],
    plan: StepPlan,
    extra: tuple[int, ...],
) -> tuple[Schedule, tuple[Running | None, ...]]:
    spec, rows = schedule.spec, list(schedule.rows)
    used = dict.fromkeys(spec.names, 0)
    pool, admitted = schedule.pool, 0
    left = schedule.shape.chunk_tokens - sum(
        n
        for _, n in _chunks(
            [r for r in rows if r is not None and r.reading], schedule.shape.chunk_tokens
        )
    )
    for row, request, pool_after in admits:
        if left <= 0:
            break
        pool, admitted = pool_after, admitted + 1
        running = Running(request, row, budget_of(request, spec), schedule.admitted + admitted)
        rows[row] = running
        left -= len(request.prompt)
        _write_row(plan, spec, running, pool.held[request.id], used)
        _write_admission(plan, running, extra)
    chunks = _chunks([r for r in rows if r is not None and r.reading], schedule.shape.chunk_tokens)
    lengths = np.zeros(spec.rows, np.int64)
    for running, n in chunks:
        lengths[running.row] = n
    prefill, serves = plan.prefill, _nobody(spec.rows)
    assert prefill is not None
    np.cumsum(lengths, out=prefill.offsets[1:])
    for running, n in chunks:
        row, at = running.row, int(prefill.offsets[running.row])
        prefill.starts[row] = running.read
        prefill.tokens[at : at + n] = running.request.prompt[running.read : running.read + n]
        ends = running.read + n == len(running.request.prompt)
        prefill.sample[row] = ends
        rows[row] = serves[row] = dataclasses.replace(
            running, read=running.read + n, made=int(ends)
        )
    after = dataclasses.replace(
        schedule,
        pool=pool,
        rows=tuple(rows),
        waiting=schedule.waiting[admitted:],
        admitted=schedule.admitted + admitted,
    )
    return after, tuple(serves)


def _chunks(reading: SequenceOf[Running], room: int) -> list[tuple[Running, int]]:
    """How many prompt tokens each sequence reads now, oldest first; cut only where a cut changes no bits."""
    chunks = []
    for running in sorted(reading, key=lambda r: r.order):
        n = len(running.request.prompt) - running.read
        if n > room:
            n = room // CHUNK * CHUNK
        if n > 0:
            chunks.append((running, n))
            room -= n
    return chunks


def _plan_decode(schedule: Schedule, steps: int) -> tuple[Schedule, tuple[Running | None, ...]]:
    rows, serves = list(schedule.rows), _nobody(schedule.spec.rows)
    for row, running in enumerate(rows):
        if running is not None and running.decoding:
            rows[row] = serves[row] = dataclasses.replace(
                running, made=min(running.made + steps, running.budget)
            )
    return dataclasses.replace(schedule, rows=tuple(rows)), tuple(serves)


def _nobody(rows: int) -> list[Running | None]:
    return [None] * rows


def _write_row(
    plan: StepPlan,
    spec: CacheSpec,
    running: Running,
    held: dict[str, tuple[int, ...]],
    used: dict[str, int],
) -> None:
    for group in spec.names:
        ids = held.get(group, ())
        spec.check_row(group, len(ids), running.request.id)
        at, cells = slice(used[group], used[group] + len(ids)), plan.cells[group]
        cells.rows[at], cells.columns[at], cells.ids[at] = running.row, range(len(ids)), ids
        plan.zero[group][at] = ids
        used[group] += len(ids)


def _write_admission(plan: StepPlan, running: Running, extra: tuple[int, ...]) -> None:
    row, asked, admission = running.row, running.request.sampling, plan.admission
    stops = (*asked.stop_ids, *(() if asked.ignore_eos else extra))
    admission.rows[row], admission.budget[row] = True, running.budget
    admission.stop_ids[row, : len(stops)] = stops
    sampling = admission.sampling
    sampling.temperature[row], sampling.top_k[row] = asked.temperature, asked.top_k
    sampling.top_p[row], sampling.min_p[row] = asked.top_p, asked.min_p
    sampling.seed[row], sampling.request[row] = asked.seed, request_hash(running.request.id)
