"""The engine end to end: many requests at once give what each gives by hand, and nothing is left behind."""

import itertools

import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, RequestError, SpecError
from jaxstate.sizing import Sizes
from jaxstate.state import GroupSpec
from tests.engine.conftest import SIZES, assert_clean, company, prompt_of, request, run_all
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand, scores_by_hand


def by_hand(r):
    return tuple(continue_by_hand(r.prompt, r.sampling.max_tokens))


# The same answer whatever the company.


@pytest.mark.parametrize("seed", [0, 1])
def test_inv05_inv27_br05_br80_any_company_gives_what_each_gives_by_hand(engine, seed):
    requests = company(40, seed)
    done = run_all(engine, requests)
    for r in requests:
        c = done[r.id]
        assert (c.tokens, c.finish_reason, c.error) == (by_hand(r), "length", None)
        assert (c.prompt_tokens, c.cached_tokens, c.text) == (len(r.prompt), 0, "")
        assert 0 < c.first_token_s <= c.total_s


def test_br109_every_order_of_four_gives_each_its_own(engine):
    base = [request(f"r{i}", prompt_of(5 + i, i), n) for i, n in enumerate((1, 8, 3, 8))]
    for order in itertools.permutations(base):
        done = run_all(engine, order)
        assert {k: c.tokens for k, c in done.items()} == {r.id: by_hand(r) for r in base}


def test_br05_br07_a_row_used_again_starts_from_zero(engine):
    """One after the other, alone, so that all use row 0 and the same blocks: also a shared prefix."""
    for i, prompt in enumerate([(1, 2, 3, 4, 5), (10, 12, 7), (1, 2, 3, 9), (1, 2, 3, 4, 5)]):
        r = request(f"r{i}", prompt, 6)
        assert run_all(engine, [r])[r.id].tokens == by_hand(r)


