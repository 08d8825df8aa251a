"""Public reports about reused states, each as a scenario with its right outcome; `tests/README.md` says which."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxstate.engine import Engine
from jaxstate.prefix import block_keys
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand, state_by_hand


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([13, seed]).integers(0, VOCAB, length).tolist())


def request(name: str, prompt, most: int = 5) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=most))


def ask(engine: Engine, prompt, most: int = 5):
    (done,) = engine.completions([request("a", prompt, most)])
    assert list(done.tokens) == continue_by_hand(tuple(prompt), most)
    return done


def assert_states(engine: Engine, texts) -> int:
    """Every kept state is, in every leaf and layer, that after its own prefix; how many there are."""
    by_name = {key: t[: 64 * n] for t in texts for n, key in enumerate(block_keys(t), 1)}
    for node in engine.schedule.index.nodes.values():
        (h,), aux = state_by_hand(by_name[node.key])
        for group, block in node.blocks.items():
            got_h, got = engine.state.cache.read(group, [block])
            assert (np.asarray(got_h)[:, 0, 0] == h).all()
            assert (np.asarray(got["count"])[:, 0] == node.position).all()
            assert (np.asarray(got["last"])[:, 0] == aux["last"]).all()
    return len(engine.schedule.index)


@pytest.mark.parametrize(
    ("length", "hit"), [(64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (192, 128), (193, 192)]
)
def test_br46_br47_br49_the_same_prompt_twice_computes_its_tail_and_no_more(reusing, length, hit):
    """Tails of one token, which are shorter than the window of inputs, and of a whole 64."""
    engine, prompt = reusing(), text(length, seed=length)
    cold, before = ask(engine, prompt), engine.stats.prompt_tokens
    warm = ask(engine, prompt)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, hit)
    assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs
    assert engine.stats.prompt_tokens - before == length - hit
    assert_states(engine, [(*prompt, *cold.tokens)])


def test_br43_br57_every_state_is_that_after_its_own_prefix(reusing):
    """Whatever was packed beside it, and although the next step is planned before a step is seen."""
    engine, rng = reusing(), np.random.default_rng(0)
    stem = text(150, seed=1)
    prompts = [
        (*stem[: int(rng.integers(0, 151))], *text(int(rng.integers(1, 200)), seed=20 + i))
        for i in range(14)
    ]
    done = {
        c.id: c for c in engine.completions(request(f"r{i}", p, 70) for i, p in enumerate(prompts))
    }
    engine.prefixes.settle()
    texts = [(*p, *done[f"r{i}"].tokens) for i, p in enumerate(prompts)]
    assert assert_states(engine, texts) > 8
    for i, prompt in enumerate(prompts):
        assert list(done[f"r{i}"].tokens) == continue_by_hand(prompt, 70)


def test_br59_a_state_that_many_start_from_stays_as_it_was(reusing):
    engine, prompt = reusing(), text(150, seed=2)
    first = ask(engine, prompt, most=30)
    again, short = ask(engine, prompt, most=30), ask(engine, prompt, most=1)
    assert again.tokens == first.tokens and short.tokens == first.tokens[:1]
    assert again.cached_tokens == short.cached_tokens == 128
    others = [(*prompt[:128], *text(n, seed=n)) for n in (1, 2, 3, 4, 60)]
    for i, other in enumerate(others):
        engine.submit(request(f"r{i}", other, 20))
    done = {e.id: e.completion for e in engine.run() if e.completion}
    for i, other in enumerate(others):
        assert done[f"r{i}"].cached_tokens == 128
        assert list(done[f"r{i}"].tokens) == continue_by_hand(other, 20)
    assert_states(
        engine, [prompt, *others, *((*o, *done[f"r{i}"].tokens) for i, o in enumerate(others))]
    )


def test_br54_a_change_within_the_prompt_costs_what_comes_after_it(reusing):
    engine, prompt = reusing(), text(300, seed=3)
    changed = (*prompt[:200], *text(100, seed=4))
    ask(engine, prompt[:129])
    ask(engine, prompt)
    assert ask(engine, changed).cached_tokens == 128
    assert ask(engine, (*prompt[:100], *text(50, seed=5))).cached_tokens == 0
    assert ask(engine, prompt).cached_tokens == 256, "what others branched off from is still there"


@pytest.mark.parametrize("group", ["whole", "paged"])
def test_br45_br52_a_hit_needs_the_state_of_every_group(reusing, group):
    """A checkpoint is of all groups or of none: there is no way to let go of one group's block."""
    engine = reusing()
    ask(engine, text(200))
    (node,) = engine.schedule.index.nodes.values()
    assert set(node.blocks) == set(engine.spec.names)
    pool, need = engine.schedule.pool, engine.spec.need(32)[group]
    pool, _ = pool.allocate("ballast", {group: pool.free_count(group) - need + 1})
    engine.schedule = dataclasses.replace(engine.schedule, pool=pool)
    # One group is short of a block: the checkpoint goes for it, and goes whole.
    engine.submit(request("b", text(30, seed=9), most=2))
    engine.step()
    assert len(engine.schedule.index) == 0
    for name in engine.spec.names:
        assert not engine.schedule.pool.sealed[name].any()
    engine.abort("b", quiet=True)
    pool, _ = engine.schedule.pool.release("ballast")
    engine.schedule = dataclasses.replace(engine.schedule, pool=pool)
    list(engine.run())
    assert ask(engine, text(200)).cached_tokens == 0


