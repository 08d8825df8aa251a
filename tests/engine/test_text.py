"""Texts, stop texts and what events tell of them, with a real tokenizer of 13 tokens made here."""

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from jaxstate.progress import Progress
from jaxstate.text import Tokenizer
from tests.engine.conftest import company, prompt_of, request, run_all
from tests.toy import continue_by_hand

PIECES = ("a", "b", "ab", "c d", "e", " ", "axb", "abc", "d", "the", "cat", ".", "x")
"""What each token of the toy model says; some hold several letters, so stop texts need not end where tokens do."""


def tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="x")
    )
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


TOKENIZER = tokenizer()


@pytest.fixture
def engine(borrow):
    return borrow(tokenizer=TOKENIZER)


def text_of(tokens) -> str:
    return "".join(PIECES[t] for t in tokens)


def cut(tokens, stop):
    """The text before the first stop text, and the tokens up to the one that completes it."""
    text = text_of(tokens)
    found = [(at, at + len(s)) for s in stop if (at := text.find(s)) >= 0]
    if not found:
        return text, tuple(tokens), False
    start, end = min(found)
    ends = list(itertools.accumulate(len(PIECES[t]) for t in tokens))
    kept = next(i for i, e in enumerate(ends) if e >= end) + 1
    return text[:start], tuple(tokens[:kept]), True


def test_the_tokenizer_says_what_the_table_says():
    assert TOKENIZER.decode(range(13)) == "".join(PIECES)


def test_texts_are_the_tokens_texts(engine):
    requests = company(12, seed=3)
    done = run_all(engine, requests)
    for r in requests:
        tokens = continue_by_hand(r.prompt, r.sampling.max_tokens)
        assert (done[r.id].tokens, done[r.id].text) == (tuple(tokens), text_of(tokens))


@pytest.mark.parametrize("stop", [("bc",), ("cat",), ("b", "abcd"), ("d", "e"), ("ta", "xx", "tc")])
def test_br98_stop_texts_cut_text_and_tokens_in_any_company(engine, stop):
    requests = company(24, seed=9, longest=90, stop=stop)
    done = run_all(engine, requests)
    stopped = 0
    for r in requests:
        tokens = continue_by_hand(r.prompt, r.sampling.max_tokens)
        text, kept, ended = cut(tokens, stop)
        c = done[r.id]
        assert (c.text, c.tokens, c.finish_reason) == (text, kept, "stop" if ended else "length")
        assert len(c.logprobs) == len(c.tokens)
        stopped += ended
    assert stopped, "none of the texts was stopped"


def test_a_stop_text_ends_the_work_too(engine):
    """Not only the text: the row is given up, although 200 tokens were asked for."""
    r = request("r", prompt_of(5), 200, stop=("a", "b", "c", "d", "e"))
    before = engine.stats.decode_steps
    done = run_all(engine, [r])["r"]
    assert done.finish_reason == "stop" and len(done.tokens) < 20
    assert engine.stats.decode_steps - before < 12


def test_the_end_token_is_counted_and_is_not_text(borrow):
    plain = continue_by_hand(prompt_of(5), 20)
    end = next(i for i in range(3, 20) if plain[i] not in plain[:i])
    engine = borrow(eos=(plain[end],), tokenizer=TOKENIZER)
    done = run_all(engine, [request("r", prompt_of(5), 20)])["r"]
    assert (done.tokens, done.finish_reason) == (tuple(plain[: end + 1]), "stop")
    assert done.text == text_of(plain[:end])


def test_br125_text_made_in_the_step_that_broke_is_told(borrow):
    """Three tokens are made and the fourth breaks, all in one step, with text held back for a stop text."""
    for stop in ((), ("zzz",), (text_of(continue_by_hand(prompt_of(17), 3))[-1] + "?",)):
        engine = borrow(tokenizer=TOKENIZER, breaks_at=20)
        done = run_all(engine, [request("r", prompt_of(17), 12, stop=stop)])["r"]
        tokens = continue_by_hand(prompt_of(17), 3)
        assert (done.finish_reason, done.tokens) == ("error", tuple(tokens))
        assert done.text == text_of(tokens)


