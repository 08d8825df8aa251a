"""The notebook's front: what it is handed, what it hands back, and that leaving early leaves nothing behind."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.errors import CapacityError, JaxstateError, RequestError
from jaxstate.lm import LM
from tests.engine.conftest import assert_clean
from tests.toy import continue_by_hand

A, B = (1, 2, 3), (4, 5, 6, 7)


@pytest.fixture
def lm(borrow) -> LM:
    engine = borrow()
    return LM(engine.model, None, engine)


def tokens(completions):
    return [list(c.tokens) for c in completions]


def test_completions_come_in_the_order_of_the_prompts(lm):
    prompts = [B, A, B, (9,) * 12]
    got = lm.generate(prompts, max_tokens=5)
    assert tokens(got) == [continue_by_hand(p, 5) for p in prompts]
    assert [c.id for c in got] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "prompt", [A, list(A), np.array(A), np.array(A, np.uint8), jnp.array(A)], ids=repr
)
def test_token_prompts_of_any_kind(lm, prompt):
    assert tokens(lm.generate(prompt, max_tokens=4)) == [continue_by_hand(A, 4)]
    assert tokens(lm.generate([prompt, prompt], max_tokens=4)) == [continue_by_hand(A, 4)] * 2


def test_several_continuations_are_drawn_apart_and_repeat(lm):
    options = {"n": 3, "max_tokens": 12, "temperature": 1.5, "seed": 4}
    first = lm.generate([A, B], **options)
    assert [c.id for c in first] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert len({c.tokens for c in first[:3]}) > 1
    assert tokens(lm.generate([A, B], **options)) == tokens(first)


def test_a_stream_left_early_leaves_nothing_to_the_next(lm):
    for event in lm.stream([A, B], max_tokens=60):
        if event.tokens:
            break
    seen = [e.id for e in lm.stream(A, max_tokens=3)]
    assert set(seen) == {"0"}
    assert tokens(lm.generate(B, max_tokens=5)) == [continue_by_hand(B, 5)]
    list(lm.engine.run())
    assert_clean(lm.engine)


def test_one_prompt_that_cannot_be_served_runs_none(lm):
    with pytest.raises(CapacityError, match="max_len"):
        lm.generate([A, (1,) * 400], max_tokens=5)
    assert tokens(lm.generate(A, max_tokens=5)) == [continue_by_hand(A, 5)]
    list(lm.engine.run())
    assert_clean(lm.engine)


def test_two_streams_at_once_are_refused_by_name(lm):
    first = lm.stream(A, max_tokens=30)
    next(first)
    with pytest.raises(RequestError, match="has not ended") as caught:
        lm.generate(B)
    assert caught.value.code == "busy"
    first.close()
    assert tokens(lm.generate(B, max_tokens=2)) == [continue_by_hand(B, 2)]


def test_a_parameter_that_is_not_known_is_named(lm):
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        lm.generate(A, max_token=4)


def test_a_closed_lm_says_so(lm):
    lm.close()
    with pytest.raises(JaxstateError, match="closed"):
        lm.generate(A)
    assert repr(lm) == "LM(closed)"


@pytest.mark.parametrize(
    "prompt", [3, 2.5, None, [None], [[[1, 2], [3]]], np.zeros((2, 2, 2), int)]
)
def test_what_is_no_prompt_is_refused_by_name(lm, prompt):
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, not"):
        lm.generate(prompt, max_tokens=2)


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "3"])
def test_steps_that_cannot_be_are_refused_as_steps(lm, steps):
    seqs = lm.prefill([[1, 2, 3]])
    with pytest.raises(RequestError, match=r"steps is .*; it must be an int >= 1") as caught:
        lm.decode(seqs, steps)
    assert caught.value.param == "steps"
