"""Aborts at any moment: blocks return, nothing is published, and a retry gives what an undisturbed run gives."""

import pytest

from tests.engine.conftest import REUSING, assert_clean, by_hand, prompt_of, request, run_all
from tests.toy import ToyLM


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


@pytest.mark.parametrize("checkpoints", [0, REUSING.checkpoints])
def test_an_id_used_again_is_served_though_its_former_owner_breaks_in_flight(
    checkpoints, borrow, reusing
):
    """The step of the aborted request shows scores that are not finite only after the id was submitted again."""
    engine = reusing(ToyLM(breaks_at=50)) if checkpoints else borrow(breaks_at=50)
    for ahead in range(6):
        engine.submit(request("a", (1,) * 47, 20))
        for _ in range(ahead):
            engine.step()
        engine.abort("a", quiet=True)
        again = request("a", (1, 2, 3), 5)
        engine.submit(again)
        for _ in range(20):
            done = [e.completion for e in engine.step() if e.completion is not None]
            if done:
                break
        assert [c.tokens for c in done] == [by_hand(again)], ahead
        while not engine.idle:
            engine.step()
        assert_clean(engine)
