"""What all ranks do next: a pure function from a `Schedule` per rank to one plan for all of them.

Every rank takes part in every step, and a step is of one kind. A rank that has nothing to do in it runs the null plan;
since prompt and decode steps take turns while any rank has work for them, none waits for the others more than a step.

A request goes to the rank that has the longest prefix of its prompt, and of those to the one with the least to do. One
that waits moves to a rank that has a row for it while its own has none, so that no choice made early costs much.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from jaxstate import scheduler
from jaxstate.plan import PlanShape, StepPlan
from jaxstate.prefix import PrefixIndex, block_keys
from jaxstate.request import Request
from jaxstate.schedule import Schedule
from jaxstate.scheduler import Planned, Running

OTHER = {"prefill": "decode", "decode": "prefill"}


@dataclasses.dataclass(frozen=True)
class RankStep:
    """A step of all ranks: its kind, each rank's plan, and what each had planned, if anything."""

    kind: str
    plans: tuple[StepPlan, ...]
    planned: tuple[Planned | None, ...]

    @property
    def plan(self) -> StepPlan:
        """The plans as one, rank after rank in every array."""
        return joined(self.plans)

    @property
    def serves(self) -> tuple[Running | None, ...]:
        """Whom the rows of the ranks that take part serve."""
        return tuple(r for p in self.planned if p is not None for r in p.serves)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A schedule per rank, as a value; whose turn it is, prompts' or decoding's, is the same on all."""

    schedules: tuple[Schedule, ...]

    @classmethod
    def create(cls, shape: PlanShape, ranks: int) -> Ranks:
        """Ranks with all rows and blocks free; each has the sizes in `shape`."""
        return cls(tuple(Schedule.create(shape) for _ in range(ranks)))

    @property
    def shape(self) -> PlanShape:
        return self.schedules[0].shape

    @property
    def idle(self) -> bool:
        return all(schedule.idle for schedule in self.schedules)

    @property
    def unsettled(self) -> bool:
        return any(schedule.unsettled for schedule in self.schedules)

    @property
    def waiting(self) -> int:
        return sum(len(schedule.waiting) for schedule in self.schedules)

    @property
    def turn(self) -> str:
        return self.schedules[0].turn

    @property
    def index(self) -> PrefixIndex:
        """What all ranks keep, each prefix once; blocks are numbered through from rank to rank."""
        first, *others = self.schedules
        index = first.index
        for rank, schedule in enumerate(others, 1):
            ahead = index.clock - schedule.index.clock
            for node in schedule.index.nodes.values():
                blocks = {g: rank * self.shape.spec.blocks(g) + b for g, b in node.blocks.items()}
                node = node._replace(blocks=blocks, priority=node.priority + ahead)
                if node.key not in index.nodes:
                    index = dataclasses.replace(index, nodes=index.nodes.put(node.key, node))
        return index

    def each(self, change: Callable[[Schedule], Schedule]) -> Ranks:
        """The ranks with every schedule changed so."""
        return Ranks(tuple(change(schedule) for schedule in self.schedules))

    def put(self, rank: int, schedule: Schedule) -> Ranks:
        """The ranks with one's schedule replaced."""
        schedules = self.schedules
        return Ranks((*schedules[:rank], schedule, *schedules[rank + 1 :]))

    def submit(self, requests: SequenceOf[Request]) -> Ranks:
        """The requests in the queues of the ranks that suit them best; CapacityError when one can never fit."""
        schedules = list(self.schedules)
        loads = [_pending(s) for s in schedules] if len(schedules) > 1 and requests else [0]
        for request in requests:
            rank = self._best(schedules, loads, request) if len(schedules) > 1 else 0
            schedules[rank] = scheduler.submit(schedules[rank], request)
            loads[rank] += _work(request)
        return Ranks(tuple(schedules))

    def _best(
        self, schedules: SequenceOf[Schedule], loads: SequenceOf[int], request: Request
    ) -> int:
        found = [0] * len(schedules)
        if self.shape.checkpoints:
            keys = block_keys(request.prompt, request.cache_salt)
            hits = [s.index.match(keys, len(request.prompt)).checkpoint for s in schedules]
            found = [0 if hit is None else hit.position for hit in hits]
        return min(range(len(schedules)), key=lambda rank: (-found[rank], loads[rank]))

    def plan_next(
        self, *, decode_steps: int, extra_stop_ids: SequenceOf[int] = (), spare: bool = False
    ) -> tuple[Ranks, RankStep] | None:
        """The next step of all ranks and the ranks after it; None when none of them has anything to do."""
        ranks = _levelled(self) if len(self.schedules) > 1 else self
        steps = [
            scheduler.plan_next(
                s, decode_steps=decode_steps, extra_stop_ids=extra_stop_ids, spare=spare
            )
            for s in ranks.schedules
        ]
        kind = _kind(steps, self.turn)
        if kind is None:
            return None
        schedules, planned = list(ranks.schedules), []
        for rank, step in enumerate(steps):
            if step is not None and step[1].kind == kind:
                schedules[rank] = step[0]
                planned.append(step[1])
            else:
                schedules[rank] = dataclasses.replace(schedules[rank], turn=OTHER[kind])
                planned.append(None)
        after = Ranks(tuple(schedules))
        null = self.shape.nulls[kind == "prefill"]
        plans = tuple([null if p is None else p.plan for p in planned])
        return after, RankStep(kind, plans, tuple(planned))

    def __repr__(self) -> str:
        return f"Ranks({', '.join(map(repr, self.schedules))})"


