"""Who gets a row in the next step, with which blocks, and what it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from jaxstate.draft import Draft
from jaxstate.prefix import Key, Match, wanted
from jaxstate.schedule import Running, Waiting, budget_of
from jaxstate.state.ledger import Blocks
from jaxstate.values import construct
from pallas_kernels.rows import CHUNK

Admitted = list[tuple[Running, Blocks]]
"""Requests that a step gives a row, and their blocks."""


def admit(
    draft: Draft, queue: SequenceOf[Waiting], steps: int, before: SequenceOf[tuple[Running, Blocks]] = ()
) -> Admitted:  # fmt: skip
    """Gives those in the queue rows and blocks, in order, while the step has tokens for them; the first that does not
    fit ends it. `before` are those to whom this step has given some.

    One whose prompt's state is being computed by another waits for that and lets those behind it pass. What is read for
    its state alone is not, once the state is there. What rows are about to grow by is left to them, and one that was
    preempted waits for all that it can ever need.
    """
    if not queue:
        return []
    shape, spec = draft.shape, draft.spec
    draft.index = draft.index.open()
    left = shape.chunk_tokens - sum([n for _, n in draft.chunks()])
    free_rows = draft.free_rows()
    room = {g: width for g, (width, *_) in shape.sizes.items()}
    for _, ids in before:
        _take(room, {g: len(blocks) for g, blocks in ids.items()})
    growth = {g: int(lacks.clip(min=0).sum()) for g, lacks in draft.lacking(steps).items()}
    coming = {key for row in draft.reading for key in _coming(draft, row)}
    coming |= draft.coming
    admitted: Admitted = []
    passed: list[Waiting] = []
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
        need = shape.need(length + first, request.id)
        if not _fits(room, need):
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
        _take(room, need)
        coming.update(_leaves(running))
    if queue is draft.waiting:
        draft.waiting = tuple(passed)
    else:
        draft.answers = tuple(passed[::-1])
    return admitted


def _fits(room: Mapping[str, int], need: Mapping[str, int]) -> bool:
    for group, n in need.items():
        if room[group] < n:
            return False
    return True


def _take(room: dict[str, int], need: Mapping[str, int]) -> None:
    for group, n in need.items():
        room[group] -= n


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