def test_an_abort_tells_what_was_held_back(engine):
    r = request("r", prompt_of(5), 200, stop=tuple(p + "\n" for p in PIECES))
    engine.submit(r)
    events = [e for _ in range(4) for e in engine.step()]
    engine.abort("r")
    events += list(engine.run())
    last = events[-1].completion
    assert last.finish_reason == "aborted" and 0 < len(last.tokens) < 200
    assert "".join(e.text for e in events) == last.text == text_of(last.tokens)
    assert sum((e.tokens for e in events), ()) == last.tokens


# Progress alone: however the tokens are grouped, events add up and agree with the whole.


def feed(tokens, groups, stop, budget, eos=(), stop_ids=()):
    progress = Progress.start(
        request("r", (1,), budget, stop=stop, stop_ids=stop_ids), budget, eos, TOKENIZER
    )
    events, rest = [], list(tokens[:budget])
    for n in groups:
        piece, rest = rest[:n], rest[n:]
        if not piece:
            break
        events.append(progress.push(piece, [-0.5 * t for t in piece]))
        if events[-1].completion is not None:
            break
    return events


def test_br98_events_never_tell_a_token_that_a_stop_text_takes_back():
    """With "ab" made, "abcd" may yet come, or "b" be what counts: its token waits, as the text does."""
    a, b, c_d, x = PIECES.index("a"), PIECES.index("b"), PIECES.index("c d"), PIECES.index("x")
    for rest in (c_d, x):
        events = feed((a, b, rest, x), [1] * 9, ("abcd", "b"), budget=9)
        assert [e.tokens for e in events] == [(a,), (), (b,)]
        assert [e.text for e in events] == ["", "", "a"]
        assert (events[-1].completion.tokens, events[-1].completion.text) == ((a, b), "a")
    # Nothing more comes, so "b" it is: not the length ended it, although both tokens were made.
    last = feed((a, b), [1] * 9, ("abcd", "b"), budget=2)[-1]
    assert (last.tokens, last.text, last.completion.finish_reason) == ((b,), "a", "stop")


@pytest.mark.parametrize("seed", range(4))
def test_events_add_up_however_tokens_are_grouped(seed):
    rng = np.random.default_rng(seed)
    for _ in range(150):
        tokens = rng.integers(0, 13, 14).tolist()
        stop = tuple(
            text_of(rng.integers(0, 13, int(rng.integers(1, 3))))[: int(rng.integers(1, 5))]
            for _ in range(int(rng.integers(0, 4)))
        )
        budget = int(rng.integers(1, 15))
        eos = (int(rng.integers(0, 13)),) if rng.random() < 0.4 else ()
        whole = feed(tokens, [budget], stop, budget, eos)[-1].completion
        groups = rng.integers(1, 5, 14).tolist()
        events = feed(tokens, groups, stop, budget, eos)
        last = events[-1].completion
        assert last is not None and all(e.completion is None for e in events[:-1])
        assert sum((e.tokens for e in events), ()) == last.tokens
        assert "".join(e.text for e in events) == last.text
        assert last.logprobs == tuple(-0.5 * t for t in last.tokens)
        for name in ("tokens", "text", "finish_reason", "logprobs"):
            assert getattr(last, name) == getattr(whole, name), (tokens, stop, budget, eos, groups)
        end = next((i for i, t in enumerate(tokens[:budget]) if t in eos), None)
        text, kept, ended = cut(tokens[: budget if end is None else end], stop)
        assert last.text == text
        if ended:
            assert (last.tokens, last.finish_reason) == (kept, "stop")
        else:
            assert last.tokens == tuple(tokens[: budget if end is None else end + 1])
            assert last.finish_reason == ("length" if end is None else "stop")
