"""What the next step does: a pure function from a `Schedule` to a checked plan and the schedule after it.

A request waits until a row and all the blocks it can ever need are free, so one that was admitted always finishes. It
starts from the deepest checkpoint of its prompt, reads the rest in chunks, cut only at multiples of the scan chunk (a
cut there changes no bit of the state), and decodes until it ends. Prompt and decode steps take turns while there is
work for both. On the way through a prompt, states are left where others will want to start; that takes blocks nobody
needs, or the least valuable checkpoint's, and never delays a request.

The host plans ahead of the device: a row that must have reached its length by the end of the last planned step is
cleared and handed on by the next plan, without waiting to see the tokens. Steps run in order, so this is safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxstate.plan import StepPlan, null_plan
from jaxstate.prefix import Checkpoint, Key, Match, PrefixIndex, holder_of, wanted
from jaxstate.rules import check_plan
from jaxstate.sampling import request_hash
from jaxstate.schedule import (
    Running,
    Schedule,
    Waiting,
    budget_of,
    distrust,
    end,
    forget_prefixes,
    preempt,
    publish,
    submit,
)
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import CacheSpec
from pallas_kernels.rows import CHUNK

__all__ = [
    "Planned", "Running", "Schedule", "Waiting", "budget_of", "distrust", "end", "forget_prefixes", "plan_next",
    "preempt", "publish", "submit",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Planned:
    """A checked plan, which request each row serves in it (None for null rows), and the checkpoints that it writes."""

    kind: str  # "prefill" or "decode"
    plan: StepPlan
    serves: tuple[Running | None, ...]
    staged: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Admitted:
    """A waiting request that gets a row, and pool and index once it has its blocks."""

    waiting: Waiting
    running: Running
    ids: dict[str, np.ndarray]
    pool: BlockPool
    index: PrefixIndex
    evicted: int


def plan_next(
    schedule: Schedule, *, decode_steps: int, extra_stop_ids: SequenceOf[int] = ()
) -> tuple[Schedule, Planned] | None:
    """The next step and the schedule after it; None when there is nothing to do.

    `extra_stop_ids` are the model's end tokens, which end every request that does not ignore them.
    """
    leaving = [r for r in schedule.rows if r is not None and r.leaving]
    stays = _release(schedule, leaving)
    can_decode = any(r is not None and r.decoding for r in stays.rows)
    # Whom a decode step would not serve is not looked for.
    decodes = can_decode and schedule.turn == "decode"
    admits = [] if decodes else _admit(stays)
    can_read = bool(admits) or (
        not decodes and any(r is not None and r.reading for r in stays.rows)
    )
    if not can_read and not can_decode and not leaving and not schedule.garbage:
        return None
    kind = "prefill" if can_read else "decode"
    plan = null_plan(schedule.shape, prefill=kind == "prefill")
    for running in leaving:
        plan.clear[running.row] = True
    if kind == "prefill":
        after, serves = _plan_prefill(stays, admits, plan, tuple(extra_stop_ids))
    else:
        after, serves = _plan_decode(stays, plan, decode_steps)
    for group, freed in plan.freed.items():
        # Not what has a new tenant already, nor what is sealed and has other holders.
        freed[:] = (schedule.pool.refs[group] > 0) & (after.pool.refs[group] == 0)
    tables = check_plan(plan, schedule.shape, schedule.tables, after.pool, after.holders)
    after = dataclasses.replace(
        after, tables=tables, turn="decode" if kind == "prefill" else "prefill"
    )
    staged = tuple(h for h in after.staged if h not in schedule.staged)
    return after, Planned(kind, plan, serves, staged)


def _release(schedule: Schedule, leaving: SequenceOf[Running]) -> Schedule:
    """Frees the blocks of rows that leave and of dropped checkpoints, and the holds on those that rows started from."""
    pool, rows = schedule.pool, list(schedule.rows)
    if leaving:
        pool = pool.release_all(running.request.id for running in leaving)
    for running in leaving:
        rows[running.row] = None
    for running in rows:
        if running is None or running.source is None:
            continue
        if running.read > running.cached:
            pool, _ = pool.free(running.request.id, _lists(running.source))
            rows[running.row] = dataclasses.replace(running, source=None)
    if schedule.garbage:
        pool = pool.release_all(schedule.garbage)
    if pool is schedule.pool and not leaving:
        return schedule
    return dataclasses.replace(schedule, pool=pool, rows=tuple(rows), garbage=())


def _admit(schedule: Schedule) -> list[_Admitted]:
    """Waiting requests that get a row, in order; the first that does not fit ends the list.

    One whose prompt's state is being computed by another waits for that and lets those behind it pass.
    """
    shape, spec, pool, index = schedule.shape, schedule.spec, schedule.pool, schedule.index
    free_rows = [row for row, r in enumerate(schedule.rows) if r is None]
    if not free_rows or not schedule.waiting:
        return []
    room = {g: shape.width(g) for g in spec.names}
    coming = {pair for r in schedule.running if not r.ended for pair in _coming(r)}
    coming |= {(c.position, c.key) for c in schedule.staged.values()}
    kept, admits = _sources(schedule), []
    for waiting in schedule.waiting:
        if len(admits) == len(free_rows):
            break
        request, match = waiting.request, _match(schedule, index, waiting)
        start = match.checkpoint.position if match.checkpoint is not None else 0
        if any(start < p < len(request.prompt) and _at(waiting.keys, p) == k for p, k in coming):
            continue
        budget = budget_of(request, spec)
        need = spec.need(len(request.prompt) + budget, request.id)
        keep = kept if match.checkpoint is None else kept | {match.checkpoint.key}
        made = _make_room(pool, index, need, keep)
        if made is None or any(room[g] < n for g, n in need.items()):
            break
        (pool, index, evicted), source, kept = made, None, keep
        pool, ids = pool.allocate(request.id, need)
        if match.checkpoint is not None:
            source = match.checkpoint.blocks
            pool, index = pool.share(request.id, _lists(source)), index.use(match.checkpoint.key)
        index = index.see(waiting.keys)
        room = {g: room[g] - n for g, n in need.items()}
        running = Running(
            request, free_rows[len(admits)], budget, schedule.admitted + len(admits) + 1, read=start,
            keys=waiting.keys, source=source, cached=start, miss=match.miss, known=waiting.made,
            wants=wanted(match, len(request.prompt)) if shape.checkpoints else (),
        )  # fmt: skip
        coming |= set(_coming(running))
        admits.append(_Admitted(waiting, running, ids, pool, index, evicted))
    return admits


def _sources(schedule: Schedule) -> frozenset[Key]:
    """Checkpoints that rows are yet to start from; letting them go would free nothing."""
    held = (r for r in schedule.rows if r is not None and r.source is not None)
    return frozenset(r.keys[r.cached // CHUNK - 1] for r in held)


def _match(schedule: Schedule, index: PrefixIndex, waiting: Waiting) -> Match:
    if not schedule.shape.checkpoints:
        return Match(None, 0, "off")
    return index.match(waiting.keys, len(waiting.request.prompt))


def _coming(running: Running) -> list[tuple[int, Key]]:
    return [(p, running.keys[p // CHUNK - 1]) for p in running.wants]


def _at(keys: tuple[Key, ...], position: int) -> Key | None:
    return keys[position // CHUNK - 1] if position // CHUNK <= len(keys) else None


def _make_room(
    pool: BlockPool, index: PrefixIndex, need: Mapping[str, int], keep: frozenset[Key]
) -> tuple[BlockPool, PrefixIndex, int] | None:
    """Pool and index after letting go as many checkpoints as it takes; None if all of them do not suffice."""
    evicted = 0
    while not pool.fits(need):
        step = index.evict(keep)
        if step is None:
            return None
        index, node = step
        pool, _ = pool.release(node.holder)
        evicted += 1
    return pool, index, evicted


def _plan_prefill(
    schedule: Schedule, admits: SequenceOf[_Admitted], plan: StepPlan, extra: tuple[int, ...]
) -> tuple[Schedule, tuple[Running | None, ...]]:
    shape, rows = schedule.shape, list(schedule.rows)
    used = dict.fromkeys(schedule.spec.names, 0)
    left = shape.chunk_tokens - sum(n for _, n in _chunks(rows, shape.chunk_tokens))
    entered: list[Waiting] = []
    for admitted in admits:
        if left <= 0:
            break
        running = admitted.running
        rows[running.row] = running
        left -= len(running.request.prompt) - running.read
        _write_row(plan, schedule.spec, running, admitted.ids, used)
        _write_admission(plan, running, extra)
        entered.append(admitted.waiting)
        schedule = dataclasses.replace(
            schedule, pool=admitted.pool, index=admitted.index, admitted=running.order,
            evicted=schedule.evicted + admitted.evicted,
        )  # fmt: skip
    prefill, serves, chunks = plan.prefill, _nobody(len(rows)), _chunks(rows, shape.chunk_tokens)
    assert prefill is not None
    lengths = np.zeros(len(rows), np.int64)
    for running, n in chunks:
        lengths[running.row] = n
    np.cumsum(lengths, out=prefill.offsets[1:])
    for running, n in chunks:
        row, at, end_ = running.row, int(prefill.offsets[running.row]), running.read + n
        schedule, running = _leave_checkpoints(schedule, plan, running, end_, used)
        prefill.starts[row] = running.read
        prefill.tokens[at : at + n] = running.request.prompt[running.read : end_]
        ends = end_ == len(running.request.prompt)
        prefill.sample[row] = ends
        if ends and running.known:
            plan.forced[row, 0] = running.known[0]
        rows[row] = serves[row] = dataclasses.replace(running, read=end_, made=int(ends), at=0)
    waiting = tuple(w for w in schedule.waiting if w not in entered)
    return dataclasses.replace(schedule, rows=tuple(rows), waiting=waiting), tuple(serves)


def _leave_checkpoints(
    schedule: Schedule, plan: StepPlan, running: Running, end_: int, used: dict[str, int]
) -> tuple[Schedule, Running]:
    """Finds blocks for the checkpoints that the row passes in this step; one that finds none is skipped."""
    prefill = plan.prefill
    assert prefill is not None
    start, slot = running.read, 0
    positions = [p for p in running.wants if start < p <= end_]
    if not positions:
        return schedule, running
    keep = _sources(schedule)
    for position in positions:
        one, key = dict.fromkeys(schedule.spec.names, 1), running.keys[position // CHUNK - 1]
        holder = f"{holder_of(key)} {running.order}"
        made = _make_room(schedule.pool, schedule.index, one, keep)
        if made is None or slot == schedule.shape.checkpoints:
            schedule = dataclasses.replace(schedule, skipped=schedule.skipped + 1)
            continue
        pool, index, evicted = made
        pool, ids = pool.allocate(holder, one)
        blocks = {group: int(block[0]) for group, block in ids.items()}
        before = max([p for p in (running.cached, *_positions(schedule, running)) if p < position])
        checkpoint = Checkpoint(
            key, position, blocks, holder, running.request.id, position - before,
            chain=running.keys[: position // CHUNK], salt=running.request.cache_salt,
        )  # fmt: skip
        schedule = dataclasses.replace(
            schedule, pool=pool, index=index, evicted=schedule.evicted + evicted,
            staged={**schedule.staged, holder: checkpoint},
        )  # fmt: skip
        for group, block in blocks.items():
            prefill.checkpoints[group][running.row, slot] = block
            plan.zero[group][used[group]] = block
            used[group] += 1
        prefill.checkpoint_positions[running.row, slot] = position - start
        slot += 1
    wants = tuple(p for p in running.wants if p > end_)
    return schedule, dataclasses.replace(running, wants=wants)


def _positions(schedule: Schedule, running: Running) -> list[int]:
    """Where this request has left checkpoints."""
    staged = [c.position for c in schedule.staged.values() if c.writer == running.request.id]
    kept = [n * CHUNK for n, key in enumerate(running.keys, 1) if key in schedule.index.nodes]
    return [*staged, *kept]


def _chunks(rows: SequenceOf[Running | None], room: int) -> list[tuple[Running, int]]:
    """How many prompt tokens each sequence reads now, oldest first; cut only where a cut changes no bits."""
    chunks = []
    reading = [r for r in rows if r is not None and r.reading]
    for running in sorted(reading, key=lambda r: r.order):
        n = len(running.request.prompt) - running.read
        if n > room:
            n = room // CHUNK * CHUNK
        if n > 0:
            chunks.append((running, n))
            room -= n
    return chunks


def _plan_decode(
    schedule: Schedule, plan: StepPlan, steps: int
) -> tuple[Schedule, tuple[Running | None, ...]]:
    rows, serves = list(schedule.rows), _nobody(schedule.spec.rows)
    for row, running in enumerate(rows):
        if running is not None and running.decoding:
            if running.known:
                known = running.known[running.made : running.made + steps]
                plan.forced[row, : len(known)] = known
            rows[row] = serves[row] = running.decoded(steps)
    return dataclasses.replace(schedule, rows=tuple(rows)), tuple(serves)


def _nobody(rows: int) -> list[Running | None]:
    return [None] * rows


def _lists(blocks: Mapping[str, int]) -> dict[str, list[int]]:
    return {group: [block] for group, block in blocks.items()}


def _write_row(
    plan: StepPlan,
    spec: CacheSpec,
    running: Running,
    held: Mapping[str, SequenceOf[int] | np.ndarray],
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
    admission.position[row] = running.cached
    for group, block in (running.source or {}).items():
        admission.source[group][row] = block
    sampling = admission.sampling
    sampling.temperature[row], sampling.top_k[row] = asked.temperature, asked.top_k
    sampling.top_p[row], sampling.min_p[row] = asked.top_p, asked.min_p
    sampling.seed[row], sampling.request[row] = asked.seed, request_hash(running.request.id)
