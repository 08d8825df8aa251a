"""An engine that is looked over after every step: what of its blocks, rows and tables is not as it has to be.

A symptom is one word; `SYMPTOMS` says what each means. Nothing here raises when it finds one, so that a scenario runs
on and shows all that a fault does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.engine import Engine
from jaxstate.errors import JaxstateError
from jaxstate.request import Completion, Event, Request, SamplingParams
from jaxstate.sizing import Sizes
from jaxstate.state.cache import poison_value
from jaxstate.step import prepare
from tests.toy import ToyConfig, ToyLM, continue_by_hand

SYMPTOMS = {
    "refused": "the host refused the plan, before anything was dispatched",
    "tables": "a row nobody has is not null, or a row does not name the blocks its request holds",
    "active": "the device would generate for a row that nobody has",
    "dirty": "a block is handed out with bytes of a former tenant in some leaf",
    "foreign": "a step changed a block that no row it serves holds",
    "null": "the null block changed",
    "late": "the device went on generating after the request had ended",
    "text": "a request's tokens are not those worked out by hand",
    "company": "a sampled request draws other tokens in company than alone",
    "error": "a request ended with an error of its own, or had to and did not",
    "lost": "a request never ended",
}

MODEL = ToyLM(ToyConfig(layers=1, paged_block=32))
SIZES = Sizes(rows=3, max_len=96, chunk_tokens=64, decode_steps=2, checkpoints=0)
STEPS = 80
"""More than any scenario takes; who has not ended by then never will."""


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: the programs run for milliseconds, so optimizing them does not pay."""


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


class Ended(Exception):
    """The scenario cannot go on, because a request was lost or a plan refused, or need not."""


class WatchedEngine(Engine):
    """An engine over the toy model that collects symptoms.

    `programs` are used as far as there are any; others are compiled when they are first called, and kept there. A step
    raises `Ended` once the symptoms `enough`, if any are named, have been seen.
    """

    def __init__(
        self, programs: dict[str, Any], enough: set[str], *, poison: bool, model: ToyLM = MODEL
    ):
        super().__init__(model, SIZES, poison=poison)
        self.compiled, self.enough = programs, enough
        if "prepare" not in self.compiled:
            self.compiled["prepare"] = jax.jit(
                functools.partial(prepare, poison=poison), compiler_options=QUICK
            )
        self._programs = {k: functools.partial(self._watched, k) for k in ("prefill", "decode")}
        self.symptoms: dict[str, str] = {}

    def note(self, symptom: str, detail: str) -> None:
        """Keeps the first detail of each symptom."""
        assert symptom in SYMPTOMS
        self.symptoms.setdefault(symptom, detail)

    def _watched(self, kind: str, params: Any, state: Any, packed: Any) -> Any:
        if self.enough and self.enough <= set(self.symptoms):
            raise Ended
        plan = self._packings[kind].unpack(jnp.asarray(packed))
        prepared = self.compiled["prepare"](state, plan.replace(prefill=None))
        if kind not in self.compiled:
            lowered = self._jitted[kind].lower(params, state, packed)
            self.compiled[kind] = lowered.compile(compiler_options=QUICK)
        state, outcome = self.compiled[kind](params, state, packed)
        self._seen = _copied(prepared), _copied(state)
        return state, outcome

    def _dispatch(self, *, spare: bool = False) -> bool:
        dispatched = super()._dispatch(spare=spare)
        if dispatched:
            prepared, after = self._seen
            (planned,) = self._in_flight[-1][0].planned
            self._look_at_tables(prepared)
            self._look_at_fresh_blocks(prepared, planned.plan.admission.rows)
            self._look_at_untouched_blocks(prepared, after, planned.serves)
        return dispatched

    def _look_at_tables(self, prepared: Any) -> None:
        for group in self.spec.names:
            table, held = prepared.tables.ids[group], self.schedule.pool.held
            if (table != self.schedule.tables[group]).any():
                self.note(
                    "tables",
                    f"{group}: device {table.tolist()}, host {self.schedule.tables[group].tolist()}",
                )
            for row, running in enumerate(self.schedule.rows):
                want = held[running.request.id][group] if running is not None else ()
                if tuple(table[row][table[row] != 0].tolist()) != tuple(want):
                    self.note(
                        "tables", f"{group}: row {row} names {table[row].tolist()}, holds {want}"
                    )
                if running is None and prepared.rows.active[row]:
                    self.note("active", f"row {row}")

    def _look_at_fresh_blocks(self, prepared: Any, admitted: np.ndarray) -> None:
        for row in np.flatnonzero(admitted).tolist():
            for group, ids in self.schedule.pool.held[self.schedule.rows[row].request.id].items():
                for leaf in jax.tree.leaves(prepared.cache.groups[group]):
                    if not (leaf[:, list(ids)] == 0).all():
                        self.note("dirty", f"{group}: blocks {ids}, a leaf of {leaf.shape}")

    def _look_at_untouched_blocks(self, prepared: Any, after: Any, serves: Any) -> None:
        served = [r.request.id for r in serves if r is not None]
        for group in self.spec.names:
            mine = {b for name in served for b in self.schedule.pool.held[name].get(group, ())}
            for leaf, new in zip(
                jax.tree.leaves(prepared.cache.groups[group]), jax.tree.leaves(after.cache.groups[group]), strict=True
            ):  # fmt: skip
                for block in sorted(set(range(leaf.shape[1])) - mine):
                    if leaf[:, block].tobytes() != new[:, block].tobytes():
                        self.note(
                            "foreign" if block else "null",
                            f"{group}: block {block}, a leaf of {leaf.shape}",
                        )
                if self.poison and not is_poison(new[:, 0]):
                    self.note("null", f"{group}: {new[:, 0].tolist()}")


