"""Reuse of prefixes: what the index finds, where states are left, and that a hit changes no token."""

import dataclasses

import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.errors import PlanError
from jaxstate.plan import PlanShape
from jaxstate.prefix import Checkpoint, Match, PrefixIndex, block_keys, wanted
from jaxstate.request import Request, SamplingParams, explain
from jaxstate.rules import check_plan
from jaxstate.scheduler import Schedule, end, plan_next, publish, submit
from tests.toy import VOCAB, ToyLM, continue_by_hand


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def checkpoint(key: bytes, position: int = 64, cost: int = 64, block: int = 1) -> Checkpoint:
    return Checkpoint(key, position, {"whole": block}, f"holder {key!r}", "writer", cost)


# -- names -----------------------------------------------------------------------------------------


def test_a_name_stands_for_all_that_comes_before():
    a, b = text(200), (*text(64), *text(136, seed=9))
    names_a, names_b = block_keys(a), block_keys(b)
    assert len(names_a) == 3 and names_a[0] == names_b[0]
    assert not set(names_a[1:]) & set(names_b[1:])
    # The same second block after another first one is another prefix.
    assert block_keys((*text(64, seed=3), *a[64:128]))[1] != names_a[1]
    assert block_keys(a[:63]) == ()


def test_br55_salts_never_share_a_name():
    assert not set(block_keys(text(128), "x")) & set(block_keys(text(128), "y"))
    assert not set(block_keys(text(128), "x")) & set(block_keys(text(128)))


# -- the index -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit"),
    [(63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (192, 128), (193, 192)],
)
def test_br46_br47_a_hit_leaves_at_least_one_token(length, hit):
    keys = block_keys(text(256))
    index = PrefixIndex()
    for n, key in enumerate(keys, 1):
        index = index.insert(checkpoint(key, 64 * n))
    match = index.match(block_keys(text(256)[:length]), length)
    assert (match.checkpoint.position if match.checkpoint else 0) == hit
    assert match.miss == (None if hit else "too_short")


def test_a_miss_has_a_reason():
    keys = block_keys(text(130))
    assert PrefixIndex().match(keys, 130) == Match(None, 0, "unknown")
    assert PrefixIndex().see(keys).match(keys, 130) == Match(None, 128, "not_kept")
    assert PrefixIndex().see(keys).match(block_keys(text(64)), 64) == Match(None, 64, "too_short")


def test_br54_a_longer_prompt_resumes_from_the_deepest_state_it_shares():
    keys, index = block_keys(text(256)), PrefixIndex()
    index = index.insert(checkpoint(keys[0], 64)).insert(checkpoint(keys[2], 192))
    other = (*text(200), *text(100, seed=5))
    assert index.match(block_keys(other), 300).checkpoint.position == 192
    assert index.match(block_keys((*text(130), *text(99, seed=5))), 229).checkpoint.position == 64


def test_what_costs_least_and_was_used_least_goes_first():
    a, b, c = (bytes([i]) * 16 for i in range(3))
    index = PrefixIndex()
    for key, cost in ((a, 64), (b, 640), (c, 64)):
        index = index.insert(checkpoint(key, cost=cost))
    index = index.use(c)
    order = []
    while len(index):
        index, gone = index.evict()
        order += [node.key for node in gone]
    assert order == [a, c, b] and len(index) == 0
    assert (
        index.clock == 640
    )  # newcomers start from the last loss, so what nobody asks for goes in the end
    fresh = index.insert(checkpoint(a, cost=64))
    assert fresh.nodes[a].priority == 704


def test_pinned_and_kept_checkpoints_stay():
    a, b = b"a" * 16, b"b" * 16
    index = PrefixIndex().insert(checkpoint(a)).insert(checkpoint(b)).pin(a)
    assert index.evict(keep=frozenset([b])) == (index, [])
    after, gone = index.evict(9)
    assert [node.key for node in gone] == [b] and after.evict() == (after, [])
    assert [node.key for node in after.pin(a, False).evict()[1]] == [a]


