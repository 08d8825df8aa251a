"""What ranks plan together, without a device: who gets a request, what kind of step is run, and who waits for whom."""

import dataclasses

import numpy as np
import pytest

from jaxstate import readings, scheduler
from jaxstate.errors import CapacityError
from jaxstate.plan import PlanShape
from jaxstate.ranks import Ranks
from jaxstate.state import CacheSpec
from tests.engine.conftest import prompt_of, request
from tests.toy import ToyConfig, ToyLM

MAX_LEN = 512


def ranks_of(count, rows=2, checkpoints=8, blocks=None):
    blocks = blocks or rows + checkpoints + 1
    groups = ToyLM(ToyConfig(paged_block=None, blocks=blocks, paged_blocks=blocks)).groups()
    spec = CacheSpec(groups, rows=rows, max_len=MAX_LEN)
    return Ranks.create(PlanShape(spec, 128, 4, checkpoints=4 if checkpoints else 0), count)


class Run:
    """Plans steps and takes each for completed at once."""

    def __init__(self, ranks):
        self.ranks, self.steps, self.served = ranks, [], []

    def submit(self, *requests):
        self.ranks = self.ranks.submit(requests)

    def step(self):
        step = self.ranks.plan_next(decode_steps=4)
        if step is None:
            return None
        self.ranks, now = step
        for rank, planned in enumerate(now.planned):
            if planned is not None:
                done = scheduler.publish(self.ranks.schedules[rank], planned.staged)
                self.ranks = self.ranks.put(rank, done)
        self.steps.append(now)
        names = [[r.request.id for r in p.serves if r] if p else [] for p in now.planned]
        self.served.append((now.kind, names))
        return now

    def finish(self, most=500):
        while self.step() is not None:
            assert len(self.steps) < most, "it never ends"
        assert self.ranks.idle
        return self

    def queues(self):
        return [[w.id for w in s.waiting] for s in self.ranks.schedules]

    def running(self):
        return [[r.request.id for r in s.running] for s in self.ranks.schedules]


def test_requests_go_to_the_rank_with_the_least_to_do():
    run = Run(ranks_of(3))
    lengths = (400, 100, 90, 80, 20, 7)
    run.submit(*(request(f"r{n}", prompt_of(n), 10) for n in lengths))
    # 410 | 110, then 90 is less than 110 | 100; 80 to the third (100), 20 to the second (110), 7 there too (140 < 190).
    assert run.queues() == [["r400"], ["r100", "r20", "r7"], ["r90", "r80"]]


def test_what_runs_counts_as_far_as_it_is_to_do():
    run = Run(ranks_of(2))
    run.submit(request("long", prompt_of(300), 10))
    run.step()
    run.step()
    run.submit(request("first", prompt_of(60), 30))
    run.submit(request("second", prompt_of(50), 1))
    # Of the long one 44 tokens are unread and 10 to come, which is less than 60 and 30.
    assert run.queues()[0] == ["second"] and "first" in run.queues()[1]


def test_a_request_goes_to_the_rank_that_has_the_longest_prefix():
    run = Run(ranks_of(3))
    stem = prompt_of(200)
    run.submit(request("a", prompt_of(300, 1), 4), request("b", (*stem, 1, 2), 4))
    run.finish()
    assert [len(s.index) > 0 for s in run.ranks.schedules] == [True, True, False]
    # The second rank has the prefix and is the busiest, the third has nothing to do.
    run.submit(request("first", prompt_of(20, 5), 40), request("busy", prompt_of(90, 6), 100))
    run.submit(request("c", (*stem, 5, 6, 7), 4), request("d", prompt_of(90, 9), 4))
    assert run.queues() == [["first"], ["busy", "c"], ["d"]]
    run.finish()
    cached = {
        r.request.id: r.cached for s in run.steps for p in s.planned if p for r in p.serves if r
    }
    assert cached["c"] == 192 and cached["d"] == 0


def test_without_reuse_prefixes_do_not_matter():
    run = Run(ranks_of(2, checkpoints=0))
    stem = prompt_of(200)
    run.submit(request("a", (*stem, 1), 4))
    run.finish()
    run.submit(request("b", (*stem, 2), 4), request("c", (*stem, 3), 4))
    assert run.queues() == [["b"], ["c"]]


def test_what_waits_moves_to_a_rank_that_has_a_row_for_it():
    """All begin alike and so go to the rank that has it; the other takes of them what the first has no row for."""
    run = Run(ranks_of(2))
    stem = prompt_of(128)
    run.submit(request("first", (*stem, 0), 2))
    run.finish()
    run.submit(*(request(f"r{i}", (*stem, 1 + i), 40) for i in range(6)))
    assert run.queues() == [[f"r{i}" for i in range(6)], []]
    run.step()
    assert run.running() == [
        ["r0", "r1"],
        ["r5"],
    ]  # its prompt fills the step, so the second waits for the next
    assert run.queues() == [["r2", "r3"], ["r4"]]
    run.finish()
    tokens = {}
    for _, names in run.served:
        for name in (name for rank in names for name in rank):
            tokens[name] = tokens.get(name, 0) + 1
    assert all(tokens[f"r{i}"] >= 40 / 4 for i in range(6))


