"""Blocks that run out in a running engine: whoever loses its row comes to the tokens worked out by hand."""

import numpy as np
import pytest

from jaxstate.engine import Engine
from jaxstate.errors import CapacityError
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.engine.conftest import request, run_all
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand

# 20 blocks of 8 tokens, what one sequence of `max_len` fills; three rows share them.
CONFIG = ToyConfig(paged_block=8, paged_blocks=21)
SIZES = Sizes(rows=3, max_len=160, chunk_tokens=64, decode_steps=4, checkpoints=6)


@pytest.fixture(scope="module")
def engine():
    engine = Engine(ToyLM(CONFIG), SIZES)
    engine.compile()
    return engine


def text(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def by_hand(asked: Request) -> list[int]:
    return continue_by_hand(asked.prompt, asked.sampling.max_tokens, config=CONFIG)


def test_br60_br62_blocks_run_out_and_everyone_comes_to_its_own_tokens(engine):
    requests = [request(f"r{i}", text(30 + 9 * i, seed=i), max_tokens=70) for i in range(5)]
    requests.append(request("again", requests[4].prompt, max_tokens=50))
    before = engine.stats.preemptions
    done = run_all(engine, requests)
    assert engine.stats.preemptions - before >= 2
    for asked in requests:
        assert list(done[asked.id].tokens) == by_hand(asked), asked
    assert engine.idle and engine.stats.late_compilations == 0
    engine.schedule.pool.check()
    kept = len(engine.schedule.index)
    for group in engine.spec.names:
        assert engine.schedule.pool.free_count(group) + kept == engine.spec.blocks(group) - 1


def test_br62_sampled_requests_draw_the_same_after_they_lost_their_row(engine):
    asked = [
        Request(
            f"s{i}", text(20, seed=40 + i), SamplingParams(max_tokens=70, temperature=1.0, seed=i)
        )
        for i in range(3)
    ]
    alone = {r.id: run_all(engine, [r])[r.id].tokens for r in asked}
    before = engine.stats.preemptions
    together = run_all(engine, asked)
    assert engine.stats.preemptions > before
    assert {name: done.tokens for name, done in together.items()} == alone


def test_a_request_of_the_whole_pool_runs_beside_states_kept_of_its_own_prompt(engine):
    """The state that it would start from has a block that it needs; alone, it reads its prompt instead of waiting."""
    prompt, preempted = text(100, seed=3), 0
    run_all(engine, [request("first", prompt, max_tokens=5)])
    assert len(engine.schedule.index)
    whole, done = request("whole", prompt, max_tokens=60), []
    engine.submit(whole)
    for _ in range(400):
        done += [e.completion for e in engine.step() if e.completion is not None]
        if engine.idle:
            break
        if preempted < 3 and engine.schedule.counts.made.max() > 20:
            engine.preempt("whole")  # so it comes back when all that it needs is free
            preempted += 1
    assert preempted == 3 and list(done[0].tokens) == by_hand(whole)


def test_one_that_can_never_fit_is_refused_when_it_comes(engine):
    with pytest.raises(CapacityError, match="161"):
        engine.submit(request("long", text(160, seed=1), max_tokens=1))
    assert engine.idle


def test_aborting_who_lost_its_row_leaves_nothing(engine):
    requests = [request(f"a{i}", text(40, seed=60 + i), max_tokens=100) for i in range(3)]
    for asked in requests:
        engine.submit(asked)
    before, gone = engine.stats.preemptions, set()
    for _ in range(400):
        engine.step()
        waits = {w.id for w in engine.schedule.waiting if w.age} - gone
        for name in waits:
            engine.abort(name)
            gone.add(name)
        if engine.idle:
            break
    assert gone and engine.stats.preemptions > before and engine.idle
    engine.schedule.pool.check()
