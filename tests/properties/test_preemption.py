"""Blocks that run out: whoever is preempted comes to the tokens it has alone, and everyone ends.

The scheduler's plans run on a device made of plain dictionaries. A block holds a hash of the text that its state has
read, so a row that starts from a wrong block, or from one that somebody else has written to, shows at once; a token
follows from the hash of the text before it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from jaxstate import scheduler
from jaxstate.plan import PlanShape
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Planned, Schedule
from jaxstate.state import CacheSpec, GroupSpec
from tests.properties.profile import examples

LEAF = jax.ShapeDtypeStruct((1,), jnp.float32)
BLOCK, STEPS, MAX_LEN = 16, 4, 160

Text = tuple[int, int]
"""A text that was read: its length, and a hash of it."""

EMPTY: Text = (0, 0)


def shape_of(blocks: int, checkpoints: int, rows: int) -> PlanShape:
    groups = (
        GroupSpec("whole", "recurrent", 1, LEAF, blocks=rows + 1 + 2 * checkpoints),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=BLOCK, blocks=blocks + 1),
        # Twice as long blocks, of which there are always enough: groups grow at different times.
        GroupSpec("wide", "recurrent", 1, LEAF, block_size=2 * BLOCK),
    )
    spec = CacheSpec(groups, rows=rows, max_len=MAX_LEN)
    return PlanShape(spec, chunk_tokens=128, decode_steps=STEPS, checkpoints=checkpoints)


def read(text: Text, token: int) -> Text:
    return text[0] + 1, hash((text, token))


def token_after(text: Text) -> int:
    return text[1] % 251


def alone(request: Request) -> list[int]:
    text, made = EMPTY, []
    for token in request.prompt:
        text = read(text, token)
    for _ in range(request.sampling.max_tokens):
        made.append(token_after(text))
        text = read(text, made[-1])
    return made


@dataclasses.dataclass
class Row:
    text: Text = EMPTY  # read so far
    next: int | None = None  # drawn, and not read yet
    left: int = 0
    source: dict[str, int] = dataclasses.field(default_factory=dict)


class Device:
    """What a compiled step does, one token at a time, with texts for states."""

    def __init__(self, spec: CacheSpec):
        self.spec, self.rows = spec, [Row() for _ in range(spec.rows)]
        self.tables = {g: np.zeros((spec.rows, spec.capacity(g)), int) for g in spec.names}
        self.blocks: dict[str, dict[int, Text]] = {g: {} for g in spec.names}

    def run(self, planned: Planned, steps: int) -> dict[int, list[int]]:
        """The tokens that each row makes."""
        plan, made = planned.plan, {}
        for group, table in self.tables.items():
            table[plan.clear] = 0
            cells = plan.cells[group]
            real = cells.ids != 0
            table[cells.rows[real], cells.columns[real]] = cells.ids[real]
            self.blocks[group] |= dict.fromkeys(plan.zero[group].tolist(), EMPTY)
        for row in np.flatnonzero(plan.clear):
            self.rows[row] = Row()
        for row in np.flatnonzero(plan.admission.rows):
            start = {g: int(s[row]) for g, s in plan.admission.source.items() if s[row]}
            self.rows[row] = Row(left=int(plan.admission.budget[row]), source=start)
        if plan.prefill is None:
            for row, state in enumerate(self.rows):
                count = min(steps, state.left) if state.next is not None else 0
                made[row] = [self._one(row, plan.forced[row, i]) for i in range(count)]
            return made
        for row, state in enumerate(self.rows):
            prefill = plan.prefill
            tokens = prefill.tokens[prefill.offsets[row] : prefill.offsets[row + 1]].tolist()
            kept = dict(zip(prefill.checkpoint_positions[row].tolist(), range(99), strict=False))
            for n, token in enumerate(tokens, 1):
                self._read(row, int(token))
                if n in kept and prefill.checkpoints["whole"][row, kept[n]]:
                    for group, ids in prefill.checkpoints.items():
                        self.blocks[group][int(ids[row, kept[n]])] = state.text
            if prefill.sample[row]:
                made[row] = [self._draw(state, plan.forced[row, 0])]
        return made

    def _one(self, row: int, forced: int) -> int:
        state = self.rows[row]
        assert state.next is not None
        self._read(row, state.next)
        return self._draw(state, forced)

    def _read(self, row: int, token: int) -> None:
        state, before = self.rows[row], set()
        position = state.text[0]
        for group in self.spec.groups:
            table, blocks = self.tables[group.name][row], self.blocks[group.name]
            if state.source:
                before.add(blocks[state.source[group.name]])
                continue
            size = group.block_size or MAX_LEN
            before.add(blocks[int(table[(position - 1) // size])] if position else EMPTY)
        (text,) = before  # every group has read the same
        assert state.source or text == state.text
        state.text, state.source = read(text, token), {}
        for group in self.spec.groups:
            column = (state.text[0] - 1) // (group.block_size or MAX_LEN)
            block = int(self.tables[group.name][row, column])
            assert block, f"row {row} has no block of {group.name} for token {state.text[0]}"
            self.blocks[group.name][block] = state.text

    def _draw(self, state: Row, forced: int) -> int:
        token = token_after(state.text)
        assert forced in (-1, token)
        state.next, state.left = token, state.left - 1
        return token


def serve(
    shape: PlanShape, requests: list[Request], late: list[int], seed: int
) -> tuple[dict, Schedule, list[str]]:
    """Runs everything, observing a step behind; also what is preempted, by the scheduler or by hand."""
    rng, schedule, device = np.random.default_rng(seed), Schedule.create(shape), Device(shape.spec)
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    known = {r.id: r for r in requests}
    flying: list[tuple[Planned, dict[int, list[int]]]] = []
    lost: list[str] = []
    queue = list(zip(late, requests, strict=True))
    for step in range(4000):
        while queue and queue[0][0] <= step:
            schedule = scheduler.submit(schedule, queue.pop(0)[1])
        planned = scheduler.plan_next(schedule, decode_steps=shape.decode_steps)
        if planned is not None:
            before, (schedule, plan) = schedule, planned
            schedule.pool.check()
            flying.append((plan, device.run(plan, shape.decode_steps)))
            for name in plan.preempted:
                running = next(r for r in before.running if r.request.id == name)
                # Whoever is older than the one that loses its row keeps its own.
                assert all(
                    r.age < running.age or r.request.id in plan.preempted for r in schedule.running
                )
                schedule = scheduler.recall(schedule, name, tuple(tokens[name]))
            lost += plan.preempted
        if flying and (planned is None or len(flying) > 1):
            plan, made = flying.pop(0)
            schedule = scheduler.publish(schedule, plan.staged)
            for row, running in enumerate(plan.serves):
                if running is None:
                    continue
                mine, at = tokens[running.request.id], int(plan.at[row])
                new = made.get(row, [])[: known[running.request.id].sampling.max_tokens - at]
                assert len(mine) >= at
                mine += new[len(mine) - at :]
        elif planned is None and not queue:
            break
        if rng.random() < 0.05 and schedule.running:
            name = schedule.running[rng.integers(len(schedule.running))].request.id
            schedule = scheduler.preempt(schedule, name, tuple(tokens[name]))
    return tokens, schedule, lost


@st.composite
def loads(draw):
    count = draw(st.integers(2, 6))
    stem = tuple(range(draw(st.sampled_from([0, 64, 70]))))
    requests = []
    for i in range(count):
        prompt = (*stem, *(1000 + i for _ in range(draw(st.integers(1, 60)))))
        most = draw(st.integers(1, MAX_LEN - len(prompt)))
        requests.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=min(most, 80))))
    late = sorted(draw(st.integers(0, 30)) for _ in requests)
    blocks = draw(st.integers(MAX_LEN // BLOCK, 2 * MAX_LEN // BLOCK))
    return shape_of(blocks, draw(st.sampled_from([0, 2])), draw(st.integers(2, 4))), requests, late


@examples(100)
@given(loads(), st.integers(0, 3))
def test_br60_br62_everyone_ends_with_the_tokens_that_it_has_alone(load, seed):
    shape, requests, late = load
    tokens, schedule, lost = serve(shape, requests, late, seed)
    event(f"{min(len(lost), 3)} or more lost their row" if lost else "nobody lost its row")
    assert schedule.idle
    for request in requests:
        assert tokens[request.id] == alone(request), request
    kept = len(schedule.index)
    for group in shape.spec.names:
        assert schedule.pool.free_count(group) + kept == shape.spec.blocks(group) - 1


def test_the_youngest_pays_and_comes_back_once_all_it_needs_is_free():
    """10 blocks of 16: two prompts of 50 tokens take 8; at 80 tokens each they have all ten, and then no more."""
    shape = shape_of(10, 0, rows=2)
    both = [Request(n, tuple(range(50)), SamplingParams(max_tokens=50)) for n in ("old", "young")]
    tokens, schedule, lost = serve(shape, both, [0, 0], seed=99)
    assert lost == ["young"] and schedule.idle
    assert tokens["old"] == tokens["young"] == alone(both[0])


def test_a_request_that_no_pool_could_hold_is_refused_when_it_comes():
    """What comes in can end by itself: with everything let go and everybody else gone it has `max_len` tokens."""
    shape = shape_of(10, 0, rows=2)
    assert shape.spec.capacity("paged") == 10
    longest = Request("fits", tuple(range(MAX_LEN - 1)), SamplingParams(max_tokens=9))
    tokens, schedule, lost = serve(shape, [longest], [0], seed=99)
    assert tokens["fits"] == alone(longest)[:1] and schedule.idle and not lost
