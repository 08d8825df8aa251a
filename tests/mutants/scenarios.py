"""Compact runs in which each of the known faults shows; every one returns the symptoms that it saw."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate import scheduler
from jaxstate.errors import CapacityError, JaxstateError, OwnershipError
from jaxstate.plan import PlanShape, null_plan
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Schedule
from jaxstate.state import BlockPool, BlockTables, CacheSpec, GroupSpec, StateCache
from jaxstate.step import EngineState, RowState, packed_rows, prepare
from pallas_kernels import ssd
from tests.mutants.watch import MODEL, QUICK, Ended, Scene, WatchedEngine, by_hand
from tests.toy import ToyLM

Symptoms = dict[str, str]

LONG = tuple(7 * i % 13 for i in range(70))
"""A prompt of two chunks: its row is live and not decoding while others decode."""


def serve(
    programs: dict[str, Any], *, poison: bool = True, enough: set[str] | None = None
) -> Symptoms:
    """Requests come, stop, run out, are aborted and follow each other in rows and blocks."""
    start = functools.partial(WatchedEngine, programs, enough or set(), poison=poison)
    engine = start()
    # Scores of texts of seven tokens and more are NaN; that ends who gets there, and nobody else.
    breaking = start(model=ToyLM(MODEL.config, breaks_at=7))
    breaking.symptoms = engine.symptoms
    try:
        sampled = _alone(Scene(engine))
        _stopped(Scene(engine))
        _pair_then_one(Scene(engine))
        _crowd(Scene(engine), sampled)
        _aborted_and_again(Scene(engine))
        _broken(Scene(breaking))
    except Ended:
        pass
    return engine.symptoms


def _alone(scene: Scene) -> tuple[int, ...]:
    scene.submit("sampled", (5, 6, 7), 6, temperature=1.0, seed=3)
    scene.finish()
    return scene.done["sampled"].tokens


def _stopped(scene: Scene) -> None:
    """The second token ends it and is the first of two in a dispatch, so one more could leak."""
    first, second, *_ = by_hand((2, 3), 6)
    assert first != second
    scene.submit("stopped", (2, 3), 6, stop_ids=(second,))
    scene.finish()
    position = int(np.asarray(scene.engine.state.rows.position)[0])
    if position != 2 + 2 - 1:
        scene.engine.note("late", f"row 0 came to position {position}")


def _pair_then_one(scene: Scene) -> None:
    """Two end at once; the next gets the first one's row and the second one's block, whose old row then idles."""
    scene.submit("left", (1, 2, 3), 4)
    scene.submit("right", (4, 5, 6), 4)
    scene.finish()
    scene.submit("next", (7, 8), 9)
    scene.finish()


def _crowd(scene: Scene, alone: tuple[int, ...]) -> None:
    """More requests than rows: a long prompt between decode steps, and rows handed on in flight."""
    scene.submit("first", (1, 2, 3, 4, 5), 8)
    scene.submit("long", LONG, 5)
    scene.submit("sampled", (5, 6, 7), 6, temperature=1.0, seed=3)
    for i in range(4):
        scene.submit(f"waits-{i}", (i + 1, 12 - i), 3 + i)
    scene.finish()
    if scene.done["sampled"].tokens != alone:
        scene.engine.note("company", f"{scene.done['sampled'].tokens}, alone {alone}")


def _aborted_and_again(scene: Scene) -> None:
    """An abort in mid-decode; the id, and the blocks, come back in another row while old steps are in flight."""
    scene.submit("brief", (3, 1), 2)
    scene.submit("again", (9, 8, 7), 30)
    scene.steps(4)
    scene.abort("again")
    scene.submit("again", (6, 4, 2), 7)
    scene.finish()


def _broken(scene: Scene) -> None:
    scene.submit_broken("breaks", (1, 2, 3), 9, good=4)
    scene.submit("ends", (4, 5), 5)
    scene.finish()


def fork() -> Symptoms:
    """A plan that hands out block 2 and copies block 1 into it: the copy has to win over the zeroing."""
    spec = CacheSpec(MODEL.groups(), rows=2, max_len=96)
    state = EngineState.create(spec, poison=True)
    ones = {
        g.name: jax.tree.map(lambda leaf, n=g.layers: jnp.ones((n, 1, *leaf.shape), leaf.dtype), g.leaves)
        for g in spec.groups
    }  # fmt: skip
    cache = state.cache
    for group in spec.names:
        cache = cache.write(group, np.array([1]), ones[group])
    plan = null_plan(PlanShape(spec, chunk_tokens=64, copies=1), prefill=False)
    for group in spec.names:
        plan.zero[group][0] = 2
        plan.copies[group][0][0], plan.copies[group][1][0] = 1, 2
    run = jax.jit(functools.partial(prepare, poison=True), compiler_options=QUICK)
    after = run(state.replace(cache=cache), plan).cache
    symptoms = {}
    for group in spec.names:
        for leaf in jax.tree.leaves(after.read(group, np.array([1, 2]))):
            if not (np.asarray(leaf) == 1).all():
                symptoms["text"] = f"{group}: {leaf.tolist()}"
    return symptoms


MIXED = CacheSpec(
    groups=(
        GroupSpec("kv", "attention", 1, jax.ShapeDtypeStruct((2,), jnp.float32), block_size=16),
        GroupSpec("state", "recurrent", 1, jax.ShapeDtypeStruct((2,), jnp.float32), block_size=16),
    ),
    rows=20, max_len=512, context_shards=2,
)  # fmt: skip
"""The sizes at which rows were once too narrow: 257 tokens need 9 and 17 blocks, of 16 and 32 a row."""


def shards() -> Symptoms:
    """Context shards divide attention's tokens and not recurrent state; three requests, one of 257 tokens."""
    schedule = Schedule.create(PlanShape(MIXED, chunk_tokens=512))
    tables = BlockTables.empty(MIXED)
    try:
        for name, length in (("one", 17), ("long", 256), ("two", 33)):
            request = Request(name, (1,) * length, SamplingParams(max_tokens=1))
            schedule = scheduler.submit(schedule, request)
            step = scheduler.plan_next(schedule, decode_steps=1)
            assert step is not None
            schedule, planned = step
            tables = tables.update(planned.plan.clear, planned.plan.cells)
            schedule = _ahead_of_leaving(schedule)
    except CapacityError as error:
        assert (error.request, error.group, error.need) == ("long", "state", 17)
        return {"refused": str(error)}
    except JaxstateError as error:
        return {"refused": str(error)}
    symptoms = {}
    for running in schedule.running:
        for group, want in schedule.pool.held[running.request.id].items():
            row = np.asarray(tables.ids[group])[running.row]
            if tuple(row[row != 0].tolist()) != want:
                symptoms["tables"] = f"{running.request.id}, {group}: {row.tolist()}, holds {want}"
    return symptoms


