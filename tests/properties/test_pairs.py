"""Every pair of what can happen to a request, at once: it comes to what it comes to alone, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate import scheduler
from jaxstate.engine import Engine
from jaxstate.request import Completion, Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.mutants.watch import QUICK
from tests.properties.profile import examples
from tests.toy import VOCAB, ToyConfig, ToyLM

HAPPENINGS = (
    "hit", "chunked", "preempted", "abort elsewhere", "continuations", "null rows", "full pool", "salts",
    "next turn", "pinned",
)  # fmt: skip
SIZES = Sizes(rows=4, max_len=320, chunk_tokens=128, decode_steps=4, checkpoints=3)
STEPS = 200


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(ToyLM(ToyConfig(layers=1)), SIZES, poison=True)
    engine._programs = {
        kind: engine.lower(kind).compile(compiler_options=QUICK) for kind in ("prefill", "decode")
    }
    return engine


def _text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([9, seed]).integers(0, VOCAB, length).tolist())


def _forget(engine: Engine) -> None:
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    assert list(engine.run()) == [] and engine.idle
    for group in engine.spec.names:
        assert engine.schedule.pool.free_count(group) == engine.spec.blocks(group) - 1


def _alone(engine: Engine, request: Request) -> Completion:
    _forget(engine)
    (done,) = engine.completions([request])
    assert done.cached_tokens == 0
    _forget(engine)
    return done


class Scene:
    """One request, or several continuations of it, amid all that `happenings` says."""

    def __init__(self, engine: Engine, happenings: frozenset[str], seed: int):
        self.engine, self.has = engine, happenings.__contains__
        self.rng = np.random.default_rng([5, seed])
        self.seen: set[str] = set()
        self.done: dict[str, Completion] = {}
        length = int(
            self.rng.integers(200, 260) if self.has("chunked") else self.rng.integers(66, 120)
        )
        sampling = SamplingParams(max_tokens=9, temperature=float(seed % 2), seed=seed)
        salt = "tenant" if self.has("salts") else ""
        self.request = Request("it", _text(seed, length), sampling, cache_salt=salt)
        names = ["it/0", "it/1"] if self.has("continuations") else ["it"]
        self.asked = [dataclasses.replace(self.request, id=name) for name in names]

    def _ask(self, prompt: tuple[int, ...]) -> None:
        self.request = dataclasses.replace(self.request, prompt=prompt)
        self.asked = [dataclasses.replace(self.request, id=asked.id) for asked in self.asked]

    def run(self) -> None:
        engine, has = self.engine, self.has
        before = engine.stats.preemptions
        if has("full pool"):
            self._fill("fill", count=2)
        if has("next turn"):
            # What was asked and answered before is where it begins; 64 tokens of both together.
            before_it = dataclasses.replace(
                self.request,
                id="turn",
                prompt=self.request.prompt[:40],
                sampling=SamplingParams(max_tokens=26),
            )
            self._finish(before_it)
            engine.prefixes.settle()
            told = (*before_it.prompt, *self.done["turn"].tokens)
            self._ask((*told, *self.request.prompt[len(told) :]))
        if has("pinned"):
            engine.prefixes.pin(self.request.prompt[:64], self.request.cache_salt)
        if has("hit"):
            # Less of it when the rest is to take two steps all the same.
            stem = self.request.prompt[:80] if has("chunked") else self.request.prompt
            self._finish(dataclasses.replace(self.request, id="earlier", prompt=stem))
        if has("salts"):
            # The same prompt of another tenant: what it leaves is not for us.
            self._finish(dataclasses.replace(self.request, id="other", cache_salt="other"))
        if has("abort elsewhere"):
            engine.submit(Request("gone", _text(99, 250)))
        if not has("null rows"):
            for i in range(4 - len(self.asked)):
                engine.submit(
                    Request(f"beside {i}", _text(50 + i, 30), SamplingParams(max_tokens=6))
                )
        for request in self.asked:
            engine.submit(request)
        if has("full pool"):
            self._submit_fillers("late", 2)
        for step in range(STEPS):
            self._step(step)
            if engine.idle:
                break
        self.seen |= {"preempted"} if engine.stats.preemptions > before else set()

    def _step(self, step: int) -> None:
        engine = self.engine
        for event in engine.step():
            if event.completion is not None:
                self.done[event.id] = event.completion
        ended = engine.schedule.counts.ended
        for running in engine.schedule.running:
            if running.request.id not in {r.id for r in self.asked} or ended[running.row]:
                continue
            self.seen |= {"hit"} if running.cached else set()
            source = running.source
            self.seen |= {"next turn"} if source and source.writer.endswith("answer") else set()
            self.seen |= {"pinned"} if source and source.pinned else set()
            left = len(running.request.prompt) - running.cached
            self.seen |= {"chunked"} if left > SIZES.chunk_tokens else set()
            self.seen |= {"null rows"} if len(engine.schedule.running) < SIZES.rows else set()
            if self.has("preempted") and (step % 3 == 1 or step == 0) and step < 9:
                engine.preempt(running.request.id)
        if step == 1 and self.has("abort elsewhere"):
            engine.abort("gone")
            self.seen.add("abort elsewhere")
        pool = engine.schedule.pool
        self.seen |= {"full pool"} if not pool.free_count("whole") else set()

    def _finish(self, request: Request) -> None:
        (self.done[request.id],) = self.engine.completions([request])

    def _fill(self, name: str, count: int) -> None:
        self._submit_fillers(name, count)
        list(self.engine.run())

    def _submit_fillers(self, name: str, count: int) -> None:
        """Each leaves one state, so that there is no block left for the next without letting go of another."""
        for i in range(count):
            prompt = _text(70 + i + 10 * (name == "late"), 70)
            self.engine.submit(Request(f"{name} {i}", prompt, SamplingParams(max_tokens=4)))


def _check(engine: Engine, happenings: frozenset[str], seed: int) -> set[str]:
    _forget(engine)
    scene = Scene(engine, happenings, seed)
    scene.run()
    if "pinned" in happenings:
        engine.prefixes.unpin(scene.request.prompt[:64], scene.request.cache_salt)
    engine.prefixes.settle()
    assert engine.idle and engine.stats.late_compilations == 0
    for request in scene.asked:
        done, alone = scene.done[request.id], _alone(engine, request)
        assert done.tokens == alone.tokens and done.logprobs == alone.logprobs, (
            happenings,
            request,
        )
        assert len(done.tokens) == 9
    if "other" in scene.done:
        assert scene.done["other"].cached_tokens == 0
    if "salts" in happenings and not happenings & {"hit", "next turn", "pinned"}:
        first = scene.done[scene.asked[0].id]
        assert first.cached_tokens == 0
    engine.schedule.pool.check()
    return scene.seen | ({"continuations", "salts"} & happenings)


@pytest.mark.parametrize("pair", list(itertools.combinations(HAPPENINGS, 2)), ids=" and ".join)
def test_two_things_happen_at_once(engine, pair):
    happenings = frozenset(pair)
    assert happenings <= _check(engine, happenings, seed=len("".join(pair)))


@examples(12)
@given(st.frozensets(st.sampled_from(HAPPENINGS), min_size=3), st.integers(0, 5))
def test_any_number_of_things_happen_at_once(engine, happenings, seed):
    _check(engine, happenings, seed)