def test_evicting_in_any_order_equals_always_taking_the_least():
    rng, index = np.random.default_rng(3), PrefixIndex()
    keys = [bytes([i // 256, i % 256]) * 8 for i in range(300)]
    for key in keys:
        index = index.insert(checkpoint(key, cost=int(rng.integers(1, 1000))))
    for _ in range(200):
        if rng.random() < 0.4:
            live = list(index.nodes)
            index = index.use(live[rng.integers(len(live))])
            continue
        count, clock = int(rng.integers(1, 4)), index.clock
        keep = set(rng.choice(list(index.nodes), 3).tolist())
        least = sorted((n.priority, n.key) for n in index.nodes.values() if n.key not in keep)
        before, (index, gone) = index, index.evict(count, keep)
        assert [(n.priority, n.key) for n in gone] == least[:count]
        assert index.clock == gone[-1].priority >= clock
        assert all(n.key in before.nodes and n.key not in index.nodes for n in gone)


def test_the_memory_of_seen_prefixes_is_bounded():
    index = dataclasses.replace(PrefixIndex(), seen_limit=100)
    for seed in range(60):
        index = index.see(block_keys(text(256, seed)))
    assert len(index.seen) <= 104
    assert all(key in index.seen for key in block_keys(text(256, 59)))


def test_states_are_wanted_at_the_end_the_branch_and_a_ladder():
    none = Match(None, 0, "unknown")
    assert wanted(none, 64) == () and wanted(none, 65) == (64,)
    assert wanted(none, 300) == (256,)
    assert wanted(none, 5000) == (1024, 2048, 4096, 4992)
    assert wanted(Match(None, 192, "not_kept"), 5000) == (192, 2048, 4096, 4992)
    hit = Match(checkpoint(b"k", 2048), 2048, None)
    assert wanted(hit, 5000) == (4096, 4992)
    assert wanted(Match(checkpoint(b"k", 64), 64, None), 70) == ()


# -- the scheduler ---------------------------------------------------------------------------------


@pytest.fixture
def schedule(engine) -> Schedule:
    return Schedule.create(engine.shape)


def request(name: str, prompt: tuple[int, ...], most: int = 4) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=most))


def run(schedule: Schedule, *, observed: bool = True) -> tuple[Schedule, list]:
    """Plans until nothing is left, seeing each step complete before the next is planned, if at all."""
    plans = []
    while (step := plan_next(schedule, decode_steps=4)) is not None:
        schedule, planned = step
        plans.append(planned)
        if observed:
            schedule = publish(schedule, planned.staged)
    return schedule, plans


def test_inv29_br42_nothing_is_visible_before_its_step_was_seen_to_complete(schedule):
    schedule, _ = run(submit(schedule, request("a", text(200))), observed=False)
    assert len(schedule.index) == 0 and len(schedule.staged) == 1
    schedule = submit(schedule, request("b", text(200)))
    # It waits for the state that is on its way rather than compute it again.
    assert plan_next(schedule, decode_steps=4) is None
    schedule = publish(schedule, tuple(schedule.staged))
    after, plans = run(schedule)
    assert plans[0].serves[0].cached == 192 and not after.staged


def test_br42_what_an_aborted_request_wrote_never_becomes_visible(schedule):
    step, planned = plan_next(submit(schedule, request("a", text(200))), decode_steps=4)
    step, second = plan_next(step, decode_steps=4)
    assert second.staged
    gone = end(step, "a", discard=True)
    gone = publish(gone, planned.staged + second.staged)
    assert len(gone.index) == 0 and not gone.staged and gone.garbage
    gone, _ = run(gone)
    assert gone.pool.free_count("whole") == gone.spec.blocks("whole") - 1 and gone.idle
    retry, plans = run(submit(gone, request("a", text(200))))
    assert plans[0].serves[0].cached == 0 and len(retry.index) == 1


def test_inv32_br42_same_step_duplicates_wait_for_the_state_and_others_pass(schedule):
    for name, prompt in (("a", text(90)), ("b", text(90)), ("c", text(20, seed=2))):
        schedule = submit(schedule, request(name, prompt))
    after, planned = plan_next(schedule, decode_steps=4)
    assert [r.request.id for r in after.running] == ["a", "c"]
    assert [w.id for w in after.waiting] == ["b"]
    done, plans = run(publish(after, planned.staged))
    served = {r.request.id: r.cached for p in plans for r in p.serves if r is not None}
    assert served["b"] == 64 and done.idle


def test_br25_without_a_free_block_a_state_is_not_kept_and_nobody_waits(engine):
    shape = dataclasses.replace(engine.shape)
    groups = tuple(
        dataclasses.replace(g, blocks=3 * engine.spec.capacity(g.name) + 1)
        for g in engine.spec.groups
    )
    spec = dataclasses.replace(engine.spec, groups=groups)
    schedule = Schedule.create(dataclasses.replace(shape, spec=spec))
    for i in range(3):
        schedule = submit(schedule, request(f"r{i}", text(450, seed=i), most=60))
    schedule, plans = run(schedule)
    assert schedule.idle and schedule.skipped >= 1
    assert {r.request.id for p in plans for r in p.serves if r} == {"r0", "r1", "r2"}


def test_a_full_pool_lets_go_of_states_for_requests(schedule):
    for i in range(30):
        schedule = submit(schedule, request(f"r{i}", text(100 + i, seed=i)))
    schedule, _ = run(schedule)
    assert schedule.evicted > 0 and schedule.idle
    kept = schedule.spec.blocks("whole") - 1 - schedule.pool.free_count("whole")
    assert kept == len(schedule.index) and kept <= 15
    schedule.pool.check()
    emptied, _ = run(scheduler.forget_prefixes(schedule))
    assert emptied.pool.free_count("whole") == emptied.spec.blocks("whole") - 1


def test_a_source_is_held_until_it_is_read(schedule):
    """Who gets a row when the step has no tokens left starts in a later one, and what it starts from may be dropped."""
    schedule, _ = run(submit(schedule, request("a", text(200))))
    (node,) = schedule.index.nodes.values()
    block = node.blocks["whole"]

    def refs(schedule):
        return schedule.pool.refs["whole"][block]

    room = schedule.shape.chunk_tokens
    schedule = submit(schedule, request("first", text(room - 40, seed=5)))
    schedule = submit(schedule, request("b", (*text(192), *text(100, seed=1))))
    after, planned = plan_next(schedule, decode_steps=4)
    (row,) = (r.row for r in after.running if r.request.id == "b")
    assert planned.plan.admission.source["whole"][row] == block and planned.serves[row] is None
    assert refs(after) == 2
    dropped, planned = plan_next(scheduler.forget_prefixes(after), decode_steps=4)
    while planned.serves[row] is None:
        assert refs(dropped) == 1 and dropped.pool.sealed["whole"][block]
        dropped, planned = plan_next(dropped, decode_steps=4)
    assert planned.plan.prefill.starts[row] == 192 and refs(dropped) == 1
    assert refs(plan_next(dropped, decode_steps=4)[0]) == 0


def test_a_source_that_is_read_at_once_stays_until_the_next_plan(schedule):
    """Steps run in order, so whoever gets its block then cannot have written it before."""
    schedule, _ = run(submit(schedule, request("a", text(200))))
    (node,) = schedule.index.nodes.values()
    block = node.blocks["whole"]
    after, planned = plan_next(submit(schedule, request("b", text(200))), decode_steps=4)
    assert planned.plan.admission.source["whole"][0] == block and planned.serves[0] is not None
    assert after.pool.sealed["whole"][block] and not planned.plan.freed["whole"][block]
    later, planned = plan_next(scheduler.forget_prefixes(after), decode_steps=4)
    assert later.pool.refs["whole"][block] == 0 and planned.plan.freed["whole"][block]


def _prefill_with_checkpoint(schedule):
    """A good plan with a source and a checkpoint, and what it is checked against."""
    schedule, _ = run(submit(schedule, request("a", text(200))))
    before = submit(schedule, request("b", (*text(192), *text(100, seed=1))))
    after, planned = plan_next(before, decode_steps=4)
    assert planned.plan.prefill.checkpoints["whole"].any()
    return planned.plan, (before.shape, before.tables, after.pool, after.holders)


def _bad(plan, rule):
    prefill, admission = plan.prefill, plan.admission
    row = int(np.flatnonzero(admission.rows)[0])
    match rule:
        case "only published states are started from":
            admission.source["whole"][row] = plan.cells["whole"].ids[0]
        case "a hit is a hit in every group":
            admission.source["paged"][row] = 0
        case "a checkpoint is kept in every group":
            prefill.checkpoints["paged"][row] = 0
        case "each block is written once":
            prefill.checkpoints["whole"][row, 0] = plan.cells["whole"].ids[0]
        case "checkpoints lie on the grid of what is read":
            prefill.checkpoint_positions[row, 0] -= 1
        case "blocks are zeroed when handed out":
            zero = plan.zero["whole"]
            zero[zero == prefill.checkpoints["whole"][row, 0]] = 0


@pytest.mark.parametrize(
    "rule",
    [
        "only published states are started from",
        "a hit is a hit in every group",
        "a checkpoint is kept in every group",
        "each block is written once",
        "checkpoints lie on the grid of what is read",
        "blocks are zeroed when handed out",
    ],
)
def test_a_plan_against_the_rules_of_reuse_is_refused(schedule, rule):
    plan, world = _prefill_with_checkpoint(schedule)
    check_plan(plan, *world)
    _bad(plan, rule)
    with pytest.raises(PlanError) as caught:
        check_plan(plan, *world)
    assert caught.value.rule == rule


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(reusing):
    return reusing()


@pytest.fixture(autouse=True)
def forget(request):
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.schedule = scheduler.forget_prefixes(engine.schedule)
        list(engine.run())
    yield


def ask(engine, name, prompt, most=6):
    (done,) = engine.completions([request(name, prompt, most)])
    assert list(done.tokens) == continue_by_hand(prompt, most), name
    return done


def test_inv33_br45_br133_the_second_prompt_is_not_computed_again(engine):
    first, before = ask(engine, "a", text(300)), engine.stats.prompt_tokens
    second = ask(engine, "b", text(300))
    assert (first.cached_tokens, first.cache_miss) == (0, "unknown")
    assert (second.cached_tokens, second.cache_miss) == (256, None)
    assert engine.stats.prompt_tokens - before == 300 - 256
    assert "256 of 300" in explain(second) and "no earlier prompt" in explain(first)
    assert "at most 64 tokens" in explain(ask(engine, "c", text(20)))


def test_a_branch_is_kept_when_it_is_seen_a_second_time(engine):
    shared = text(150, seed=77)
    ask(engine, "a", (*shared, *text(100, seed=1)))
    assert ask(engine, "b", (*shared, *text(100, seed=2))).cached_tokens == 0
    assert ask(engine, "c", (*shared, *text(100, seed=3))).cached_tokens == 128


def test_salts_keep_prompts_apart(engine):
    prompt = text(200)
    ask(engine, "a", prompt)
    salted = Request("b", prompt, SamplingParams(max_tokens=3), cache_salt="tenant")
    (done,) = engine.completions([salted])
    assert done.cached_tokens == 0
    (again,) = engine.completions([dataclasses.replace(salted, id="c")])
    assert again.cached_tokens == 192


def test_inv31_br60_br62_a_preempted_request_comes_to_the_same_tokens(engine):
    rng = np.random.default_rng(5)
    wanted_tokens = {f"r{i}": request(f"r{i}", text(60 + 40 * i, seed=i), 20) for i in range(8)}
    for r in wanted_tokens.values():
        engine.submit(r)
    before, got, events = engine.stats.preemptions, {}, {}
    while not engine.idle:
        for event in engine.step():
            events.setdefault(event.id, []).extend(event.tokens)
            if event.completion is not None:
                got[event.id] = event.completion
        running = engine.schedule.running
        if running and rng.random() < 0.3:
            engine.preempt(running[rng.integers(len(running))].request.id)
    assert engine.stats.preemptions - before > 3
    for name, r in wanted_tokens.items():
        assert list(got[name].tokens) == continue_by_hand(r.prompt, 20) == events[name]


def test_preempting_what_does_not_run_changes_nothing(engine):
    before = engine.stats.preemptions
    engine.preempt("nobody")
    engine.submit(request("waits", text(10)))
    engine.preempt("waits")
    assert engine.stats.preemptions == before
    assert [e.completion.finish_reason for e in engine.run() if e.completion] == ["length"]


def test_states_of_a_request_that_broke_are_not_kept(reusing):
    """NaN in its scores came from its state; nobody may start from that."""
    breaks = reusing(ToyLM(breaks_at=150))
    (broken,) = breaks.completions([request("broken", text(149), 20)])
    assert broken.error is not None and broken.error.code == "non_finite"
    assert len(breaks.schedule.index) == 0
    assert (
        breaks.idle and breaks.schedule.pool.free_count("whole") == breaks.spec.blocks("whole") - 1
    )


def test_reuse_compiles_nothing_and_leaves_nothing(engine):
    rng = np.random.default_rng(8)
    stems = [text(n, seed=n) for n in (64, 130, 300)]
    requests = []
    for i in range(40):
        stem = stems[rng.integers(3)]
        stem = stem[: rng.integers(1, len(stem) + 1)] if rng.random() < 0.3 else stem
        tail = text(int(rng.integers(1, 90)), seed=100 + i)
        requests.append(request(f"r{i}", (*stem, *tail), int(rng.integers(1, 12))))
    done = {c.id: c for c in engine.completions(requests)}
    for r in requests:
        assert list(done[r.id].tokens) == continue_by_hand(r.prompt, r.sampling.max_tokens), r
    assert sum(c.cached_tokens for c in done.values()) > 1000
    assert engine.stats.late_compilations == 0
    pool = engine.schedule.pool
    pool.check()
    assert pool.free_count("whole") + len(engine.schedule.index) == engine.spec.blocks("whole") - 1
    assert not any(np.asarray(t).any() for t in engine.state.tables.ids.values())


def test_reuse_off_is_said(engine):
    shape = PlanShape(engine.spec, 128)
    schedule, _ = run(submit(Schedule.create(shape), request("a", text(200))))
    assert len(schedule.index) == 0
    after, _ = plan_next(submit(schedule, request("b", text(200))), decode_steps=4)
    assert after.running[0].miss == "off"
