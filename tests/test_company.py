"""The shipped model through the whole engine: the company a request keeps changes nothing."""

import chex
import numpy as np
import pytest

import jaxstate as js
from jaxstate.lm import DEMO
from jaxstate.state.spec import NULL

SIZES = js.Sizes(rows=8, max_len=2048, chunk_tokens=256, decode_steps=8, checkpoints=0)


@pytest.fixture(scope="module")
def lm():
    with js.LM.load(DEMO, sizes=SIZES, poison=True) as lm:
        yield lm


def _requests(lm, count: int) -> list[js.Request]:
    rng = np.random.default_rng(64)
    requests = []
    for i in range(count):
        prompt = tuple(rng.integers(1, lm.model.config.vocab_size, rng.integers(1, 400)).tolist())
        sampling = js.SamplingParams(
            max_tokens=int(rng.integers(1, 33)),
            temperature=float(i % 3) / 2,
            seed=i % 5,
            ignore_eos=bool(i % 2),
        )
        requests.append(js.Request(f"request {i}", prompt, sampling))
    return requests


def test_64_requests_through_8_rows_are_bit_equal_to_each_alone(lm):
    requests = _requests(lm, 64)
    together = {c.id: c for c in lm.engine.completions(requests)}
    assert set(together) == {r.id for r in requests}
    assert all(c.finish_reason in ("stop", "length") for c in together.values())
    for request in requests:
        (alone,) = lm.engine.completions([request])
        company = together[request.id]
        assert alone.tokens == company.tokens, request
        assert alone.logprobs == company.logprobs, request
    assert lm.engine.stats.late_compilations == 0
    _assert_as_new(lm)


def test_texts_together_are_the_texts_alone(lm):
    prompts = ["Once upon a time", "The ship", "“You are late,” said she, and", "It was", "A"]
    options = {"max_tokens": 20, "temperature": 0.9, "seed": 3}
    together = [c.text for c in lm.generate(prompts, **options)]
    reordered = {p: c.text for p, c in zip(prompts[::-1], lm.generate(prompts[::-1]), strict=True)}
    assert all(text.strip() for text in together)
    assert lm.generate(prompts[0], **options)[0].text == together[0]
    greedy = {p: c.text for p, c in zip(prompts, lm.generate(prompts), strict=True)}
    assert greedy == reordered
    _assert_as_new(lm)


def _assert_as_new(lm):
    """The pool is full again and every table row is null."""
    engine = lm.engine
    assert engine.idle
    for group in engine.spec.names:
        assert engine.schedule.pool.free_count(group) == engine.spec.blocks(group) - 1
        table = np.asarray(engine.state.tables.ids[group])
        chex.assert_trees_all_equal(table, np.full_like(table, NULL))
    engine.schedule.pool.check()