def _ahead_of_leaving(schedule: Schedule) -> Schedule:
    """The same schedule with nobody about to leave, so that the tables can be compared with all three in place."""
    rows = [r.row for r in schedule.running]
    counts = schedule.counts.put(rows, budget=2)
    return dataclasses.replace(schedule, counts=counts, turn="prefill")


def values() -> Symptoms:
    """What a notebook does by hand with tables, caches and the pool: each wrong call has to be refused."""
    symptoms = {}

    def refuse(what: str, kind: type[Exception], call: Any) -> None:
        try:
            call()
        except kind:
            return
        symptoms[what] = "was accepted"

    tables = BlockTables.empty(MIXED).write(1, {"kv": range(1, 17)})
    refuse("overflow", CapacityError, lambda: tables.write(0, {"kv": range(17, 34)}))
    refuse("duplicate", OwnershipError, lambda: tables.write(0, {"kv": [3, 3]}))
    cache = StateCache.create(MIXED, poison=True)
    two = jnp.ones((1, 2, 2))
    refuse("duplicate", OwnershipError, lambda: cache.write("state", np.array([5, 5]), two))
    pool, ids = BlockPool.create(MIXED).allocate("a", {"state": 3})
    freed, _ = pool.free("a", {"state": ids["state"][:1]})
    refuse("double free", OwnershipError, lambda: freed.free("a", {"state": ids["state"][:1]}))
    refuse("foreign free", OwnershipError, lambda: pool.free("b", ids))
    refuse("null", OwnershipError, lambda: pool.free("a", {"state": [0]}))
    refuse("null", OwnershipError, lambda: pool.check_write("a", "state", [0]))
    sealed = pool.seal("a", ids)
    refuse("sealed write", OwnershipError, lambda: sealed.check_write("a", "state", ids["state"]))
    return symptoms


_PROMPT, _CHUNKS = 200, 128


def splits() -> Symptoms:
    """The bits of a 200-token prompt's state, read alone and beside another prompt that comes first."""
    alone = _scanned([("it", _PROMPT)])
    beside = _scanned([("other", 100), ("it", _PROMPT)])
    return {} if alone == beside else {"company": "the state has other bits"}


def _scanned(prompts: list[tuple[str, int]]) -> bytes:
    """Runs the planner's prefill steps through a state-space scan; the state of `it` at its prompt's end."""
    leaf = jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)
    group = GroupSpec("ssm", "recurrent", 1, leaf)
    spec = CacheSpec((group,), rows=2, max_len=256)
    schedule = Schedule.create(PlanShape(spec, chunk_tokens=_CHUNKS))
    for name, length in prompts:
        prompt = tuple(range(length))
        schedule = scheduler.submit(schedule, Request(name, prompt, SamplingParams(max_tokens=9)))
    tables, states = BlockTables.empty(spec), jnp.full((1, 3, 1, 4, 4), jnp.nan)
    while schedule.counts.reading.any() or schedule.waiting:
        step = scheduler.plan_next(schedule, decode_steps=1)
        assert step is not None
        schedule, planned = step
        tables = tables.update(planned.plan.clear, planned.plan.cells)
        prefill = planned.plan.prefill
        if prefill is not None:
            ends = jnp.asarray(prefill.starts + np.diff(prefill.offsets))
            state = EngineState(tables, StateCache({}), RowState.empty(spec))
            rows = packed_rows(spec, group, state, prefill, ends)
            states = _scan(prefill.tokens, rows, states)
    block = schedule.pool.held["it"]["ssm"][0]
    return np.asarray(states)[0, block].tobytes()


@functools.cache
def _embeddings() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"x": (_PROMPT, 1, 4), "dt": (_PROMPT, 1), "B": (_PROMPT, 1, 4), "C": (_PROMPT, 1, 4)}
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


@functools.partial(jax.jit, compiler_options=QUICK)
def _scan(tokens: Any, rows: Any, states: Any) -> Any:
    at = {name: jnp.asarray(table)[tokens] for name, table in _embeddings().items()}
    A, skip, dt_bias = -jnp.ones(1), jnp.ones(1), jnp.zeros(1)
    _, states = ssd(at["x"], at["dt"], A, at["B"], at["C"], skip, dt_bias, states, 0, rows)
    return states
