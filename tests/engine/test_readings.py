"""Pins and answers: what is read for later requests never costs those of now a step, and never changes a token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, RequestError, SpecError
from jaxstate.lm import LM
from jaxstate.prefix import block_keys
from jaxstate.request import Completion, Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([11, seed]).integers(0, VOCAB, length).tolist())


def request(name: str, prompt, most: int = 4, **options) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=most), **options)


def ask(engine: Engine, prompt, most: int = 4, salt: str = "") -> Completion:
    (done,) = engine.completions([request("a", prompt, most, cache_salt=salt)])
    assert list(done.tokens) == continue_by_hand(tuple(prompt), most)
    return done


def assert_accounted(engine: Engine) -> None:
    """Every block is free or a visible checkpoint's, once what is read has been."""
    engine.prefixes.settle()
    assert engine.idle and not engine.schedule.staged and not engine.prefixes.unsettled
    pool, index = engine.schedule.pool, engine.schedule.index
    pool.check()
    for group in engine.spec.names:
        assert pool.free_count(group) + len(index) == engine.spec.blocks(group) - 1
        assert not np.asarray(engine.state.tables.ids[group]).any()
    assert engine.stats.late_compilations == 0


# -- pins ------------------------------------------------------------------------------------------


def test_a_pin_outlives_a_storm_of_evictions_and_goes_when_it_is_unpinned(reusing):
    engine, pinned = reusing(), text(200, seed=1)
    assert engine.prefixes.pin(pinned) == 192
    for i in range(30):
        ask(engine, text(90 + i, seed=100 + i))
    assert engine.schedule.evicted > 15
    assert ask(engine, (*pinned, *text(40, seed=2))).cached_tokens == 192
    assert (engine.stats.read_ahead, engine.stats.read_ahead_tokens) == (1, 192)
    before = engine.schedule
    assert engine.prefixes.pin(pinned) == 192 and engine.schedule is before
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    list(engine.run())
    assert [n.key for n in engine.schedule.index.nodes.values()] == [block_keys(pinned)[-1]]
    engine.prefixes.unpin(pinned)
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    assert ask(engine, (*pinned, *text(40, seed=3))).cached_tokens == 0
    assert_accounted(engine)


def test_a_pin_costs_nothing_when_the_state_is_there(reusing):
    engine, prompt = reusing(), text(150)
    ask(engine, prompt)
    assert engine.prefixes.pin(prompt[:140]) == 128
    assert engine.idle and engine.stats.read_ahead == 0
    assert engine.schedule.index.pinned == 1
    assert ask(engine, prompt).cached_tokens == 128
    assert_accounted(engine)


def test_requests_wait_for_a_pin_that_is_being_read_and_salts_keep_it_to_themselves(reusing):
    engine, stem = reusing(), text(320, seed=4)
    engine.prefixes.pin(stem, salt="tenant")
    for i in range(4):
        prompt = (*stem, *text(30, seed=10 + i))
        engine.submit(request(f"r{i}", prompt, cache_salt="" if i == 3 else "tenant"))
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert [done[f"r{i}"].cached_tokens for i in range(4)] == [320, 320, 320, 0]
    for i in range(4):
        prompt = (*stem, *text(30, seed=10 + i))
        assert list(done[f"r{i}"].tokens) == continue_by_hand(prompt, 4)
    assert engine.stats.prompt_tokens == 3 * 30 + 350
    assert_accounted(engine)


def test_pins_leave_room_for_one_request(reusing):
    """Blocks for a row of 512 tokens and for what it starts from stay, whoever pins what."""
    engine = reusing()
    most = engine.spec.blocks("whole") - 1 - engine.spec.capacity("whole") - 1
    for i in range(most):
        engine.prefixes.pin(text(64, seed=300 + i))
    before = engine.schedule
    with pytest.raises(
        CapacityError,
        match=rf"'pin'.* 'whole': needs {most + 3} blocks.* for {most + 2}; unpin",
    ):
        engine.prefixes.pin(text(64, seed=400))
    assert engine.schedule is before
    list(engine.run())
    assert len(engine.schedule.index) == engine.schedule.index.pinned == most
    for i in range(3):
        done = ask(engine, (*text(64, seed=300 + i), *text(440, seed=i)), most=8)
        assert done.cached_tokens == 64
    engine.prefixes.unpin(text(64, seed=300))
    engine.prefixes.pin(text(64, seed=400))
    list(engine.run())
    assert_accounted(engine)