def joined(plans: SequenceOf[StepPlan]) -> StepPlan:
    """The plans of all ranks as one, rank after rank in every array."""
    if len(plans) == 1:
        return plans[0]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *plans)


def _kind(steps: Iterable[tuple[Schedule, Planned] | None], turn: str) -> str | None:
    """The kind of the next step: that whose turn it is, if any rank has work for it.

    A rank that only has rows to clear can do so in a step of either kind, and must not cost the others one.
    """
    planned = [step[1] for step in steps if step is not None]
    kinds = {p.kind for p in planned if any(r is not None for r in p.serves)}
    kinds = kinds or {p.kind for p in planned}
    return turn if turn in kinds else next(iter(kinds), None)


def _work(request: Request) -> int:
    return len(request.prompt) + request.sampling.max_tokens


def _pending(schedule: Schedule) -> int:
    """Tokens that the rank is yet to read or to make, at most."""
    now = schedule.counts
    left = np.where(now.leaving, 0, now.prompt - now.read + now.budget - now.made)
    running = int(left.sum())
    return running + sum(_work(w.request) for w in schedule.waiting)


def _levelled(ranks: Ranks) -> Ranks:
    """Waiting requests moved from ranks that have no row for them to ranks that have one, the last to come first."""
    schedules = list(ranks.schedules)
    if all(s.waiting for s in schedules) or not any(s.waiting for s in schedules):
        return ranks
    spare = [_vacant(s) - len(s.waiting) for s in schedules]
    while True:
        thief, victim = spare.index(max(spare)), spare.index(min(spare))
        queued = schedules[victim].waiting
        # What is read for later belongs where it is to be kept.
        moves = next((w for w in reversed(queued) if not w.reads), None)
        if not spare[thief] > 0 > spare[victim] or moves is None:
            return Ranks(tuple(schedules))
        stay = tuple(w for w in queued if w is not moves)
        schedules[victim] = dataclasses.replace(schedules[victim], waiting=stay)
        queue = (*schedules[thief].waiting, moves)
        schedules[thief] = dataclasses.replace(schedules[thief], waiting=queue)
        spare[victim], spare[thief] = spare[victim] + 1, spare[thief] - 1


def _vacant(schedule: Schedule) -> int:
    """Rows that the next plan can give away; none while the pool has no room for the first that waits."""
    gone = schedule.counts.leaving.tolist()
    for first in schedule.waiting[:1]:
        budget = scheduler.budget_of(first.request, schedule.spec)
        need = schedule.spec.need(len(first.request.prompt) + budget, first.id)
        kept = len(schedule.index) + len(schedule.garbage)
        held = [
            schedule.pool.held[r.request.id] for r in itertools.compress(schedule.rows, gone) if r
        ]
        freed = {g: sum(len(blocks[g]) for blocks in held) for g in need}
        if any(schedule.pool.free_count(g) + kept + freed[g] < n for g, n in need.items()):
            return 0
    return sum(gone) + schedule.rows.count(None)
