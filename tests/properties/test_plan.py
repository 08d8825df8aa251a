"""A good plan with one entry changed is refused, unless a naive simulation shows that the change does no harm."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from jaxstate import scheduler
from jaxstate.errors import CapacityError, PlanError
from jaxstate.plan import Holders, HostTables, PlanShape, StepPlan
from jaxstate.request import Request, SamplingParams
from jaxstate.rules import check_plan
from jaxstate.scheduler import Schedule
from jaxstate.state import BlockPool, CacheSpec, GroupSpec
from tests.properties.profile import examples

LEAF = jax.ShapeDtypeStruct((2,), jnp.float32)
SPEC = CacheSpec(
    groups=(
        GroupSpec("whole", "recurrent", 1, LEAF),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=32),
    ),
    rows=3, max_len=160,
)  # fmt: skip
SHAPE = PlanShape(SPEC, chunk_tokens=128, copies=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A good plan and all that it is checked against."""

    plan: StepPlan
    tables: HostTables
    pool: BlockPool
    holders: Holders


@functools.cache
def cases() -> list[Case]:
    """The plans of one busy run: fresh rows, long prompts in chunks, decode steps, ends, rows handed on, a seal."""
    schedule, out = Schedule.create(SHAPE), []
    for i, (length, budget) in enumerate([(5, 2), (140, 3), (40, 2), (33, 6), (1, 1), (70, 9)]):
        request = Request(f"r{i}", tuple(range(length)), SamplingParams(max_tokens=budget))
        schedule = scheduler.submit(schedule, request)
    for n in range(99):
        if n == 6:
            schedule = scheduler.end(schedule, "r3")
        step = scheduler.plan_next(schedule, decode_steps=2)
        if step is None:
            break
        after, planned = step
        out.append(Case(planned.plan, schedule.tables, after.pool, after.holders))
        schedule = after
        past = [
            r for r in schedule.running
            if r.request.id == "r1" and schedule.counts.read[r.row] > 32
        ]  # fmt: skip
        if past and "kept" not in schedule.pool.held:
            sealed = {"paged": schedule.pool.held["r1"]["paged"][:1]}
            pool = schedule.pool.seal("r1", sealed).share("kept", sealed)
            schedule = dataclasses.replace(schedule, pool=pool)
    assert schedule.idle and len(out) > 8 and "kept" in schedule.pool.held
    return out


# -- one change --------------------------------------------------------------------------------


def _slots(plan: StepPlan) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Every array of the plan that places something, and values worth trying in it."""
    slots: dict[str, tuple[np.ndarray, list[int]]] = {"clear": (plan.clear, [0, 1])}
    for group in SPEC.names:
        size, width = SPEC.blocks(group), SPEC.capacity(group)
        ids = [-1, 0, size, *range(1, size)]
        cells, (source, destination) = plan.cells[group], plan.copies[group]
        slots |= {
            f"{group} cell rows": (cells.rows, [-1, 0, 1, 2, 3]),
            f"{group} cell columns": (cells.columns, [-1, *range(width + 1)]),
            f"{group} cell ids": (cells.ids, ids),
            f"{group} zero": (plan.zero[group], ids),
            f"{group} copy sources": (source, ids),
            f"{group} copy destinations": (destination, ids),
            f"{group} freed": (plan.freed[group], [0, 1]),
        }
    if plan.prefill is not None:
        lengths = [-1, 0, 1, 33, 64, 128, 129, 161]
        slots |= {
            "offsets": (plan.prefill.offsets, lengths),
            "starts": (plan.prefill.starts, lengths),
            "tokens": (plan.prefill.tokens, [-1, 0]),
            "sample": (plan.prefill.sample, [0, 1]),
        }
    return slots


@st.composite
def changes(draw) -> tuple[int, str, int, int]:
    """A case, one of its plan's arrays, an index and a value."""
    at = draw(st.integers(0, len(cases()) - 1))
    name, (array, values) = draw(
        st.sampled_from(sorted(_slots(cases()[at].plan).items(), key=lambda x: x[0]))
    )
    return at, name, draw(st.integers(0, len(array) - 1)), draw(st.sampled_from(values))


def _changed(case: Case, changes: list[tuple[str, int, int]]) -> StepPlan:
    plan = copy.deepcopy(case.plan)
    for name, index, value in changes:
        _slots(plan)[name][0][index] = value
    return plan


# -- what it would do --------------------------------------------------------------------------


def harm(plan: StepPlan, case: Case) -> str | None:
    """What would go wrong if the plan were run, worked out cell by cell and block by block; None when nothing."""
    after = {}
    for group in SPEC.names:
        try:
            after[group] = _rows_after(plan, case, group)
        except IndexError:
            return f"{group}: a cell or block outside"
        found = _harm_to_rows(after[group], case, group) or _harm_to_blocks(
            plan, after[group], case, group
        )
        if found:
            return found
    return _harm_in_prompt(plan, after, case) if plan.prefill is not None else None