def is_poison(values: np.ndarray) -> bool:
    """Whether every value is the one that marks memory nobody may read."""
    value = poison_value(values.dtype)
    with np.errstate(invalid="ignore"):
        return bool((values != values).all() if value != value else (values == value).all())


def by_hand(prompt: tuple[int, ...], steps: int) -> tuple[int, ...]:
    return tuple(continue_by_hand(prompt, steps, config=MODEL.config))


class Scene:
    """Submits requests to a watched engine and compares what they come to with what it has to be."""

    def __init__(self, engine: WatchedEngine):
        self.engine = engine
        self.want: dict[str, tuple[int, ...] | None] = {}
        self.breaks: set[str] = set()
        self.streamed: dict[str, list[int]] = {}
        self.done: dict[str, Completion] = {}

    def submit(self, name: str, prompt: tuple[int, ...], tokens: int, **sampling: Any) -> None:
        """Greedy requests are to make the tokens worked out by hand, up to the first stop id."""
        want = None
        if not sampling.get("temperature"):
            want = by_hand(prompt, tokens)
            ends = [i for i, t in enumerate(want) if t in sampling.get("stop_ids", ())]
            want = want[: ends[0] + 1] if ends else want
        self.engine.submit(Request(name, prompt, SamplingParams(max_tokens=tokens, **sampling)))
        self.want[name], self.streamed[name] = want, []

    def submit_broken(self, name: str, prompt: tuple[int, ...], tokens: int, good: int) -> None:
        """A request that is to end with an error after `good` tokens, since the scores then are not finite."""
        self.submit(name, prompt, tokens)
        self.want[name] = by_hand(prompt, good)
        self.breaks.add(name)

    def abort(self, name: str) -> None:
        self.want[name] = None
        self.engine.abort(name)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._take(self._step())

    def finish(self) -> None:
        """Runs until nothing is left to do, and no further than anything takes."""
        for _ in range(STEPS):
            if self.engine.idle:
                break
            self._take(self._step())
        missing = [name for name in self.want if name not in self.done]
        if missing:
            self.engine.note("lost", f"{missing} after {STEPS} steps")
            raise Ended
        for name, want in self.want.items():
            self._compare(name, want, self.done[name])
        self.want.clear()

    def _step(self) -> list[Event]:
        try:
            return self.engine.step()
        except JaxstateError as error:
            self.engine.note("refused", str(error))
            raise Ended from error

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.completion is None or event.completion.finish_reason != "aborted":
                self.streamed[event.id] += event.tokens
                if event.completion is not None:
                    self.done[event.id] = event.completion
            elif self.want[event.id] is None:
                self.done.setdefault(event.id, event.completion)

    def _compare(self, name: str, want: tuple[int, ...] | None, got: Completion) -> None:
        if (got.finish_reason == "error") != (name in self.breaks):
            self.engine.note("error", f"{name}: {got.finish_reason}, {got.error}")
        elif want is not None and (got.tokens != want or tuple(self.streamed[name]) != want):
            self.engine.note(
                "text", f"{name}: {got.tokens}, streamed {self.streamed[name]}, want {want}"
            )
