"""Who runs when, on whose blocks: the scheduler alone, no device."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.errors import CapacityError
from jaxstate.plan import PlanShape, apply_cells
from jaxstate.scheduler import Schedule
from jaxstate.state import CacheSpec, GroupSpec
from tests.engine.conftest import prompt_of, request

LEAF = jax.ShapeDtypeStruct((1,), jnp.float32)


def schedule_of(*, rows=3, max_len=256, chunk=128, block=16, blocks=None) -> Schedule:
    groups = (
        GroupSpec("whole", "recurrent", 1, LEAF),
        GroupSpec("paged", "recurrent", 1, LEAF, block_size=block, blocks=blocks),
    )
    return Schedule.create(PlanShape(CacheSpec(groups, rows=rows, max_len=max_len), chunk))


def submit(schedule, *requests):
    for r in requests:
        schedule = scheduler.submit(schedule, r)
    return schedule


def plan(schedule, steps=4):
    return scheduler.plan_next(schedule, decode_steps=steps)


def drive(schedule, steps=4, most=10_000):
    """Plans until there is nothing to do; yields (schedule, planned), checking the account each time."""
    for _ in range(most):
        step = plan(schedule, steps)
        if step is None:
            return
        before, (schedule, planned) = schedule, step
        schedule.pool.check()
        for group, table in apply_cells(before.tables, planned.plan).items():
            np.testing.assert_array_equal(table, schedule.tables[group])
        for row, running in enumerate(schedule.rows):
            for group in schedule.spec.names:
                ids = schedule.tables[group][row]
                held = () if running is None else schedule.pool.held[running.request.id][group]
                assert ids[ids != 0].tolist() == list(held)
        yield schedule, planned
    raise AssertionError("no end in sight")


def read(planned) -> dict[str, int]:
    """Prompt tokens of each request in a prefill plan."""
    lengths = np.diff(planned.plan.prefill.offsets)
    return {r.request.id: int(lengths[i]) for i, r in enumerate(planned.serves) if r is not None}


def test_nothing_to_do_is_no_plan():
    assert plan(schedule_of()) is None
    assert schedule_of().idle


def test_requests_are_admitted_by_rows_in_order():
    schedule = submit(schedule_of(), *(request(f"r{i}", prompt_of(5, i)) for i in range(5)))
    schedule, planned = plan(schedule)
    assert [r.request.id for r in schedule.running] == ["r0", "r1", "r2"]
    assert [r.id for r in schedule.waiting] == ["r3", "r4"]
    assert read(planned) == {"r0": 5, "r1": 5, "r2": 5}


def test_br27_requests_are_admitted_by_blocks_and_none_overtakes():
    """17 usable blocks; the first needs 10 of them, the second 8, the third 1, which would fit."""
    schedule = schedule_of(blocks=18)
    a = request("a", prompt_of(144), max_tokens=16)
    b = request("b", prompt_of(112), max_tokens=16)
    c = request("c", prompt_of(4), max_tokens=4)
    schedule, _ = plan(submit(schedule, a, b, c))
    assert [r.request.id for r in schedule.running] == ["a"]
    assert schedule.pool.free_count("paged") == 7
    started = [
        r.request.id for _, planned in drive(schedule) for r in planned.serves
        if r is not None and planned.kind == "prefill"
    ]  # fmt: skip
    assert list(dict.fromkeys(started)) == ["a", "b", "c"]


def test_br27_one_that_can_never_fit_is_refused_at_once_with_the_numbers():
    schedule = schedule_of(max_len=64)
    before = schedule
    with pytest.raises(CapacityError) as caught:
        scheduler.submit(schedule, request("long", prompt_of(64), max_tokens=1))
    error = caught.value
    assert (error.request, error.need, error.capacity) == ("long", 65, 64)
    assert schedule is before and schedule.idle
    # One token shorter, it fits and may generate just one token, whatever it asks for.
    assert scheduler.budget_of(request("fits", prompt_of(63), max_tokens=50), schedule.spec) == 1


def test_br27_whatever_is_admitted_finishes_and_no_token_is_read_twice_but_after_a_preemption():
    rng, lost = np.random.default_rng(3), 0
    for blocks in (17, 19, 33):
        requests = [
            request(f"r{i}", prompt_of(int(rng.integers(1, 240)), i), max_tokens=int(rng.integers(1, 30)))
            for i in range(25)
        ]  # fmt: skip
        schedule = submit(schedule_of(blocks=blocks), *requests)
        total: dict[str, int] = {}
        for after, planned in drive(schedule):
            if planned.kind == "prefill":
                for key, n in read(planned).items():
                    assert n > 0
                    total[key] = total.get(key, 0) + n
            for key in planned.preempted:
                total[key] = 0
            lost += len(planned.preempted)
            last = after
        assert total == {r.id: len(r.prompt) for r in requests}
        assert last.idle and last.pool.held == {}
    assert 0 < lost < 25


def test_br23_br24_more_rows_than_blocks_wait_and_do_not_fail():
    schedule = schedule_of(rows=8, max_len=32, blocks=3)
    requests = [request(f"r{i}", prompt_of(20, i), max_tokens=10) for i in range(6)]
    most = 0
    for after, _ in drive(submit(schedule, *requests)):
        most = max(most, len(after.running))
    assert most == 1 and after.idle


def test_rows_and_blocks_are_reused_at_once():
    """A row that reached its length is cleared and handed on by one and the same plan."""
    schedule = submit(
        schedule_of(rows=1), request("a", prompt_of(3), max_tokens=1), request("b", prompt_of(4))
    )
    schedule, first = plan(schedule)
    assert first.plan.prefill.sample.tolist() == [True]
    ids = {g: schedule.pool.held["a"][g] for g in schedule.spec.names}
    schedule, second = plan(schedule)
    assert second.kind == "prefill" and second.plan.clear.tolist() == [True]
    assert {g: schedule.pool.held["b"][g] for g in schedule.spec.names} == ids
    for group in schedule.spec.names:
        # Handed on, so zeroed and no longer free to be poisoned.
        assert set(ids[group]) <= set(second.plan.zero[group].tolist())
        assert not second.plan.freed[group].any()


def test_inv13_br11_every_block_is_zeroed_by_the_plan_that_hands_it_out():
    """The case that was missed elsewhere: a later column than the first, in the state's group too."""
    schedule, planned = plan(submit(schedule_of(), request("a", prompt_of(40), max_tokens=8)))
    for group in schedule.spec.names:
        held = schedule.pool.held["a"][group]
        zeroed = planned.plan.zero[group]
        assert sorted(zeroed[zeroed != 0].tolist()) == sorted(held)
    assert len(schedule.pool.held["a"]["paged"]) == 3