def test_br08_the_first_decode_input_is_the_requests_own_first_token(engine):
    """24 requests in waves of 3, a step ahead of what is observed; the second token follows from the first."""
    requests = [request(f"r{i}", (i % VOCAB, i // VOCAB), 2) for i in range(24)]
    done, source = {}, iter(requests)
    while len(done) < 24:
        for r in itertools.islice(source, 3):
            engine.submit(r)
        done |= {e.id: e.completion for e in engine.step() if e.completion}
    assert {k: c.tokens for k, c in done.items()} == {r.id: by_hand(r) for r in requests}
    list(engine.run())


def test_inv26_br64_br77_a_cut_prompt_gives_the_same_bits(engine):
    """Prompts longer than a step, alone and where the company moves the cuts: equal tokens and log-probabilities."""
    for length in (63, 64, 65, 128, 129, 192, 200, 240):
        r = request("r", prompt_of(length), 12)
        alone = run_all(engine, [r])["r"]
        assert alone.tokens == by_hand(r)
        for first in (100, 127, 130):
            others = [request("a", prompt_of(first, 1), 20), request("b", prompt_of(70, 2), 5)]
            together = run_all(engine, [*others, r])["r"]
            assert (together.tokens, together.logprobs) == (alone.tokens, alone.logprobs)


MIXED = (
    {"temperature": 0.8, "seed": 42},
    {"temperature": 1.2, "top_k": 4, "seed": 7},
    {},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05, "seed": 42},
    {"temperature": 2.0, "top_k": 1, "seed": 3},
)


def test_inv27_br79_sampled_requests_draw_the_same_in_any_company_row_and_order(engine):
    requests = [request(f"r{i}", prompt_of(9 + 7 * i, i), 20, **MIXED[i % 5]) for i in range(15)]
    alone = {r.id: run_all(engine, [r])[r.id] for r in requests}
    rng = np.random.default_rng(0)
    for _ in range(3):
        done = run_all(engine, [requests[i] for i in rng.permutation(15)])
        for key, c in done.items():
            assert (c.tokens, c.logprobs) == (alone[key].tokens, alone[key].logprobs)
    # top_k = 1 takes the likeliest, or one of several that are equally so.
    text = requests[4].prompt
    for token in alone["r4"].tokens:
        scores = scores_by_hand(text)
        assert scores[token] == scores.max()
        text = (*text, token)
    assert alone["r0"].tokens != by_hand(requests[0])


def test_br79_a_neighbours_seed_changes_nothing(engine):
    mine = request("mine", prompt_of(10), 16, temperature=1.0, seed=42)
    seen = set()
    for other in ({"temperature": 1.0, "seed": 7}, {"temperature": 1.0}, {}, None):
        others = [] if other is None else [request("other", prompt_of(5, 1), 16, **other)]
        seen.add(run_all(engine, [*others, mine])["mine"].tokens)
    assert len(seen) == 1


def test_draws_are_keyed_by_seed_and_request(engine):
    def tokens(key, seed):
        return run_all(engine, [request(key, prompt_of(6), 24, temperature=1.5, seed=seed)])[key].tokens  # fmt: skip

    assert tokens("a", 1) == tokens("a", 1)
    assert len({tokens("a", 1), tokens("a", 2), tokens("b", 1)}) == 3


# How requests end.


@pytest.mark.parametrize("order", [1, -1])
def test_stop_ids_end_with_the_stop_token_counted(engine, order):
    requests, expect = [], {}
    for i in range(12):
        plain = continue_by_hand(prompt_of(5 + 9 * i, i), 20)
        at = 1 + i % 9  # within a step of 4 tokens, and at its ends
        stop = plain[at]
        end = plain.index(stop)
        requests.append(request(f"r{i}", prompt_of(5 + 9 * i, i), 20, stop_ids=(stop, 99)))
        expect[f"r{i}"] = tuple(plain[: end + 1])
    done = run_all(engine, requests[::order])
    assert {k: c.tokens for k, c in done.items()} == expect
    assert {c.finish_reason for c in done.values()} == {"stop"}


def test_the_models_end_tokens_end_all_but_those_that_ignore_them(borrow):
    engine = borrow(eos=(3, 8))
    requests = company(16, seed=5)
    done = run_all(engine, requests)
    stopped = 0
    for r in requests:
        plain = by_hand(r)
        end = next((i for i, t in enumerate(plain) if t in (3, 8)), None)
        assert done[r.id].tokens == plain[: None if end is None else end + 1]
        assert done[r.id].finish_reason == ("length" if end is None else "stop")
        stopped += end is not None
    assert 0 < stopped < 16
    ignoring = company(16, seed=5, ignore_eos=True)
    done = run_all(engine, ignoring)
    assert all(done[r.id].tokens == by_hand(r) for r in ignoring)
    # Its own stop ids still hold.
    plain = continue_by_hand(prompt_of(4), 9)
    r = request("x", prompt_of(4), 9, ignore_eos=True, stop_ids=(plain[3],))
    assert run_all(engine, [r])["x"].tokens == tuple(plain[: plain.index(plain[3]) + 1])


def test_br108_token_limits(engine):
    """A prompt of 151 in rows of 256: 105 tokens fit, and no more come however many are asked for."""
    plain = tuple(continue_by_hand(prompt_of(151), 105))
    for asked, got in [(1, 1), (2, 2), (104, 104), (105, 105), (106, 105), (10_000, 105)]:
        done = run_all(engine, [request("r", prompt_of(151), asked)])["r"]
        assert (done.tokens, done.finish_reason) == (plain[:got], "length")
    with pytest.raises(RequestError, match="max_tokens is 0") as caught:
        request("r", prompt_of(151), 0)
    assert caught.value.param == "max_tokens"
    full = run_all(engine, [request("r", prompt_of(255), 9)])["r"]
    assert full.tokens == tuple(continue_by_hand(prompt_of(255), 1))


def test_max_tokens_one_needs_no_decode_step(engine):
    before = engine.stats.decode_steps
    requests = [request(f"r{i}", prompt_of(10, i), 1) for i in range(4)]
    done = run_all(engine, requests)
    assert {k: c.tokens for k, c in done.items()} == {r.id: by_hand(r) for r in requests}
    assert engine.stats.decode_steps - before == 1  # which clears the rows


def test_logprobs_are_those_of_the_unmodified_distribution(engine):
    requests = [request(f"r{i}", prompt_of(4 + 20 * i, i), 8, **MIXED[i]) for i in range(5)]
    for r in requests:
        c, text = run_all(engine, [r])[r.id], r.prompt
        for token, logprob in zip(c.tokens, c.logprobs, strict=True):
            scores = scores_by_hand(text)
            expect = scores[token] - scores.max() - np.log(np.exp(scores - scores.max()).sum())
            assert logprob == pytest.approx(expect, rel=1e-5, abs=1e-6)
            text = (*text, token)


# Aborts.


def aborted(events, key):
    """The completion of an aborted request, after which there is no event of it."""
    mine = [e for e in events if e.id == key]
    assert [e.completion is not None for e in mine].count(True) == 1
    assert mine[-1].completion.finish_reason == "aborted"
    assert sum((e.tokens for e in mine), ()) == mine[-1].completion.tokens
    return mine[-1].completion


def test_abort_before_anything_was_dispatched(engine):
    steps = engine.stats.prefill_steps
    engine.submit(request("a", prompt_of(9)))
    engine.abort("a")
    events = list(engine.run())
    assert aborted(events, "a").tokens == () and engine.stats.prefill_steps == steps
    assert_clean(engine)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_inv28_inv29_br11_br42_abort_at_any_time_and_send_the_same_object_again(engine, steps):
    """While its chunks are read, on the way, and while it decodes: the retry is as if nothing had been."""
    free = {g: engine.schedule.pool.free_count(g) for g in engine.spec.names}
    a = request("a", prompt_of(250), 6)
    neighbour = request("b", prompt_of(30, 1), 30)
    events = []
    engine.submit(neighbour)
    engine.submit(a)
    for _ in range(steps):
        events += engine.step()
    assert not any(e.id == "a" and e.completion for e in events)
    engine.abort("a")
    engine.submit(a)
    rest = list(engine.run())
    mine = [e for e in [*events, *rest] if e.id == "a"]
    cut = next(i for i, e in enumerate(mine) if e.completion is not None)
    first = aborted(mine[: cut + 1], "a")
    assert first.tokens == by_hand(a)[: len(first.tokens)]
    again = mine[-1].completion
    assert sum((e.tokens for e in mine[cut + 1 :]), ()) == again.tokens == by_hand(a)
    assert (again.finish_reason, again.cached_tokens) == ("length", 0)
    assert next(e.completion for e in rest if e.id == "b" and e.completion).tokens == by_hand(
        neighbour
    )
    assert free == {g: engine.schedule.pool.free_count(g) for g in engine.spec.names}


def test_inv28_br11_seventy_two_retries_after_an_aborted_prompt(engine):
    """Each leaves half a prompt behind in blocks that the retry is given at once."""
    for i in range(72):
        a = request("a", prompt_of(130 + i, i), 3)
        engine.submit(a)
        for _ in range(1 + i % 3):
            engine.step()
        engine.abort("a")
        retry = request("a", a.prompt, 3)
        done = {}
        engine.submit(retry)
        done = [e.completion for e in engine.run() if e.completion and e.completion.tokens]
        assert [c.tokens for c in done if c.finish_reason == "length"] == [by_hand(a)], i
    assert_clean(engine)


def test_br63_abort_between_dispatch_and_result_is_an_abort(engine):
    engine.submit(request("a", prompt_of(9), 1))
    assert engine._dispatch()  # its only token is on the way
    engine.abort("a")
    events = list(engine.run())
    assert aborted(events, "a").tokens == () and len(events) == 1
    assert_clean(engine)


def test_br63_abort_of_one_that_has_ended_or_never_was_is_ignored(engine):
    run_all(engine, [request("a", prompt_of(9), 2)])
    engine.abort("a")
    engine.abort("nobody")
    assert engine.idle and engine.step() == []


def test_abort_while_waiting_for_a_row(engine):
    requests = [request(f"r{i}", prompt_of(20, i), 20) for i in range(12)]
    for r in requests:
        engine.submit(r)
    events = engine.step()
    for key in ("r11", "r6"):
        engine.abort(key)
    events += list(engine.run())
    for key in ("r11", "r6"):
        assert aborted(events, key).tokens == ()
    done = {e.id: e.completion for e in events if e.completion}
    assert all(done[r.id].tokens == by_hand(r) for r in requests if r.id not in ("r11", "r6"))


# What is refused, with nothing changed.


def refused(engine, r, kind, **fields):
    before = (engine.schedule, engine.stats.requests, dict(engine._progress), engine.backlog)
    with pytest.raises(kind) as caught:
        engine.submit(r)
    for name, value in fields.items():
        assert getattr(caught.value, name) == value
    assert before == (engine.schedule, engine.stats.requests, dict(engine._progress), engine.backlog)  # fmt: skip
    return str(caught.value)


def test_br94_an_id_in_use_is_refused_and_may_be_used_again_later(engine):
    engine.submit(request("a", prompt_of(9), 3))
    message = refused(engine, request("a", prompt_of(4), 3), RequestError, code="duplicate_id", param="id")  # fmt: skip
    assert "'a'" in message
    engine.step()
    refused(engine, request("a", prompt_of(4), 3), RequestError, code="duplicate_id")
    list(engine.run())
    again = request("a", prompt_of(4), 3)
    assert run_all(engine, [again])["a"].tokens == by_hand(again)


def test_inv08_br27_br95_a_prompt_without_room_is_refused_and_the_others_go_on(engine):
    good = [request("x", prompt_of(3), 4), request("z", prompt_of(4), 4)]
    engine.submit(good[0])
    for length in (256, 257, 5000):
        fields = {"request": "y", "need": length + 1, "capacity": 256, "unit": "tokens in a row"}
        message = refused(engine, request("y", prompt_of(length), 1), CapacityError, **fields)
        assert f"raise max_len from 256 to at least {length + 1}" in message
    done = run_all(engine, good[1:])
    assert set(done) == {"x", "z"} and all(done[r.id].tokens == by_hand(r) for r in good)


def test_br97_tokens_outside_the_vocabulary_and_empty_prompts_are_refused(engine):
    message = refused(engine, request("a", (1, VOCAB, 2)), RequestError, param="prompt")
    assert "token 13 is outside the vocabulary of 13" in message
    with pytest.raises(RequestError) as caught:
        request("a", ())
    assert caught.value.code == "empty_prompt"
    for bad in (-1, None, 1.0, "1", True, 2**31):
        with pytest.raises(RequestError, match="none negative"):
            request("a", (1, bad))


def test_stop_texts_without_a_tokenizer_are_refused(engine):
    refused(engine, request("a", (1, 2), stop=("x",)), RequestError, param="stop")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.0), ("temperature", -0.1),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"), ("top_k", -1),
        ("top_k", 1.5), ("top_p", 0), ("top_p", 1.01), ("min_p", 1), ("min_p", -0.1), ("seed", -1),
        ("seed", 2**32), ("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop_ids", [-1]),
        ("stop_ids", ["1"]), ("stop_ids", list(range(9))), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused_where_it_is_made(param, value):
    with pytest.raises(RequestError, match=param) as caught:
        request("a", (1,), **{"max_tokens": 3, param: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_value", param)


def test_models_that_the_engine_cannot_run_are_refused():
    class Attention(ToyLM):
        def groups(self):
            leaves = super().groups()[0].leaves
            return (GroupSpec("kv", "attention", 1, leaves, block_size=4),)

    with pytest.raises(SpecError, match="group 'kv' is attention"):
        Engine(Attention(), SIZES)
    with pytest.raises(SpecError, match="9 end tokens; the engine compares at most 8"):
        Engine(ToyLM(ToyConfig(eos_token_ids=tuple(range(9)))), SIZES)
    with pytest.raises(
        SpecError, match=r"a pool of 10 blocks .* needs 64; raise blocks to at least 65"
    ):
        Engine(ToyLM(ToyConfig(paged_blocks=10)), SIZES)
    for sizes in ({"rows": 0}, {"max_len": 1.5}, {"chunk_tokens": 100}, {"decode_steps": True}):
        with pytest.raises(SpecError, match=next(iter(sizes))):
            Sizes(**sizes)


# A model that breaks.


def test_br125_scores_that_are_not_finite_end_that_request_only(borrow):
    """Texts of 20 tokens break the model: at once, within a step, at its end; the neighbours go on."""
    engine = borrow(breaks_at=20)
    requests = [
        request(f"r{i}", prompt_of(n, i), 12) for i, n in enumerate((25, 20, 19, 15, 14, 5))
    ]
    fine = [request(f"f{i}", prompt_of(3, i), 10) for i in range(5)]
    done = run_all(
        engine, [x for pair in zip(requests, fine, strict=False) for x in pair] + requests[5:]
    )
    for r in requests:
        c, made = done[r.id], max(0, 20 - len(r.prompt))
        if made >= 12:
            assert c.finish_reason == "length" and c.tokens == by_hand(r)
            continue
        assert (c.finish_reason, c.tokens) == ("error", by_hand(r)[:made])
        assert (c.error.code, np.isfinite(c.logprobs).all()) == ("non_finite", True)
        assert f"position {max(20, len(r.prompt))} " in str(c.error)
    assert all((done[r.id].tokens, done[r.id].error) == (by_hand(r), None) for r in fine)


def test_br125_memory_that_breaks_ends_the_request_that_reads_it(borrow):
    """A third step after which one row's state holds NaN: its blocks come back, and the next tenant is fine."""
    engine = borrow()
    bad, good = request("bad", prompt_of(9), 30), request("good", prompt_of(12, 1), 30)
    engine.submit(bad)
    engine.submit(good)
    events = engine.step() + engine.step()
    held = engine.schedule.pool.held["bad"]
    engine._state = engine.state.replace(
        cache=engine.state.cache.poison({g: list(ids) for g, ids in held.items()})
    )
    events += list(engine.run([request("next", prompt_of(9), 30)]))
    done = {e.id: e.completion for e in events if e.completion}
    assert done["bad"].finish_reason == "error"
    assert done["bad"].tokens == by_hand(bad)[: len(done["bad"].tokens)]
    assert done["good"].tokens == by_hand(good) and done["next"].tokens == by_hand(bad)


# The loop.


def test_inv40_an_engine_that_did_nothing_is_clean(compiled, borrow):
    engine = borrow()
    assert engine.idle and engine.step() == [] and list(engine.run()) == []
    assert engine.stats.prefill_steps == engine.stats.decode_steps == 0
    assert scheduler.plan_next(engine.schedule, decode_steps=4) is None
    assert engine.stats.programs == 0 and compiled.stats.programs == 2


def test_br129_br130_br139_nothing_compiles_after_warm_up(borrow):
    """100 mixed requests of every length and setting: two programs, none made late, and sums that add up."""
    engine = borrow(eos=(5,))
    rng = np.random.default_rng(0)
    requests = [
        request(
            f"r{i}", prompt_of(1 + i * 2, i), int(rng.integers(1, 30)), stop_ids=(i % VOCAB,) * (i % 3),
            ignore_eos=i % 2 == 0, **MIXED[i % 5],
        ) for i in range(100)
    ]  # fmt: skip
    done = run_all(engine, requests)
    stats = engine.stats
    assert stats.late_compilations == 0 and stats.requests == len(done) == 100
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert stats.generated_tokens == sum(len(c.tokens) for c in done.values())
    assert 0 < stats.peak_blocks["whole"] <= 4 and 0 < stats.peak_blocks["paged"] <= 256
    assert stats.prefill_steps > 0 and stats.decode_steps > 0


def test_a_late_compilation_is_counted_and_others_are_not(borrow):
    import jax

    engine, program = borrow(), None
    engine.submit(request("a", prompt_of(9), 3))
    jax.jit(lambda x: x * 3 + 1)(np.arange(3))  # somebody else's
    program = engine._programs["prefill"]

    def compiles(*args):
        jax.jit(lambda x: x * 5 - 2)(np.arange(3))
        return program(*args)

    engine._programs = {**engine._programs, "prefill": compiles}
    list(engine.run())
    assert engine.stats.late_compilations == 1
    engine.stats.late_compilations = 0


def test_run_takes_requests_only_as_there_is_room(engine):
    taken = []

    def source():
        for i in range(60):
            taken.append(i)
            yield request(f"r{i}", prompt_of(4, i), 4)

    ended = 0
    for event in engine.run(source()):
        ended += event.completion is not None
        # Rows, a backlog of twice as many, and the steps on the way.
        assert len(taken) - ended <= 4 + 8 + 8
    assert ended == 60


def test_completions_come_in_the_order_in_which_they_end(engine):
    requests = [request("long", prompt_of(4), 30), request("short", prompt_of(5), 2)]
    assert [c.id for c in engine.completions(requests)] == ["short", "long"]


def test_inv28_random_work_with_aborts_leaves_nothing_behind(engine):
    """Submit, step and abort at random; every request ends once, rightly, and pool and tables are clean."""
    rng = np.random.default_rng(17)
    live, events, sent = {}, [], {}
    for i in range(150):
        move = rng.random()
        if move < 0.45:
            r = request(f"r{i}", prompt_of(int(rng.integers(1, 250)), i), int(rng.integers(1, 20)))
            engine.submit(r)
            live[r.id] = sent[r.id] = r
        elif move < 0.55 and live:
            engine.abort(str(rng.choice(sorted(live))))
        else:
            events += engine.step()
        for e in events:
            if e.completion:
                live.pop(e.id, None)
        engine.schedule.pool.check()
    events += list(engine.run())
    ends = [e.completion for e in events if e.completion]
    assert sorted(c.id for c in ends) == sorted(sent)
    for c in ends:
        if c.finish_reason == "aborted":
            assert c.tokens == by_hand(sent[c.id])[: len(c.tokens)]
        else:
            assert c.tokens == by_hand(sent[c.id])
    assert {c.finish_reason for c in ends} == {"aborted", "length"}


def test_an_engine_says_what_it_does(engine):
    engine.submit(request("a", prompt_of(9), 3))
    engine.step()
    assert "1 of 4 rows running" in repr(engine) and "requests=" in repr(engine)
