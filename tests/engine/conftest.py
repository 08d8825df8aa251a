"""One compiled engine for all of these tests: each leaves it idle, with every row and block free.

Programs take the weights as arguments and do not depend on the end tokens, so that engines with other weights, end
tokens or a tokenizer borrow them and compile nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxstate.engine import Engine
from jaxstate.request import Completion, Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.mutants.watch import QUICK
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand

SIZES = Sizes(rows=4, max_len=256, chunk_tokens=128, decode_steps=4, checkpoints=0)


@pytest.fixture(scope="session")
def compiled() -> Engine:
    engine = Engine(ToyLM(ToyConfig(blocks=9)), SIZES)
    engine.compile()
    return engine


REUSING = Sizes(rows=3, max_len=512, chunk_tokens=128, decode_steps=4, checkpoints=12)


@pytest.fixture(scope="session")
def reusing():
    """Makes engines that keep states and in which nothing has happened; all run the same two programs."""
    first = Engine(ToyLM(), REUSING)
    programs = {k: first.lower(k).compile(compiler_options=QUICK) for k in ("prefill", "decode")}

    def make(model: ToyLM | None = None) -> Engine:
        engine = Engine(model or ToyLM(), REUSING)
        engine._programs = dict(programs)
        engine.state  # noqa: B018  (made now, so that no step compiles anything)
        return engine

    return make


def assert_clean(engine: Engine) -> None:
    """Nothing is left: pool full, tables null on host and device, no row active, null plans only."""
    assert engine.idle
    pool = engine.schedule.pool
    pool.check()
    for group in engine.spec.names:
        assert pool.free_count(group) == engine.spec.blocks(group) - 1
        assert not engine.schedule.tables[group].any()
        assert not np.asarray(engine.state.tables.ids[group]).any()
    assert pool.held == {} and not np.asarray(engine.state.rows.active).any()
    assert engine.stats.late_compilations == 0


@pytest.fixture
def engine(compiled):
    """The shared engine, idle before and after."""
    yield compiled
    for request_id in list(compiled._progress):
        compiled.abort(request_id)
    list(compiled.run())
    assert_clean(compiled)


@pytest.fixture
def borrow(compiled):
    """Makes engines that run the shared programs: `borrow(eos=(3,), tokenizer=…, breaks_at=…)`."""
    made = []

    def make(*, eos=(), tokenizer=None, breaks_at=np.inf) -> Engine:
        config = dataclasses.replace(compiled.model.config, eos_token_ids=tuple(eos))
        engine = Engine(ToyLM(config, breaks_at=breaks_at), SIZES, tokenizer=tokenizer)
        engine._programs = compiled._programs
        engine.state  # noqa: B018  (made now, so that no step compiles anything)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert_clean(engine)


def request(request_id: str, prompt, /, max_tokens: int = 8, **sampling) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, **sampling))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens; different seeds share no prefix to speak of."""
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist())


def company(n, seed=0, longest=200, **sampling):
    """Random requests: every length, so that prompts share steps, wait, are cut and finish at different times."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"r{i}", prompt_of(int(rng.integers(1, longest)), seed=seed + i),
            max_tokens=int(rng.integers(1, 40)), **sampling,
        ) for i in range(n)
    ]  # fmt: skip


def run_all(engine: Engine, requests) -> dict[str, Completion]:
    """Runs the requests, checking on the way that the events of each add up to its completion."""
    tokens: dict[str, tuple[int, ...]] = {}
    text: dict[str, str] = {}
    done: dict[str, Completion] = {}
    for event in engine.run(requests):
        assert event.id not in done, "an event after the last"
        tokens[event.id] = tokens.get(event.id, ()) + event.tokens
        text[event.id] = text.get(event.id, "") + event.text
        if event.completion is not None:
            done[event.id] = event.completion
            assert tokens[event.id] == event.completion.tokens
            assert text[event.id] == event.completion.text
            assert len(event.completion.logprobs) == len(event.completion.tokens)
    assert set(tokens) == set(done)
    return done


def by_hand(r: Request) -> tuple[int, ...]:
    """What the request's tokens must be, counted with numpy alone."""
    return tuple(continue_by_hand(r.prompt, r.sampling.max_tokens))