def test_br50_reuse_that_can_never_happen_is_said_at_the_start():
    said = []
    for most in (64, 65, 129):
        sizes = Sizes(rows=1, max_len=most, chunk_tokens=64, checkpoints=4)
        Engine(ToyLM(ToyConfig(paged_block=64)), sizes, report=said.append)
    assert len(said) == 2 and all(
        "prefixes cannot be reused: within max_len" in line for line in said
    )


def test_br134_a_hundred_aborts_after_a_match_leave_the_account_as_it_was(reusing):
    """While it waits, when it was admitted and not run, and when it cannot be admitted."""
    engine, prompt = reusing(), text(200)
    ask(engine, prompt)
    (node,) = engine.schedule.index.nodes.values()
    before = {g: engine.schedule.pool.free_count(g) for g in engine.spec.names}
    for cycle in range(100):
        for i in range(1 + cycle % 5):
            engine.submit(request(f"r{i}", (*prompt[:192], cycle % VOCAB, i), most=300))
        for _ in range(cycle % 3):
            engine.step()
            engine.schedule.pool.check()
        for i in range(1 + cycle % 5):
            engine.abort(f"r{i}", quiet=True)
        list(engine.run())
        engine.schedule.pool.check()
        assert {g: engine.schedule.pool.free_count(g) for g in engine.spec.names} == before
        assert engine.schedule.pool.refs["whole"][node.blocks["whole"]] == 1
    assert_states(engine, [prompt])


def test_br136_the_account_adds_up_with_some_waiting_running_cached_and_pinned(reusing):
    engine, seen = reusing(), set()
    engine.prefixes.pin(text(128, seed=50))
    for i in range(9):
        engine.submit(request(f"r{i}", text(40 + 30 * i, seed=i), most=30 + 10 * i))
    while not engine.idle:
        engine.step()
        schedule = engine.schedule
        schedule.pool.check()
        for group in engine.spec.names:
            held = {b for blocks in schedule.pool.held.values() for b in blocks.get(group, ())}
            assert len(held) + schedule.pool.free_count(group) + 1 == engine.spec.blocks(group)
        has = {
            "waiting": schedule.waiting,
            "running": schedule.running,
            "cached": len(schedule.index) > 1,
        }
        seen.add(
            tuple(name for name, there in has.items() if there)
            + ("pinned",) * schedule.index.pinned
        )
    assert ("waiting", "running", "cached", "pinned") in seen
