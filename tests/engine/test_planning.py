"""What a plan costs, counted in function calls: a number that no busy machine changes."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.plan import PlanShape
from jaxstate.prefix import Checkpoint, PrefixIndex
from jaxstate.scheduler import Schedule, plan_next, publish, submit
from jaxstate.state import CacheSpec, GroupSpec
from tests.engine.conftest import prompt_of, request

LEAF = jax.ShapeDtypeStruct((1,), jnp.float32)


def calls(function) -> int:
    """Calls of functions, in Python and in C, that this one makes."""
    count = 0

    def look(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def busy(rows: int, kept: int = 0) -> Schedule:
    """Every row decodes and is far from its end; the index keeps so many states, and no block is free."""
    group = GroupSpec("whole", "recurrent", 1, LEAF, blocks=rows + kept + 1)
    spec = CacheSpec((group,), rows=rows, max_len=1024)
    schedule = Schedule.create(PlanShape(spec, 64 * rows, decode_steps=4, checkpoints=2))
    ledger, index = schedule.pool.open(), schedule.index
    for i in range(kept):
        holder = f"\x00checkpoint {i}"
        ids = ledger.allocate(holder, {"whole": 1})
        ledger.seal(holder, ids)
        key, blocks = i.to_bytes(16), {"whole": ids["whole"][0]}
        index = index.insert(Checkpoint(key, 64, blocks, holder, "before", 64 + i * 37 % 1000))
    schedule = dataclasses.replace(schedule, pool=ledger.close(), index=index)
    for i in range(rows):
        schedule = submit(schedule, request(f"r{i}", prompt_of(8, i), max_tokens=900))
    while not (decoding := schedule.counts.decoding).all():
        schedule, planned = plan_next(schedule, decode_steps=4)
        schedule = publish(schedule, planned.staged)
    assert len(decoding) == rows and schedule.pool.free_count("whole") == 0
    return schedule


def test_a_decode_plan_takes_as_many_calls_for_256_rows_as_for_8():
    few, many = busy(8), busy(256)
    assert calls(lambda: plan_next(many, decode_steps=4)) == calls(
        lambda: plan_next(few, decode_steps=4)
    )
    _, planned = plan_next(many, decode_steps=4)
    assert planned.kind == "decode" and None not in planned.serves


def test_a_decode_plan_makes_no_new_request_objects():
    before = busy(8)
    after, planned = plan_next(before, decode_steps=4)
    assert all(a is b for a, b in zip(after.rows, before.rows, strict=True))
    assert (after.counts.made == before.counts.made + 4).all()
    assert (
        planned.at.tolist() == before.counts.made.tolist()
        and after.counts.read is before.counts.read
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_one_more_request_costs_the_same_among_8_rows_and_256_and_100_states_and_4000(steps):
    """It takes a row that ends, and the blocks of states that are let go for it and for what it leaves."""

    def cost(rows: int, kept: int) -> int:
        schedule = busy(rows, kept)
        budget = schedule.counts.made.copy()
        budget[1:] += 1000
        schedule = dataclasses.replace(
            schedule, counts=schedule.counts._replace(budget=budget), turn="prefill"
        )
        for i in range(steps):
            schedule = submit(schedule, request(f"new {i}", prompt_of(200, i), max_tokens=9))
        after, planned = plan_next(schedule, decode_steps=4)
        assert planned.plan.admission.rows.sum() == 1 and after.evicted - schedule.evicted == 1
        return calls(lambda: plan_next(schedule, decode_steps=4))

    small, large = cost(8, 100), cost(256, 4000)
    # But for what is merged now and then: the changes of a mapping, once there are many.
    assert abs(large - small) < 10, (small, large)


def test_letting_go_takes_as_many_calls_for_100_states_as_for_4096():
    rng = np.random.default_rng(0)

    def kept(count: int) -> PrefixIndex:
        index = PrefixIndex()
        for i in range(count):
            cost = int(rng.integers(64, 2048))
            index = index.insert(Checkpoint(i.to_bytes(16), 64, {}, f"{i}", "w", cost))
        return index

    def most(count: int) -> int:
        """Calls for the dearest of all but a few."""
        index, most = kept(count), 0
        while len(index) > 16:
            most = max(most, calls(lambda index=index: index.evict()))
            index, _ = index.evict()
        return most

    # A state's place in the order is known; what may differ is whether it is among those that came last.
    assert abs(most(4096) - most(100)) < 6
