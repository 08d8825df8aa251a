"""The examples run on the demo model and do what they say."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxstate as js

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def lm():
    # The sizes of the notebooks, whose programs are then compiled once for all.
    sizes = js.Sizes(rows=2, max_len=256, chunk_tokens=64, decode_steps=4)
    with js.LM.load("demo", sizes=sizes) as lm:
        yield lm


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in ("best_of_n", "beam_search"):
        sys.modules.pop(name, None)


def test_the_best_of_several_continuations_comes_last(lm):
    from best_of_n import best_of_n

    ranked = best_of_n(lm, "The sea", 4, 6, seed=2)
    done = lm.generate("The sea", n=4, max_tokens=6, temperature=0.9, top_p=0.95, seed=2)
    assert [score for score, _ in ranked] == sorted(score for score, _ in ranked)
    assert sorted(text for _, text in ranked) == sorted(c.text for c in done)
    best = max(done, key=lambda c: np.mean(c.logprobs))
    assert ranked[-1][1] == best.text


def test_beams_are_the_likeliest_texts_that_were_looked_at(lm):
    from beam_search import beam_search

    beams, found = beam_search(lm, "The sea", 4, 2)
    prompt = tuple(lm.tokenizer.encode("The sea"))
    # All texts of two tokens whose first is one of the four likeliest.
    start = lm.prefill([prompt])
    first = np.asarray(jax.nn.log_softmax(start.scores))[0]
    firsts = np.argsort(-first)[:4].tolist()
    after, _ = lm.decode(start.fork(4), 1, forced=[[token] for token in firsts])
    second = np.asarray(jax.nn.log_softmax(after.scores))
    totals = first[firsts][:, None] + second
    best = np.argsort(-totals.ravel())[:4]
    want = [(*prompt, firsts[i // second.shape[1]], i % second.shape[1]) for i in best.tolist()]
    assert list(beams.tokens) == want
    np.testing.assert_allclose([total for total, _ in found], totals.ravel()[best], rtol=1e-6)
    assert [text for _, text in found] == [lm.tokenizer.decode(t[len(prompt) :]) for t in want]
