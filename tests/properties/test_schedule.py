"""Any order of requests, plans, early ends, seals and shares: what has to hold after each of them.

The plans are applied to the host's tables, to tables on the device and to a small poisoned cache, as the compiled step
does before its forward pass; in place of the forward pass, the blocks of the rows that a step serves are marked.
"""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxstate import scheduler
from jaxstate.plan import PlanShape
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Planned, Running, Schedule
from jaxstate.state import CacheSpec, GroupSpec
from jaxstate.state.cache import poison_value
from jaxstate.step import EngineState, prepare
from pallas_kernels.rows import CHUNK
from tests.properties.profile import examples
from tests.properties.test_pool import fingerprint

LEAVES = (
    jax.ShapeDtypeStruct((2,), jnp.float32),
    {"count": jax.ShapeDtypeStruct((), jnp.int32), "last": jax.ShapeDtypeStruct((1,), jnp.bfloat16)},
)  # fmt: skip
SPEC = CacheSpec(
    groups=(
        GroupSpec("whole", "recurrent", 2, LEAVES),
        # Too few for all rows at their longest, so that requests wait for blocks as well as for rows.
        GroupSpec("paged", "recurrent", 1, LEAVES, block_size=32, blocks=10),
    ),
    rows=3, max_len=160,
)  # fmt: skip
SHAPE = PlanShape(SPEC, chunk_tokens=64)
STEPS = 2
MARK = 1

lengths = st.one_of(st.integers(1, 8), st.integers(33, 75), st.integers(1, 150))

_prepare = jax.jit(functools.partial(prepare, poison=True))


@jax.jit
def _mark(state: EngineState, touched: dict[str, jax.Array]) -> EngineState:
    """Stands for a forward pass: every element of the touched blocks becomes MARK."""

    def mark(leaf, mask):
        return jnp.where(mask.reshape((1, -1) + (1,) * (leaf.ndim - 2)), MARK, leaf)

    groups = {
        g: jax.tree.map(functools.partial(mark, mask=touched[g]), leaves)
        for g, leaves in state.cache.groups.items()
    }
    return state.replace(cache=state.cache.replace(groups=groups))


def _is_poison(x: np.ndarray) -> bool:
    value = poison_value(x.dtype)
    x = x.astype(np.float64)
    return bool(np.isnan(x).all() if np.isnan(float(value)) else (x == float(value)).all())


def _mark_of(schedule: Schedule) -> tuple:
    tables = [(g, t.tobytes()) for g, t in sorted(schedule.tables.items())]
    return (
        fingerprint(schedule.pool), tables, schedule.rows, [x.tobytes() for x in schedule.counts], schedule.waiting,
        schedule.admitted, schedule.turn,
    )  # fmt: skip


class ScheduleMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.schedule = Schedule.create(SHAPE)
        self.state = EngineState.create(SPEC, poison=True)
        self.cache = jax.tree.map(np.array, self.state.cache.groups)
        self.submitted: list[Request] = []
        self.ended: set[str] = set()  # early, by us
        self.admitted: list[str] = []
        self.read: dict[str, list[int]] = {}
        self.served: dict[str, int] = {}  # tokens generated, at most
        self.kept: dict[str, dict[str, tuple[int, ...]]] = {}  # holder of sealed blocks
        self.unclean: set[int] = set()  # freed beside the plans, so not poisoned
        self.old: list[tuple[Schedule, tuple]] = []
        self.sound = True

    # -- what may happen ---------------------------------------------------------------------------

    @rule(wanted=st.lists(st.tuples(lengths, st.integers(1, 33)), min_size=1, max_size=3))
    def submit(self, wanted):
        self._remember()
        for length, budget in wanted:
            name = f"r{len(self.submitted)}"
            prompt = tuple((7 * len(self.submitted) + 3 * i) % 50 for i in range(length))
            request = Request(name, prompt, SamplingParams(max_tokens=budget))
            self.schedule = scheduler.submit(self.schedule, request)
            self.submitted.append(request)

    @rule(at=st.integers(0, 30))
    def end(self, at):
        """A stop, an abort or an error; of an unknown or ended request it is nothing."""
        self._remember()
        if self.submitted:
            name = self.submitted[at % len(self.submitted)].id
            self.schedule = scheduler.end(self.schedule, name)
            self.ended.add(name)
        before = _mark_of(self.schedule)
        self.schedule = scheduler.end(self.schedule, "nobody")
        assert _mark_of(self.schedule) == before

    @rule()
    def plan(self):
        self._remember()
        before = self.schedule
        step = scheduler.plan_next(before, decode_steps=STEPS)
        if step is None:
            # What is kept may leave too few blocks for who is next; nothing else stops a plan.
            assert before.idle or (self.kept and not before.running)
            return
        self.schedule, planned = step
        self.sound = False  # unless what follows finds nothing
        self._follow(before, planned)
        self._run(planned)
        self.sound = True

    @precondition(lambda self: self._passed())
    @rule(at=st.integers(0, 2))
    def seal_and_share(self, at):
        """Keeps the first block of a request that is past it, as a prefix index would."""
        passed = self._passed()
        owner = passed[at % len(passed)]
        pool, name = self.schedule.pool, f"kept-{owner}"
        block = {"paged": pool.held[owner]["paged"][:1]}
        self._remember()
        self.schedule = self._with_pool(pool.seal(owner, block).share(name, block))
        self.kept[name] = block

    @precondition(lambda self: self.kept)
    @rule(at=st.integers(0, 9))
    def evict(self, at):
        self._remember()
        name = sorted(self.kept)[at % len(self.kept)]
        pool, gone = self.schedule.pool.free(name, self.kept.pop(name))
        self.schedule = self._with_pool(pool)
        self.unclean |= set(gone["paged"].tolist())

    def teardown(self):
        """Whoever was not ended early finishes, within as many plans as its tokens can take."""
        if not self.sound:
            return
        for name in sorted(self.kept):
            pool, gone = self.schedule.pool.free(name, self.kept[name])
            self.schedule = self._with_pool(pool)
            self.unclean |= set(gone["paged"].tolist())
        # A prompt takes three chunks at most, and its tokens seventeen more steps; then there is the clearing. Who is
        # preempted starts again, once the others are done.
        for _ in range(60 * len(self.submitted) + 2):
            if self.schedule.idle:
                break
            self.plan()
            self.the_account_adds_up()
        assert self.schedule.idle
        for request in self.submitted:
            if request.id not in self.ended:
                assert self.read[request.id] == list(request.prompt)
                budget = min(request.sampling.max_tokens, SPEC.max_len - len(request.prompt))
                assert self.served[request.id] >= budget
        for group in SPEC.names:
            assert self.schedule.pool.free_count(group) == SPEC.blocks(group) - 1

    # -- what has to hold --------------------------------------------------------------------------

    @invariant()
    def the_account_adds_up(self):
        pool = self.schedule.pool
        pool.check()
        for group in SPEC.names:
            refs, sealed = pool.refs[group], pool.sealed[group]
            live = ((refs > 0) & ~sealed).sum()
            assert pool.free_count(group) + live + sealed.sum() + 1 == SPEC.blocks(group)

    @invariant()
    def tables_are_the_same_on_host_and_device_and_name_what_is_held(self):
        for group in SPEC.names:
            table = np.asarray(self.state.tables.ids[group])
            assert table.tobytes() == self.schedule.tables[group].tobytes()
            for row, running in enumerate(self.schedule.rows):
                held = () if running is None else self.schedule.pool.held[running.request.id][group]
                want = list(held) + [0] * (table.shape[1] - len(held))
                assert table[row].tolist() == want

    @invariant()
    def requests_are_admitted_in_the_order_in_which_they_came(self):
        waited_for = [
            r.id for r in self.submitted if r.id not in self.ended or r.id in self.admitted
        ]
        assert self.admitted == waited_for[: len(self.admitted)]
        waiting = [r.id for r in self.schedule.waiting if not r.age]
        assert waiting == [n for n in waited_for[len(self.admitted) :] if n not in self.ended]
        # Those that were preempted come first, the oldest at the head.
        ages = [r.age for r in self.schedule.waiting]
        lost = len(ages) - len(waiting)
        assert all(ages[:lost]) and ages[:lost] == sorted(ages[:lost])

    @invariant()
    def old_values_are_as_they_were(self):
        for schedule, mark in self.old:
            assert _mark_of(schedule) == mark

    # -- helpers -----------------------------------------------------------------------------------

    def _remember(self):
        self.old = [*self.old[-5:], (self.schedule, copy.deepcopy(_mark_of(self.schedule)))]

    def _passed(self) -> list[str]:
        return [
            r.request.id
            for r in self.schedule.running
            if self.schedule.counts.read[r.row] > 32
            and not self.schedule.counts.ended[r.row]
            and f"kept-{r.request.id}" not in self.kept
        ]

    def _with_pool(self, pool) -> Schedule:
        return dataclasses.replace(self.schedule, pool=pool)

    def _follow(self, before: Schedule, planned: Planned) -> None:
        """Reads the plan as a naive observer: who got in, which tokens are read, how many are made."""
        leaving = [
            r for r in before.running
            if before.counts.leaving[r.row] or r.request.id in planned.preempted
        ]  # fmt: skip
        was = {r.request.id for r in before.running} - {r.request.id for r in leaving}
        assert np.flatnonzero(planned.plan.clear).tolist() == sorted(r.row for r in leaving)
        news = [r for r in self.schedule.running if r.request.id not in was]
        assert sorted(r.row for r in news) == np.flatnonzero(planned.plan.admission.rows).tolist()
        for running in sorted(news, key=lambda r: r.order):
            name = running.request.id
            if name not in self.admitted:
                self.admitted.append(name)
            self.read[name], self.served[name] = [], 0
            assert planned.plan.admission.budget[running.row] == running.budget
        for group in SPEC.names:
            given = []
            for r in self.schedule.running:
                had = before.pool.held.get(r.request.id, {}) if r not in news else {}
                held = self.schedule.pool.held[r.request.id][group]
                had = had.get(group, ())
                assert held[: len(had)] == had and (
                    r in news or planned.kind == "decode" or held == had
                )
                given += held[len(had) :]
            zeroed = planned.plan.zero[group]
            assert sorted(zeroed[zeroed != 0].tolist()) == sorted(given) == sorted(set(given))
        prefill = planned.plan.prefill
        for row, running in enumerate(planned.serves):
            if running is None:
                if prefill is not None:
                    assert (
                        prefill.offsets[row] == prefill.offsets[row + 1] and not prefill.sample[row]
                    )
                continue
            assert self.schedule.rows[row] is running
            self._follow_row(row, running, prefill)

    def _follow_row(self, row: int, running: Running, prefill) -> None:
        name = running.request.id
        assert name not in self.ended
        if prefill is None:
            self.served[name] += STEPS
            return
        tokens = prefill.tokens[prefill.offsets[row] : prefill.offsets[row + 1]].tolist()
        assert tokens and prefill.starts[row] == len(self.read[name])
        self.read[name] += tokens
        whole = len(self.read[name]) == len(running.request.prompt)
        assert whole or len(self.read[name]) % CHUNK == 0
        assert bool(prefill.sample[row]) == whole
        self.served[name] += int(whole)

    def _run(self, planned: Planned) -> None:
        """The device's part, and what it may have done to the blocks."""
        state = _prepare(self.state, planned.plan.replace(prefill=None))
        old, self.cache = self.cache, jax.tree.map(np.array, state.cache.groups)
        for group in SPEC.names:
            pool, zeroed = self.schedule.pool, planned.plan.zero[group]
            free = pool.refs[group] == 0
            self.unclean -= set(zeroed.tolist()) if group == "paged" else set()
            for leaf, former in zip(
                jax.tree.leaves(self.cache[group]), jax.tree.leaves(old[group]), strict=True
            ):
                assert (leaf[:, zeroed[zeroed != 0]] == 0).all()
                for block in np.flatnonzero(free).tolist():
                    if not (group == "paged" and block in self.unclean):
                        assert _is_poison(leaf[:, block]), (group, block)
                for block in sorted(set(np.flatnonzero(~free).tolist()) - set(zeroed.tolist())):
                    assert leaf[:, block].tobytes() == former[:, block].tobytes(), (group, block)
        touched = {}
        for group in SPEC.names:
            mask = np.zeros(SPEC.blocks(group), bool)
            for running in planned.serves:
                if running is not None:
                    mask[list(self.schedule.pool.held[running.request.id][group])] = True
            touched[group] = mask & ~self.schedule.pool.sealed[group]
        self.state = _mark(state, touched)
        self.cache = jax.tree.map(np.array, self.state.cache.groups)


ScheduleMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestSchedule = ScheduleMachine.TestCase