def _rows_after(plan: StepPlan, case: Case, group: str) -> list[list[int]]:
    rows = [
        [0] * SPEC.capacity(group) if plan.clear[r] else row.tolist()
        for r, row in enumerate(case.tables[group])
    ]
    cells = plan.cells[group]
    for row, column, block in zip(
        cells.rows.tolist(), cells.columns.tolist(), cells.ids.tolist(), strict=True
    ):
        if block and not (0 <= row < SPEC.rows and 0 <= column < SPEC.capacity(group)):
            raise IndexError
        if block:
            rows[row][column] = block
    return rows


def _harm_to_rows(rows: list[list[int]], case: Case, group: str) -> str | None:
    """A row has to name all that its request holds, from the first column on, and nothing else."""
    for row, ids in enumerate(rows):
        holder = case.holders[row]
        held = case.pool.held[holder][group] if holder is not None else ()
        named = ids[: len(held)]
        if sorted(named) != sorted(held) or any(ids[len(held) :]):
            return f"{group}: row {row} names {ids}, {holder} holds {held}"
    return None


def _harm_to_blocks(plan: StepPlan, rows: list[list[int]], case: Case, group: str) -> str | None:
    """After freeing, zeroing and copying, kept blocks hold what they held and fresh ones zeros or a copy."""
    old = {
        b
        for row, ids in enumerate(case.tables[group].tolist())
        if not plan.clear[row]
        for b in ids
        if b
    }
    sealed = set(np.flatnonzero(case.pool.sealed[group]).tolist())
    content = {b: b if b in old | sealed else "junk" for b in range(1, SPEC.blocks(group))}
    for block in np.flatnonzero(plan.freed[group]).tolist():
        content[block] = "junk"
    for block in plan.zero[group].tolist():
        if block and block not in content:
            return f"{group}: zeroes {block}"
        content[block] = 0
    content[0] = 0
    source, destination = (ids.tolist() for ids in plan.copies[group])
    if any(b not in content for b in source + destination):
        return f"{group}: copies {source} to {destination}"
    before = dict(content)
    for s, d in zip(source, destination, strict=True):
        content[d] = before[s]
    for block in {b for ids in rows for b in ids if b} | sealed:
        if block in old | sealed and content[block] != block:
            return f"{group}: block {block} loses what it held"
        if content[block] == "junk":
            return f"{group}: block {block} is handed out dirty"
    return None


def _harm_in_prompt(plan: StepPlan, rows: dict[str, list[list[int]]], case: Case) -> str | None:
    prefill = plan.prefill
    offsets = prefill.offsets.tolist()
    if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > SHAPE.chunk_tokens:
        return f"offsets {offsets}"
    if (prefill.tokens < 0).any():
        return "a negative token"
    for row in range(SPEC.rows):
        start, length = int(prefill.starts[row]), offsets[row + 1] - offsets[row]
        if length == 0:
            if prefill.sample[row]:
                return f"row {row} is sampled without tokens"
            continue
        if case.holders[row] is None or start < 0 or start + length > SPEC.max_len:
            return f"row {row} reads {length} tokens from {start}"
        for group in SPEC.groups:
            size = group.block_size or SPEC.max_len
            ids = rows[group.name][row]
            written = [ids[p // size] for p in range(start, start + length)]
            read = [ids[(start - 1) // size]] if start else []
            if 0 in written + read:
                return f"{group.name}: row {row} meets null"
            if any(case.pool.sealed[group.name][b] for b in written):
                return f"{group.name}: row {row} writes a sealed block"
    return None


# -- the tests ---------------------------------------------------------------------------------


def _refused(plan: StepPlan, case: Case) -> str | None:
    before = jax.tree.map(np.copy, case.tables)
    try:
        check_plan(plan, SHAPE, case.tables, case.pool, case.holders)
    except (PlanError, CapacityError) as error:
        return str(error)
    finally:
        jax.tree.map(np.testing.assert_array_equal, before, case.tables)
    return None


def test_the_plans_of_a_run_are_good():
    for case in cases():
        assert harm(case.plan, case) is None
        assert _refused(case.plan, case) is None


def _expect(case: Case, plan: StepPlan) -> None:
    refused, found = _refused(plan, case), harm(plan, case)
    event("refused" if refused else "harmless")
    assert refused or found is None, found


@examples(1500)
@given(changes())
def test_one_changed_entry_is_refused_or_does_no_harm(change):
    at, name, index, value = change
    _expect(cases()[at], _changed(cases()[at], [(name, index, value)]))


@examples(1000)
@given(changes(), st.data())
def test_two_changed_entries_are_refused_or_do_no_harm(change, data):
    """Two together can hide what each alone would show: swapped ids, a copy's two ends, a moved boundary."""
    at, *first = change
    slots = _slots(cases()[at].plan)
    name = data.draw(st.sampled_from([first[0], *sorted(slots)]))
    array, values = slots[name]
    second = (name, data.draw(st.integers(0, len(array) - 1)), data.draw(st.sampled_from(values)))
    _expect(cases()[at], _changed(cases()[at], [tuple(first), second]))
