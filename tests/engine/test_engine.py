"""The engine end to end: many requests at once give what each gives by hand, and nothing is left behind."""

import itertools

import numpy as np
import pytest

from jaxstate import scheduler
from jaxstate.errors import RequestError
from tests.engine.conftest import by_hand, company, prompt_of, request, run_all
from tests.toy import VOCAB, continue_by_hand, scores_by_hand

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
