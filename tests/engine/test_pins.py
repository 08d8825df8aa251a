"""Pins leave room for a request of `max_len`, in every group: what may be pinned never stops the queue."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import CapacityError
from jaxstate.plan import PlanShape
from jaxstate.scheduler import Schedule, pin, plan_next, publish, submit
from jaxstate.state import CacheSpec, GroupSpec
from tests.engine.conftest import request

LEAF = jax.ShapeDtypeStruct((1,), jnp.float32)


def schedule_of(whole: int, paged: int) -> Schedule:
    """Two rows of up to 512 tokens: a block each, and up to sixteen."""
    groups = (
        GroupSpec("whole", "recurrent", 1, LEAF, blocks=whole),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=32, blocks=paged),
    )
    spec = CacheSpec(groups, rows=2, max_len=512)
    return Schedule.create(PlanShape(spec, chunk_tokens=128, decode_steps=4, checkpoints=2))


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 99, length).tolist())


def run(schedule: Schedule) -> tuple[Schedule, list[str]]:
    """Until nothing is left to plan; who was admitted, in order."""
    admitted = []
    for _ in range(2_000):
        step = plan_next(schedule, decode_steps=4)
        if step is None:
            assert schedule.idle
            return schedule, admitted
        rows = step[1].plan.admission.rows.nonzero()[0].tolist()
        admitted += [step[0].rows[row].request.id for row in rows]
        schedule = publish(step[0], step[1].staged)
        schedule.pool.check()
    raise AssertionError(f"it does not end: {schedule}")


@pytest.mark.parametrize(
    ("whole", "paged", "group", "most"),
    # One block of each group is null; a request takes one, or sixteen, and may start from another.
    [(60, 24, "paged", 24 - 1 - 16 - 1), (9, 60, "whole", 9 - 1 - 1 - 1), (60, 19, "paged", 1)],
)
@pytest.mark.parametrize("length", [64, 448])
def test_what_can_be_pinned_leaves_room_for_the_longest_request(whole, paged, group, most, length):
    schedule, pinned = schedule_of(whole, paged), 0
    for seed in range(whole + paged):
        try:
            schedule = pin(schedule, text(length, seed), "")
        except CapacityError as error:
            assert f"group {group!r}" in str(error) and "unpin a prefix" in str(error)
            break
        pinned += 1
    assert pinned == most
    schedule, _ = run(schedule)
    assert schedule.index.pinned == len(schedule.index) == most
    # Whole prompts, long answers, hits of pins and of states that are not pinned; each takes all that there may be.
    prompts = [text(500, 900), text(60, 901), (*text(length, 0), *text(50, 902)), text(500, 900)]
    for i, prompt in enumerate(prompts):
        asked = request(f"r{i}", prompt, max_tokens=512 - len(prompt))
        schedule, admitted = run(submit(schedule, asked))
        assert f"r{i}" in admitted
    # All at once: those that find no blocks are preempted, and everyone ends.
    for i, prompt in enumerate(prompts):
        schedule = submit(schedule, request(f"s{i}", prompt, max_tokens=512 - len(prompt)))
    schedule, admitted = run(schedule)
    assert {f"s{i}" for i in range(4)} <= set(admitted)
    assert schedule.index.pinned == most
