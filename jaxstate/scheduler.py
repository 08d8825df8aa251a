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
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxstate.admission import Admitted, admit
from jaxstate.draft import Draft, one_each
from jaxstate.page import Page
from jaxstate.plan import StepPlan
from jaxstate.prefix import holder_of
from jaxstate.readings import keep_answer, pin, unpin
from jaxstate.rules import Spans, check_plan
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
    if leaving or draft.starting or schedule.garbage:
        _release(draft, leaving)
    decoding = draft.counts.decoding
    can_decode = np.count_nonzero(decoding) > 0
    # Whom a decode step would not serve is not looked for.
    decodes = can_decode and schedule.turn == "decode"
    admitted = [] if decodes else admit(draft, draft.waiting, decode_steps)
    can_read = not decodes and any(draft.running(r).reads != "answer" for r in draft.reading)
    if schedule.unsettled and (can_read or (spare and not can_decode)):
        if not draft.waiting:
            admitted += admit(draft, draft.answers[::-1], decode_steps, admitted)
        can_read = can_read or bool(draft.reading)
    if not can_read and not can_decode and not leaving and not schedule.garbage:
        return None
    shape, at = schedule.shape, draft.counts.made
    kind, page = "prefill" if can_read else "decode", Page(shape, extra_stop_ids)
    page.clear += leaving
    if can_read:
        serves, spans = _plan_prefill(draft, admitted, page), None
    else:
        if shape.grows:
            _grow(draft, page, decode_steps)
            decoding = draft.counts.decoding
        serves, spans = _plan_decode(draft, page, decode_steps, decoding)
    pool, page.freed = draft.pool()
    plan, holders = page.plan(prefill=can_read), draft.holders()
    tables = check_plan(plan, shape, schedule.tables, pool, holders, spans)
    after = draft.schedule(pool, tables, holders, turn="decode" if can_read else "prefill")
    staged, preempted = tuple(draft.staged), tuple(draft.preempted)
    planned = construct(
        Planned, kind=kind, plan=plan, serves=serves, at=at, staged=staged, preempted=preempted
    )
    return after, planned


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
        rows = np.array(leaving)
        for count in draft.own_counts():
            count[rows] = 0


def _plan_prefill(draft: Draft, admitted: Admitted, page: Page) -> tuple[Running | None, ...]:
    """Packs prompt tokens; whom each row that reads some serves."""
    counts, serves = draft.counts, list[Running | None]([None] * len(draft.rows))
    read, made = counts.read.copy(), counts.made.copy()
    for running, n in draft.chunks():
        row, start = running.row, int(counts.read[running.row])
        page.spans.append((running, start, start + n))
        serves[row], read[row] = running, start + n
        if start + n == len(running.tokens):
            made[row] += 1
            if running.known:
                page.forced[row] = running.known[:1]
    for running, blocks in admitted:
        page.admitted.append(running)
        page.place(running, blocks)
        # Who starts in this step has read its checkpoint before anything is written by a later one.
        if running.source is not None and serves[running.row] is None:
            draft.hold(running)
    _leave_checkpoints(draft, page)
    draft.counts = counts._replace(read=read, made=made)
    return tuple(serves)


def _leave_checkpoints(draft: Draft, page: Page) -> None:
    """Finds blocks for the checkpoints that rows pass in this step; those that find none are skipped."""
    passed, most = [], draft.shape.checkpoints
    for running, start, end_ in page.spans:
        inside = [position for position in running.wants if start < position <= end_]
        passed += [(running, slot, p, p - start) for slot, p in enumerate(inside[:most])]
        draft.skipped += len(inside[most:])
    room = draft.room_for(len(passed))
    draft.skipped += len(passed) - room
    for running, slot, position, place in passed[:room]:
        holder = f"{holder_of(running.keys[position // CHUNK - 1])} {running.order}"
        ids = draft.ledger.allocate(holder, draft.shape.one)
        blocks = {group: block[0] for group, block in ids.items()}
        draft.stage(running, position, blocks, holder)
        page.leave(running.row, slot, place, blocks)


def _grow(draft: Draft, page: Page, steps: int) -> None:
    """Gives rows blocks for their next decode steps, the oldest first; if there are none, the youngest request pays."""
    lacks, grown = draft.lacking(steps), []
    rows = {row for lacking in lacks.values() for row in (lacking > 0).nonzero()[0].tolist()}
    for running in sorted((draft.running(row) for row in rows), key=lambda r: r.age):
        need = {g: max(0, int(lacking[running.row])) for g, lacking in lacks.items()}
        while draft.rows[running.row] is running and not draft.make_room(need):
            page.clear.append(draft.preempt())
        if draft.rows[running.row] is running:
            has = draft.ledger.held[running.request.id]
            grown.append((running, draft.ledger.allocate(running.request.id, need), has))
    for running, blocks, has in grown:
        if draft.rows[running.row] is running:
            page.place(running, blocks, has)


def _plan_decode(
    draft: Draft, page: Page, steps: int, rows: np.ndarray
) -> tuple[tuple[Running | None, ...], Spans]:
    """Generates in these rows, which have read their prompts; whom they serve, and from where to where each reads."""
    counts = draft.counts
    if np.count_nonzero(counts.known):
        for row in (rows & (counts.made < counts.known)).nonzero()[0].tolist():
            made = int(counts.made[row])
            page.forced[row] = draft.running(row).known[made : made + steps]
    served, serves = rows.nonzero()[0], draft.rows
    if len(served) < len(rows):
        serves = list(serves)
        for row in (~rows).nonzero()[0].tolist():
            serves[row] = None
    before = counts.made[served]
    after = np.minimum(before + steps, counts.budget[served])
    made = counts.made.copy()
    made[served] = after
    draft.counts = counts._replace(made=made)
    # The last token made is not read yet.
    at = counts.prompt[served] - 1
    return tuple(serves), (served, at + before, at + after)
