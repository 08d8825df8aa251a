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

from jaxstate.draft import Draft, one_each
from jaxstate.plan import PlanShape, StepPlan, null_plan
from jaxstate.prefix import Key, Match, holder_of, wanted
from jaxstate.readings import keep_answer, pin, unpin
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
    recall,
    submit,
)
from jaxstate.state.ledger import Blocks
from jaxstate.values import construct
from pallas_kernels.rows import CHUNK

__all__ = [
    "Planned", "Running", "Schedule", "Waiting", "budget_of", "distrust", "end", "forget_prefixes", "keep_answer",
    "pin", "plan_next", "preempt", "publish", "recall", "submit", "unpin",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Planned:
    """A checked plan, which request each row serves in it (None for null rows), and the checkpoints that it writes.

    `at` is how many tokens each row's request had generated before it.
    """

    kind: str  # "prefill" or "decode"
    plan: StepPlan
    serves: tuple[Running | None, ...]
    at: np.ndarray
    staged: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()  # requests that lost their row for want of blocks


def plan_next(
    schedule: Schedule,
    *,
    decode_steps: int,
    extra_stop_ids: SequenceOf[int] = (),
    spare: bool = False,
) -> tuple[Schedule, Planned] | None:
    """The next step and the schedule after it; None when there is nothing to do.

    `extra_stop_ids` are the model's end tokens, which end every request that does not ignore them. Answers are read in
    prompt steps that others leave room in and, if `spare`, in steps of their own when there is nothing else to do.
    Their rows and blocks are given up as soon as anybody waits.
    """
    draft = Draft(schedule)
    if schedule.waiting:
        draft.drop_spare()
    leaving = draft.counts.leaving.nonzero()[0].tolist()
    _release(draft, leaving)
    can_decode = np.count_nonzero(draft.counts.decoding) > 0
    # Whom a decode step would not serve is not looked for.
    decodes = can_decode and schedule.turn == "decode"
    admitted = [] if decodes else _admit(draft, draft.waiting, decode_steps)
    can_read = not decodes and bool((draft.counts.reading & ~draft.counts.spare).any())
    if schedule.unsettled and (can_read or (spare and not can_decode)):
        admitted += (
            [] if draft.waiting else _admit(draft, draft.answers[::-1], decode_steps, admitted)
        )
        can_read = can_read or np.count_nonzero(draft.counts.reading) > 0
    if not can_read and not can_decode and not leaving and not schedule.garbage:
        return None
    kind = "prefill" if can_read else "decode"
    shape, prefill = schedule.shape, kind == "prefill"
    plan = null_plan(shape, prefill=prefill, shared=_unused(shape, kind))
    at = draft.counts.made
    if leaving:
        plan.clear[leaving] = True
    if prefill:
        served, spans = _plan_prefill(draft, admitted, plan, tuple(extra_stop_ids)), None
    else:
        _grow(draft, plan, decode_steps)
        served, spans = _plan_decode(draft, plan, decode_steps)
    pool = draft.ledger.close()
    for group, returned in draft.ledger.returned.items():
        # Not what has a new tenant already, nor what is sealed and has other holders.
        if returned:
            plan.freed[group][returned] = True
    tables = check_plan(plan, shape, schedule.tables, pool, draft.holders, spans)
    after = draft.schedule(pool, tables, turn="decode" if prefill else "prefill")
    serves = list(draft.rows)
    for row in (~served).nonzero()[0].tolist():
        serves[row] = None
    staged, preempted = tuple(draft.staged), tuple(draft.preempted)
    return after, Planned(kind, plan, tuple(serves), at, staged, preempted)


def _unused(shape: PlanShape, kind: str) -> tuple[str, ...]:
    """What a plan of that kind has no use for: nothing is copied here, and who decodes has its row."""
    if kind == "prefill":
        return ("copies",)
    return ("copies", "admission") if shape.grows else ("copies", "admission", "cells", "zero")


def _release(draft: Draft, leaving: list[int]) -> None:
    """Frees the blocks of rows that leave and of dropped checkpoints, and the holds on those that rows started from."""
    ledger, counts = draft.ledger, draft.counts
    for row in leaving:
        running = draft.running(row)
        if running.reads and not counts.ended[row]:
            draft.keep_last(running)
        ledger.release(running.request.id)
        draft.vacate(row)
    starting = []
    for row in draft.starting:
        running = draft.rows[row]
        if running is not None and counts.read[row] > running.cached:
            assert running.source is not None
            ledger.free(running.request.id, one_each(running.source.blocks))
        elif running is not None and running.source is not None:
            draft.keep.add(running.source.key)
            starting.append(row)
    for holder in draft.before.garbage:
        ledger.release(holder)
    draft.starting = tuple(starting)
    if leaving:
        draft.counts, rows = counts.copied(), np.array(leaving)
        for count in draft.counts:
            count[rows] = 0


def _admit(
    draft: Draft,
    queue: SequenceOf[Waiting],
    steps: int,
    before: SequenceOf[tuple[Running, Blocks]] = (),
) -> list[tuple[Running, Blocks]]:
    """Gives those in the queue rows and blocks, in order, while the step has tokens for them; the first that does not
    fit ends it. `before` are those to whom this step has given some.

    One whose prompt's state is being computed by another waits for that and lets those behind it pass. What is read for
    its state alone is not, once the state is there. What rows are about to grow by is left to them, and one that was
    preempted waits for all that it can ever need.
    """
    if not queue:
        return []
    shape, spec, counts = draft.shape, draft.spec, draft.counts
    draft.index = draft.index.open()
    left = shape.chunk_tokens - sum(n for _, n in _chunks(draft))
    free_rows = (counts.prompt == 0).nonzero()[0].tolist()
    sizes = shape.sizes.items()
    room = {g: width - sum([len(ids[g]) for _, ids in before]) for g, (width, *_) in sizes}
    growth = {g: int(lacks.clip(min=0).sum()) for g, lacks in draft.lacking(steps).items()}
    coming = {key for row in counts.reading.nonzero()[0].tolist() for key in _coming(draft, row)}
    coming |= draft.coming
    admitted, passed = [], []
    least = 1 if queue is draft.waiting else CHUNK
    for place, waiting in enumerate(queue):
        if left < least or len(admitted) == len(free_rows):
            passed += queue[place:]
            break
        if waiting.reads and waiting.keys[-1] in draft.index.nodes:
            continue
        request, match = waiting.request, _match(draft, waiting)
        source, length = match.checkpoint, len(request.prompt)
        start = source.position if source is not None else 0
        # Where it could start from instead: after a whole chunk, with a token left to read.
        if not coming.isdisjoint(waiting.keys[start // CHUNK : (length - 1) // CHUNK]):
            passed.append(waiting)
            continue
        budget = budget_of(request, spec)
        first = budget if waiting.age else min(budget, 1 + steps)
        need = spec.need(length + first, request.id)
        if any(room[g] < n for g, n in need.items()):
            passed += queue[place:]
            break
        take = {g: n + growth.get(g, 0) for g, n in need.items()} if growth else need
        if source is not None:
            draft.keep.add(source.key)
        fits = draft.make_room(take)
        if source is not None and not fits and not any(draft.rows):
            # Nobody has a block to give back: what it would start from has to go for it.
            draft.keep.discard(source.key)
            source, start = None, 0
            match, fits = Match(None, match.shared, "not_kept"), draft.make_room(take)
        if not fits:
            passed += queue[place:]
            break
        running = construct(
            Running, request=request, tokens=waiting.tokens, keys=waiting.keys, row=free_rows[len(admitted)],
            budget=budget, order=draft.admitted + 1, age=waiting.age or draft.admitted + 1,
            wants=wanted(match, length) if shape.checkpoints and not waiting.reads else (),
            source=source, miss=match.miss, known=waiting.made, reads=waiting.reads,
        )  # fmt: skip
        admitted.append((running, _enter(draft, running, need)))
        left -= length - start
        room = {g: room[g] - n for g, n in need.items()}
        coming.update(_leaves(running))
    if queue is draft.waiting:
        draft.waiting = tuple(passed)
    else:
        draft.answers = tuple(passed[::-1])
    if admitted:
        draft.counts = counts = counts.copied()
        for r, _ in admitted:
            counts.prompt[r.row], counts.budget[r.row] = len(r.tokens), r.budget
            counts.known[r.row], counts.read[r.row] = len(r.known), r.cached
            counts.spare[r.row] = r.reads == "answer"
    return admitted


def _enter(draft: Draft, running: Running, need: Mapping[str, int]) -> Blocks:
    """Gives the request its row and blocks; the blocks."""
    ids = draft.ledger.allocate(running.request.id, need)
    if running.source is not None:
        draft.index = draft.index.use(running.source.key)
    draft.index = draft.index.see(running.keys)
    draft.seat(running)
    return ids


def _match(draft: Draft, waiting: Waiting) -> Match:
    if not draft.shape.checkpoints:
        return Match(None, 0, "off")
    return draft.index.match(waiting.keys, len(waiting.request.prompt))


def _coming(draft: Draft, row: int) -> SequenceOf[Key]:
    """The names of the checkpoints that the row's prompt is yet to leave."""
    running, read = draft.running(row), draft.counts.read[row]
    return _leaves(running, int(read))


def _leaves(running: Running, read: int = 0) -> SequenceOf[Key]:
    """The names of the checkpoints that the prompt leaves after so many tokens, for which others wait."""
    if running.reads == "pin":
        return running.keys[-1:]
    return [running.keys[p // CHUNK - 1] for p in running.wants if p > read]


def _chunks(draft: Draft) -> list[tuple[int, int]]:
    """How many prompt tokens each row reads now, oldest first, answers last; cut only where a cut changes no bits."""
    chunks, room, counts = [], draft.shape.chunk_tokens, draft.counts
    reading = counts.reading.nonzero()[0].tolist()
    for row in sorted(reading, key=lambda row: (counts.spare[row], draft.running(row).order)):
        n = int(counts.prompt[row] - counts.read[row])
        if n > room:
            n = room // CHUNK * CHUNK
        if n > 0:
            chunks.append((row, n))
            room -= n
    return chunks


def _plan_prefill(
    draft: Draft, admitted: SequenceOf[tuple[Running, Blocks]], plan: StepPlan, extra: tuple[int, ...]
) -> np.ndarray:  # fmt: skip
    """Packs prompt tokens; the rows that read some."""
    prefill, counts = plan.prefill, draft.counts
    assert prefill is not None
    used = _write_rows(plan, draft, [(running, ids, {}) for running, ids in admitted])
    chunks = _chunks(draft)
    lengths = np.zeros(len(draft.rows), np.int64)
    for row, n in chunks:
        lengths[row] = n
    np.cumsum(lengths, out=prefill.offsets[1:])
    for running, _ in admitted:
        _write_admission(plan, running, extra)
        # Who starts in this step has read its checkpoint before anything is written by a later one.
        if running.source is not None and not lengths[running.row]:
            draft.hold(running)
    for row, n in chunks:
        running, at, start = draft.running(row), int(prefill.offsets[row]), int(counts.read[row])
        prefill.starts[row], prefill.sample[row] = start, start + n == len(running.tokens)
        _leave_checkpoints(draft, plan, running, start + n, used)
        prefill.tokens[at : at + n] = running.tokens[start : start + n]
        if running.known and prefill.sample[row]:
            plan.forced[row, 0] = running.known[0]
    draft.counts = counts._replace(read=counts.read + lengths, made=counts.made + prefill.sample)
    return lengths > 0


def _leave_checkpoints(
    draft: Draft, plan: StepPlan, running: Running, end_: int, used: dict[str, int]
) -> None:
    """Finds blocks for the checkpoints that the row passes in this step; one that finds none is skipped."""
    prefill, row, slot = plan.prefill, running.row, 0
    assert prefill is not None
    start = int(draft.counts.read[row])
    positions = [p for p in running.wants if start < p <= end_]
    if not positions:
        return
    one = dict.fromkeys(draft.spec.names, 1)
    for position in positions:
        if slot == draft.shape.checkpoints or not draft.make_room(one):
            draft.skipped += 1
            continue
        holder = f"{holder_of(running.keys[position // CHUNK - 1])} {running.order}"
        ids = draft.ledger.allocate(holder, one)
        blocks = {group: block[0] for group, block in ids.items()}
        draft.stage(running, position, blocks, holder)
        for group, block in blocks.items():
            prefill.checkpoints[group][row, slot] = block
            plan.zero[group][used[group]] = block
            used[group] += 1
        prefill.checkpoint_positions[row, slot] = position - start
        slot += 1


def _grow(draft: Draft, plan: StepPlan, steps: int) -> None:
    """Gives rows blocks for their next decode steps, the oldest first; if there are none, the youngest request pays."""
    lacks, grown = draft.lacking(steps), []
    rows = {row for lacking in lacks.values() for row in (lacking > 0).nonzero()[0].tolist()}
    for running in sorted((draft.running(row) for row in rows), key=lambda r: r.age):
        need = {g: max(0, int(lacking[running.row])) for g, lacking in lacks.items()}
        while draft.rows[running.row] is running and not draft.make_room(need):
            plan.clear[draft.preempt()] = True
        if draft.rows[running.row] is running:
            has = draft.ledger.held[running.request.id]
            grown.append((running, draft.ledger.allocate(running.request.id, need), has))
    _write_rows(plan, draft, [g for g in grown if draft.rows[g[0].row] is g[0]])


def _plan_decode(
    draft: Draft, plan: StepPlan, steps: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Generates in every row that has read its prompt; those rows, and from where to where each reads."""
    counts, rows = draft.counts, draft.counts.decoding
    for row in (rows & (counts.made < counts.known)).nonzero()[0].tolist():
        made = int(counts.made[row])
        known = draft.running(row).known[made : made + steps]
        plan.forced[row, : len(known)] = known
    made = np.where(rows, np.minimum(counts.made + steps, counts.budget), counts.made)
    draft.counts = counts._replace(made=made)
    # The last token made is not read yet.
    at, served = counts.prompt - 1, rows.nonzero()[0]
    return rows, (served, (at + counts.made)[served], (at + made)[served])


def _write_rows(
    plan: StepPlan, draft: Draft,
    rows: SequenceOf[tuple[Running, Blocks, Mapping[str, SequenceOf[int]]]],
) -> dict[str, int]:  # fmt: skip
    """Writes fresh blocks to rows, behind those that they have, and has them zeroed; how many they are by group."""
    used = dict.fromkeys(draft.spec.names, 0)
    for group in used if rows else ():
        cells, width, where, columns, ids = plan.cells[group], draft.width(group), [], [], []
        for running, new, has in rows:
            first, blocks = len(has.get(group, ())), new.get(group, ())
            if first + len(blocks) > width:
                draft.spec.check_row(group, first + len(blocks), running.request.id)
            where += [running.row] * len(blocks)
            columns += range(first, first + len(blocks))
            ids += blocks
        n = used[group] = len(ids)
        cells.rows[:n], cells.columns[:n] = where, columns
        cells.ids[:n] = plan.zero[group][:n] = ids
    return used


def _write_admission(plan: StepPlan, running: Running, extra: tuple[int, ...]) -> None:
    row, asked, admission = running.row, running.request.sampling, plan.admission
    stops = (*asked.stop_ids, *(() if asked.ignore_eos else extra))
    admission.rows[row], admission.budget[row] = True, running.budget
    if stops:
        admission.stop_ids[row, : len(stops)] = stops
    if running.source is not None:
        admission.position[row] = running.cached
        for group, block in running.source.blocks.items():
            admission.source[group][row] = block
    sampling = admission.sampling
    sampling.temperature[row], sampling.top_k[row] = asked.temperature, asked.top_k
    sampling.top_p[row], sampling.min_p[row] = asked.top_p, asked.min_p
    sampling.seed[row], sampling.request[row] = asked.seed, request_hash(running.request.id)