def test_what_cannot_be_pinned_is_refused_and_changes_nothing(reusing):
    engine = reusing()
    before = engine.schedule
    for tokens, error, message in (
        (text(63), RequestError, "63 tokens cannot be pinned; states are kept every 64"),
        ((*text(63), VOCAB), RequestError, f"token {VOCAB} is outside the vocabulary"),
        (text(512), CapacityError, "raise max_len"),
    ):
        with pytest.raises(error, match=message):
            engine.prefixes.pin(tokens)
    with pytest.raises(RequestError, match="not pinned"):
        engine.prefixes.unpin(text(100))
    assert engine.schedule is before
    off = Engine(ToyLM(), Sizes(rows=1, max_len=64, chunk_tokens=64, checkpoints=0))
    with pytest.raises(SpecError, match="checkpoints is 0"):
        off.prefixes.pin(text(100))


def test_a_pin_that_is_taken_back_before_it_was_read_is_not_read(reusing):
    engine = reusing()
    engine.prefixes.pin(text(100))
    engine.prefixes.unpin(text(100))
    assert engine.idle and engine.stats.read_ahead == 0
    # Nor one that a request has read meanwhile.
    engine.submit(request("a", text(100)))
    engine.submit(request("b", text(100)))
    engine.step()
    engine.prefixes.pin(text(100))
    list(engine.run())
    assert engine.schedule.index.pinned == 1 and engine.stats.read_ahead == 0
    assert_accounted(engine)


def test_a_pin_whose_scores_are_not_finite_is_given_up(reusing):
    engine = reusing(ToyLM(breaks_at=128))
    engine.prefixes.pin(text(128))
    list(engine.run())
    assert len(engine.schedule.index) == 0 and not engine.schedule.pins
    # One that a request wrote which broke later is read again.
    engine.submit(request("a", text(120), most=20))
    engine.step()
    engine.prefixes.pin(text(64))
    (done,) = (e.completion for e in engine.run() if e.completion)
    assert done.finish_reason == "error"
    assert engine.schedule.index.pinned == 1 and len(engine.schedule.index) == 1
    assert_accounted(engine)


def test_pins_and_turns_of_an_lm(reusing):
    engine = reusing()
    lm = LM(engine.model, None, engine)
    assert lm.pin(np.array(text(130))) == 128 and engine.idle
    (first,) = lm.generate([(*text(130), 5, 6)], max_tokens=80)
    assert first.cached_tokens == 128
    lm.settle()
    (second,) = lm.generate([(*text(130), 5, 6, *first.tokens, 7)], max_tokens=4)
    assert second.cached_tokens == (132 + 80) // 64 * 64
    lm.unpin(text(130))
    assert engine.schedule.index.pinned == 0


# -- answers ---------------------------------------------------------------------------------------


def test_the_next_turn_starts_after_the_answer(reusing):
    """Prompt, answer and grid: of 100 + 101 tokens 192 are served, and the bits are those of a run without reuse."""
    engine, told = reusing(), text(100)
    steps = 0
    for turn in range(4):
        done = ask(engine, told, most=101)
        assert (
            done.cached_tokens == (len(told) - 20) // 64 * 64 if turn else done.cached_tokens == 0
        )
        assert engine.idle and engine.prefixes.unsettled
        steps += 1
        engine.prefixes.settle()
        assert engine.stats.read_ahead == steps
        alone = ask(reusing(), told, most=101)
        assert done.tokens == alone.tokens and done.logprobs == alone.logprobs
        told = (*told, *done.tokens, *text(20, seed=turn))
        if len(told) + 101 > 512:
            break
    assert turn == 2
    # The first answer from the prompt's 64 on, the others from where the one before ended.
    assert engine.stats.read_ahead_tokens == (192 - 64) + (320 - 192) + (384 - 320)
    assert engine.stats.prompt_tokens == 100 + (221 - 192) + (342 - 320)
    assert_accounted(engine)


def test_answers_that_give_no_new_state_are_not_read(reusing):
    engine = reusing()
    ask(engine, text(100), most=20)  # 120 tokens: the prompt has left the state after 64
    ask(engine, text(100, seed=1), most=1)
    assert not engine.prefixes.unsettled
    ask(engine, text(129, seed=2), most=3)  # 132: the prompt has left that after 128
    ask(engine, text(64, seed=5), most=2)  # after 64, which a prompt of 64 tokens has not left
    assert engine.prefixes.unsettled
    engine.prefixes.settle()
    assert ask(engine, (*text(64, seed=5), 1, 2)).cached_tokens == 64
    ask(engine, text(460, seed=3), most=52)  # all of max_len: nobody can go on from there
    engine.submit(request("gone", text(100, seed=4), most=90))
    engine.step()
    engine.abort("gone")
    list(engine.run())
    assert not engine.prefixes.unsettled and engine.stats.read_ahead == 1
    assert_accounted(engine)