def test_what_is_read_for_later_stays_where_it_is_to_be_kept_and_holds_nobody_up():
    run = Run(ranks_of(2))
    schedules = list(run.ranks.schedules)
    for i in range(4):  # two rows, so that two of them wait
        schedules[0] = scheduler.submit(schedules[0], request(f"r{i}", prompt_of(8, i), 40))
    schedules[0] = readings.pin(schedules[0], prompt_of(64, 9), "")
    run.ranks = Ranks(tuple(schedules))
    run.step()
    assert run.running() == [["r0", "r1"], ["r3", "r2"]]
    queues = [list(s.waiting) for s in run.ranks.schedules]
    assert [[w.reads for w in queue] for queue in queues] == [["pin"], []]


def test_a_full_rank_passes_on_what_its_pool_has_no_room_for():
    """Rows are free on both, but the blocks of the first are held by others."""
    run = Run(ranks_of(2, rows=3, checkpoints=0, blocks=3))  # two blocks for three rows
    run.submit(*(request(f"r{i}", prompt_of(20, i), 100) for i in range(2)))
    run.step()
    schedules = list(run.ranks.schedules)
    for i in range(2):
        schedules[0] = scheduler.submit(schedules[0], request(f"s{i}", prompt_of(9, i), 50))
    run.ranks = Ranks(tuple(schedules))
    for _ in range(4):
        run.step()
    assert list(map(len, run.running())) == [2, 2]
    run.finish()


def test_br86_ranks_that_end_at_different_times_all_finish():
    for sizes in ((5, 5, 50), (50,), ()):
        run = Run(ranks_of(2))
        run.submit(*(request(f"r{i}", prompt_of(8, i), n) for i, n in enumerate(sizes)))
        run.finish()
        longest = -(-max(sizes, default=0) // 4)
        assert len(run.steps) <= longest + 4
        assert all(s.idle for s in run.ranks.schedules)


def test_br88_a_rank_without_rows_has_a_plan_of_the_same_shapes():
    run = Run(ranks_of(2, rows=4))
    run.submit(request("a", prompt_of(9), 8))
    for _ in range(3):
        step, one = run.step(), ranks_of(1, rows=4)
        if step is None:
            break
        one, alone = one.submit([request("a", prompt_of(9), 8)]).plan_next(decode_steps=4)
        if alone.kind != step.kind:
            alone = one.plan_next(decode_steps=4)[1]
        for both, single in zip(_leaves(step.plan), _leaves(alone.plan), strict=True):
            assert (
                both.shape == (2 * single.shape[0], *single.shape[1:])
                and both.dtype == single.dtype
            )
            half = both[single.shape[0] :]
            assert not half.any() or (half == half.flat[0]).all()  # the second rank's is null


def _leaves(plan):
    import jax

    return jax.tree.leaves(plan)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_rank_waits_more_than_one_step_for_the_others(seed):
    """Long prompts on one rank, decoding on the other, and everything between."""
    rng = np.random.default_rng(seed)
    run = Run(ranks_of(3))
    for i in range(40):
        long = i % 3 == 0
        n = int(rng.integers(300, 480) if long else rng.integers(1, 20))
        run.submit(request(f"r{i}", prompt_of(n, i), int(rng.integers(1, 30))))
    idle = [0] * 3
    while True:
        before = run.ranks
        wanted = [((s.counts.prompt > 0) & ~s.counts.leaving).any() for s in before.schedules]
        if run.step() is None:
            break
        for rank, names in enumerate(run.served[-1][1]):
            idle[rank] = idle[rank] + 1 if wanted[rank] and not names else 0
            assert idle[rank] <= 1, (rank, run.served[-3:])
        assert any(run.served[-1][1]) or run.ranks.waiting == 0


def test_a_rank_that_only_clears_rows_costs_the_others_nothing():
    """The first rank has ended and the second is in mid-prompt when it is decoding's turn."""
    run = Run(ranks_of(2))
    run.submit(request("short", prompt_of(4), 1), request("long", prompt_of(500), 2))
    run.finish()
    kinds = [kind for kind, _ in run.served]
    assert kinds == ["prefill"] * 4 + ["decode"] * 2
    assert [names for _, names in run.served][-1] == [[], []]  # the rows are cleared at the end


def test_one_rank_plans_what_its_schedule_plans():
    requests = [request(f"r{i}", prompt_of(3 + 29 * i, i), 3 + i) for i in range(9)]
    run = Run(ranks_of(1)).ranks.submit(requests)
    schedule = run.schedules[0]
    while True:
        ours, theirs = run.plan_next(decode_steps=4), scheduler.plan_next(schedule, decode_steps=4)
        assert (ours is None) == (theirs is None)
        if ours is None:
            break
        run, step = ours
        schedule, planned = theirs
        assert step.kind == planned.kind
        for mine, its in zip(_leaves(step.plan), _leaves(planned.plan), strict=True):
            assert mine.tobytes() == its.tobytes()
        schedule = scheduler.publish(schedule, planned.staged)
        run = run.put(0, scheduler.publish(run.schedules[0], step.planned[0].staged))


def test_ranks_are_values_and_refuse_what_can_never_fit():
    ranks = ranks_of(2)
    before = dataclasses.replace(ranks)
    with pytest.raises(CapacityError):
        ranks.submit([request("a", prompt_of(9), 4), request("b", prompt_of(MAX_LEN), 4)])
    after = ranks.submit([request("a", prompt_of(9), 4)])
    step = after.plan_next(decode_steps=4)
    assert ranks == before and after.waiting == 1 and step[0].waiting == 0
