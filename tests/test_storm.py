"""Retries in a storm: workers that share a long prefix are aborted while they read it and come back at once.

Their states are reused, evicted for want of blocks, discarded with their writer and taken away by preemption; every
output has to have the bits of the same request alone in an engine that reuses nothing.
"""

import chex
import numpy as np
import pytest

import jaxstate as js
from jaxstate import scheduler
from jaxstate.lm import DEMO
from tests.long import WANTED

WORKERS, CYCLES = 8, 9
COMFORTABLE = 12
"""Checkpoints for everybody: the prefix's rungs and every worker's last."""

SOLO = js.Sizes(rows=8, max_len=8192, chunk_tokens=256, decode_steps=8, checkpoints=0)
STORM = js.Sizes(
    rows=8, max_len=8192, chunk_tokens=256, decode_steps=8, checkpoints=COMFORTABLE // 2
)

# The suite reads 512 shared tokens; 4,096 take some minutes on two cores.
PREFIXES = (512, 1024, 4096) if WANTED else (512,)


def _requests(prefix: int, vocab: int) -> list[js.Request]:
    rng = np.random.default_rng(72)
    stem = tuple(rng.integers(1, vocab, prefix).tolist())
    return [
        js.Request(
            f"worker {i}",
            (*stem, *rng.integers(1, vocab, int(rng.integers(40, 200))).tolist()),
            js.SamplingParams(
                max_tokens=int(rng.integers(4, 24)), temperature=(i % 3) / 2, seed=i, ignore_eos=True
            ),
        )
        for i in range(WORKERS)
    ]  # fmt: skip


class Storm:
    """Drives the engine step by step; every cycle of a worker is aborted once before its first token."""

    def __init__(self, engine: js.Engine, requests: list[js.Request]):
        self.engine, self.requests = engine, {r.id: r for r in requests}
        self.rng = np.random.default_rng(7)
        self.done: dict[str, list[js.Completion]] = {name: [] for name in self.requests}
        self.calm: set[str] = set()  # retried already in this cycle
        self.answered: set[str] = set()  # has tokens
        self.retries = self.aborted = 0
        self.midway = 0  # aborted with a part of the prompt not even planned

    def run(self) -> None:
        for request in self.requests.values():
            self.engine.submit(request)
        while not self.engine.idle:
            for event in self.engine.step():
                self._hear(event)
            self._abort_and_retry()
            if self.rng.random() < 0.4:
                self._preempt()

    def _hear(self, event: js.Event) -> None:
        done = event.completion
        if done is not None and done.finish_reason == "aborted":
            self.aborted += 1
        elif done is not None:
            self.done[event.id].append(done)
            self.answered.discard(event.id)
            self.calm.discard(event.id)
            if len(self.done[event.id]) < CYCLES:
                self.engine.submit(self.requests[event.id])
        elif event.tokens:
            self.answered.add(event.id)

    def _abort_and_retry(self) -> None:
        for running in self.engine.schedule.running:
            name = running.request.id
            row, counts = running.row, self.engine.schedule.counts
            # What is read ahead is nobody's request.
            if counts.ended[row] or name not in self.requests.keys() - self.calm - self.answered:
                continue
            if counts.read[row] > running.cached:
                self.midway += int(counts.reading[row])
                self.engine.abort(name)
                self.engine.submit(self.requests[name])
                self.calm.add(name)
                self.retries += 1

    def _preempt(self) -> None:
        leaving = self.engine.schedule.counts.leaving
        running = [r for r in self.engine.schedule.running if not leaving[r.row]]
        if running:
            self.engine.preempt(running[self.rng.integers(len(running))].request.id)


@pytest.fixture(scope="module")
def engines():
    with js.LM.load(DEMO, sizes=SOLO, poison=True) as solo:
        storm = js.Engine(solo.model, STORM, tokenizer=solo.tokenizer, poison=True)
        yield solo.engine, storm


@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_br42_72_retries_at_half_the_pool_are_bit_equal_to_solo_runs(engines, prefix):
    solo, engine = engines
    requests = _requests(prefix, solo.model.config.vocab_size)
    storm = Storm(engine, requests)
    storm.run()
    assert storm.retries == storm.aborted == WORKERS * CYCLES and storm.midway > 4
    for request in requests:
        (alone,) = solo.completions([request])
        assert alone.cached_tokens == 0 and len(storm.done[request.id]) == CYCLES
        for done in storm.done[request.id]:
            assert done.finish_reason == "length"
            assert done.tokens == alone.tokens, request
            assert done.logprobs == alone.logprobs, request
    stats, schedule = engine.stats, engine.schedule
    assert (
        stats.preemptions > CYCLES and stats.prefix["hit"] > WORKERS and schedule.evicted > WORKERS
    )
    assert stats.late_compilations == 0
    _assert_as_new(engine)


@pytest.mark.timeout(900)
def test_turns_of_a_conversation_start_after_the_answers_and_keep_their_bits(engines):
    """The second turn is served the first one's prompt and its completion, up to the last whole 64 tokens."""
    solo, engine = engines
    rng = np.random.default_rng(3)
    told = tuple(rng.integers(1, solo.model.config.vocab_size, 100).tolist())
    sampling = js.SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)
    for turn, cached in enumerate((0, 128, 192)):
        request = js.Request("talk", told, sampling)
        (done,) = engine.completions([request])
        assert done.cached_tokens == cached == (len(told) - 20) // 64 * 64 * (turn > 0)
        (alone,) = solo.completions([request])
        assert done.tokens == alone.tokens and done.logprobs == alone.logprobs
        assert engine.prefixes.unsettled
        engine.prefixes.settle()
        told = (*told, *done.tokens, *rng.integers(1, 999, 20).tolist())
    assert engine.stats.late_compilations == 0
    _assert_as_new(engine)


def _assert_as_new(engine):
    """Every block is free or a visible checkpoint's, nothing is staged, every row is null."""
    assert engine.idle and not engine.schedule.staged
    engine.schedule.pool.check()
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    assert list(engine.run()) == []
    for group in engine.spec.names:
        assert engine.schedule.pool.free_count(group) == engine.spec.blocks(group) - 1
        table = np.asarray(engine.state.tables.ids[group])
        chex.assert_trees_all_equal(table, np.zeros_like(table))