def test_only_the_last_answers_are_remembered(reusing):
    engine, prompts = reusing(), [text(120, seed=i) for i in range(7)]
    for prompt in prompts:
        ask(engine, prompt, most=10)
    assert len(engine.schedule.answers) == engine.spec.rows == 3
    engine.prefixes.settle()
    turns = [(*prompt, *continue_by_hand(prompt, 10), 3) for prompt in prompts]
    assert [ask(engine, turn).cached_tokens for turn in turns] == [64] * 4 + [128] * 3
    # What is forgotten is not read.
    ask(engine, text(60, seed=20), most=10)
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    assert not engine.prefixes.unsettled
    list(engine.run())
    assert_accounted(engine)


def test_answers_delay_nobody(reusing):
    """Step by step, requests get the same tokens in the same steps as where no answer is ever read."""
    rng = np.random.default_rng(1)
    work = [
        request(f"r{i}", text(int(rng.integers(1, 300)), seed=i), most=int(rng.integers(1, 150)))
        for i in range(40)
    ]
    engine, plain, full = reusing(), reusing(), 0
    while work or not (engine.calm and engine.idle and not engine.prefixes.unsettled):
        for _ in range(int(rng.integers(1, 4)) if rng.random() < 0.05 else 0):
            if work:
                engine.submit(work[-1])
                plain.submit(work.pop())
        full += bool(engine.schedule.counts.spare.any()) and engine.backlog > 0
        told = [
            [(e.id, e.tokens, bool(e.completion)) for e in each.step()] for each in (engine, plain)
        ]
        assert told[0] == told[1]
        plain.schedule = dataclasses.replace(plain.schedule, answers=())
    assert plain.calm and plain.stats.read_ahead == 0
    assert engine.stats.read_ahead > 5 and full > 0
    assert engine.stats.prompt_tokens == plain.stats.prompt_tokens
    assert_accounted(engine)


def test_whoever_comes_gets_the_row_of_an_answer_that_is_half_read(reusing):
    engine, plain = reusing(), reusing()
    prompt = text(30)
    answer = continue_by_hand(prompt, 350)
    ask(engine, prompt, most=350)
    engine.step()
    assert engine.idle and engine.schedule.counts.spare.any()
    assert 0 < engine.schedule.counts.read.max() < 320
    for e in (engine, plain):
        for i in range(3):
            e.submit(request(f"r{i}", text(40, seed=50 + i), most=9))
    for _ in range(12):
        a, b = ([(e.id, e.tokens) for e in engine_.step()] for engine_ in (engine, plain))
        assert a == b
    assert engine.calm
    # It is not forgotten: its turn comes again.
    engine.prefixes.settle()
    assert ask(engine, (*prompt, *answer, 1)).cached_tokens == 320
    assert_accounted(engine)


def test_an_answer_fills_room_that_a_prompt_step_leaves(reusing):
    engine = reusing()
    prompt = text(60, seed=7)
    ask(engine, prompt, most=10)
    before = engine.stats.prefill_steps
    ask(engine, text(60, seed=8), most=40)
    assert engine.stats.prefill_steps == before + 1 and engine.stats.read_ahead == 1
    assert ask(engine, (*prompt, *continue_by_hand(prompt, 10), 2)).cached_tokens == 64
    assert_accounted(engine)


def test_an_answer_whose_scores_are_not_finite_leaves_nothing(reusing):
    engine = reusing()
    ask(engine, text(60), most=70)
    broken = ToyLM(breaks_at=100)
    engine._params = reusing(broken)._params
    engine.prefixes.settle()
    assert engine.stats.read_ahead == 1 and len(engine.schedule.index) == 0
    assert_accounted(engine)


def test_a_request_that_fits_only_without_what_it_would_start_from_is_read_from_the_start():
    """The pool holds one row and nothing else: the state that it left is let go for the row that it would serve."""
    config = ToyConfig(blocks=3, paged_blocks=49)
    engine = Engine(
        ToyLM(config), Sizes(rows=1, max_len=192, chunk_tokens=64, decode_steps=4, checkpoints=1)
    )
    assert ask(engine, text(70), most=3).cached_tokens == 0
    assert len(engine.schedule.index) == 1
    done = ask(engine, (*text(70), *text(117, seed=1)), most=5)
    assert (done.cached_tokens, done.cache_miss) == (0, "not_kept")
    assert dataclasses.asdict(done)["prompt_tokens"] == 187