@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33])
def test_br22_blocks_for_the_prompt_and_what_comes_next_are_there_from_the_start(tokens):
    """Four more tokens a step: the blocks grow before the step that needs them, and are never more than it needs."""
    schedule, _ = plan(submit(schedule_of(), request("a", prompt_of(tokens - 5), max_tokens=99)))
    assert len(schedule.pool.held["a"]["paged"]) == -(-tokens // 16)
    for made in (5, 9, 13):
        schedule, planned = plan(schedule)
        assert planned.kind == "decode" and schedule.counts.made[0] == made
        assert len(schedule.pool.held["a"]["paged"]) == -(-(tokens - 5 + made) // 16)
    once, _ = plan(submit(schedule_of(), request("a", prompt_of(tokens - 1), max_tokens=1)))
    assert len(once.pool.held["a"]["paged"]) == -(-tokens // 16)


def test_inv26_chunks_are_cut_at_multiples_of_the_scan_chunk_only():
    schedule = submit(
        schedule_of(chunk=128, block=256),  # one block each, so that all may be admitted at once
        request("a", prompt_of(100), max_tokens=4),
        request("b", prompt_of(200), max_tokens=4),
        request("c", prompt_of(20), max_tokens=4),
    )
    starts: dict[str, list[int]] = {}
    steps = []
    for _, planned in drive(schedule):
        if planned.kind != "prefill":
            continue
        steps.append(read(planned))
        for row, running in enumerate(planned.serves):
            if running is not None:
                starts.setdefault(running.request.id, []).append(
                    int(planned.plan.prefill.starts[row])
                )
    assert all(start % 64 == 0 for seen in starts.values() for start in seen)
    # 28 tokens of room beside `a` are too few for a piece of `b`, and then 72 are left of it.
    assert steps == [{"a": 100}, {"b": 128}, {"b": 72, "c": 20}]


def test_the_packed_tokens_are_those_of_the_prompts():
    rng = np.random.default_rng(0)
    requests = [request(f"r{i}", prompt_of(int(rng.integers(1, 200)), i)) for i in range(9)]
    seen: dict[str, list[int]] = {}
    for _, planned in drive(submit(schedule_of(), *requests)):
        if planned.kind == "prefill":
            p = planned.plan.prefill
            for row, running in enumerate(planned.serves):
                if running is not None:
                    mine = seen.setdefault(running.request.id, [])
                    assert p.starts[row] == len(mine)
                    mine += p.tokens[p.offsets[row] : p.offsets[row + 1]].tolist()
                    assert p.sample[row] == (len(mine) == len(running.request.prompt))
    assert seen == {r.id: list(r.prompt) for r in requests}


def test_prompt_and_decode_steps_take_turns():
    schedule = submit(
        schedule_of(), request("a", prompt_of(8), max_tokens=40), request("b", prompt_of(250), max_tokens=4)
    )  # fmt: skip
    kinds = [planned.kind for _, planned in drive(schedule)]
    # `b` needs two steps beside the first; decoding goes on in between.
    assert kinds[:5] == ["prefill", "decode", "prefill", "decode", "prefill"]


def test_ends_are_predicted_from_the_budget():
    """8 tokens: one from the prompt's step, then 4 and 3; the next plan clears the row without being told."""
    schedule = submit(schedule_of(), request("a", prompt_of(5), max_tokens=8))
    steps = list(drive(schedule))
    assert [planned.kind for _, planned in steps] == ["prefill", "decode", "decode", "decode"]
    assert [s.counts.made[0] if s.rows[0] else None for s, _ in steps] == [1, 5, 8, None]
    assert steps[-1][1].plan.clear.tolist() == [True, False, False]
    assert steps[-1][0].idle


def test_inv10_ending_early_clears_the_row_and_frees_its_blocks_once():
    schedule, _ = plan(
        submit(schedule_of(), request("a", prompt_of(40)), request("b", prompt_of(5)))
    )
    held = schedule.pool.held["a"]
    ended = scheduler.end(scheduler.end(schedule, "a"), "a")
    after, planned = plan(ended)
    assert planned.plan.clear.tolist() == [True, False, False]
    assert [r.request.id if r else None for r in planned.serves] == [None, "b", None]
    for group, ids in held.items():
        assert np.flatnonzero(planned.plan.freed[group]).tolist() == sorted(ids)
        assert not after.tables[group][0].any()
    assert "a" not in after.pool.held
    assert scheduler.end(after, "a").rows == after.rows and scheduler.end(after, "?") == after


def test_a_waiting_request_that_ends_leaves_the_queue():
    schedule = submit(schedule_of(rows=1), *(request(k, prompt_of(5)) for k in "abc"))
    schedule, _ = plan(schedule)
    schedule = scheduler.end(schedule, "b")
    assert [r.id for r in schedule.waiting] == ["c"]
    steps = list(drive(schedule))
    served = {r.request.id for _, planned in steps for r in planned.serves if r is not None}
    assert served == {"a", "c"} and steps[-1][0].idle


def test_br134_ending_at_any_point_leaves_nothing_behind():
    """100 rounds: a request is ended while it waits, reads, decodes or has just been cleared."""
    rng = np.random.default_rng(11)
    schedule = schedule_of(blocks=20)
    for i in range(100):
        schedule = submit(schedule, request(f"r{i}", prompt_of(int(rng.integers(1, 250)), i)))
        for _ in range(int(rng.integers(0, 3))):
            if (step := plan(schedule)) is not None:
                schedule, _ = step
        if rng.random() < 0.7:
            schedule = scheduler.end(schedule, f"r{rng.integers(i + 1)}")
        schedule.pool.check()
    schedule = [after for after, _ in drive(schedule)][-1]
    assert schedule.idle and schedule.pool.held == {}
    assert schedule.pool.free_count("paged") == 19 and schedule.pool.free_count("whole") == 3


def test_a_schedule_is_a_value():
    schedule = submit(schedule_of(), request("a", prompt_of(30)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.waiting = ()
    first, second = plan(schedule), plan(schedule)
    assert first[0].pool.held == second[0].pool.held and schedule.waiting
    assert not any(table.any() for table in schedule.tables.values())
    assert "0 of 3 rows running, 1 waiting" in repr(schedule)
    assert "prefill [(0, 30)]" in repr(first[1].plan)


def test_br16_br149_no_two_plans_share_memory():
    """The device may still read a plan's arrays while the next plan is made; what plans share nobody writes."""
    schedule = submit(schedule_of(), *(request(k, prompt_of(150)) for k in "abc"))
    plans = [planned.plan for _, planned in drive(schedule)]
    arrays = [jax.tree.leaves(p) for p in plans]
    tables = list(schedule.tables.values())
    for one, other in itertools.pairwise(arrays):
        for x in one:
            shared = [y for y in [*other, *tables] if np.shares_memory(x, y)]
            assert not any(array.flags.writeable for array in [*shared, x] if shared)
