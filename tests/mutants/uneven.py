"""Two ranks that finish unevenly: one stops in mid-prompt, in blocks that others had, while the other goes on."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import numpy as np

from jaxstate import programs, scheduler
from jaxstate.engine import Engine
from jaxstate.plan import null_plan
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Planned
from jaxstate.sizing import Sizes
from tests.mutants.watch import MODEL, QUICK, by_hand
from tests.toy import VOCAB

SIZES = Sizes(rows=3, max_len=160, chunk_tokens=64, decode_steps=8, checkpoints=0, data_parallel=2)
LONG = tuple(5 * i % VOCAB for i in range(100))
"""A prompt of two chunks; only the first is read before the rank falls idle."""

STEPS = 1_000


class _Pair:
    """Two ranks driven by hand: each step says which of them may do what its schedule wants."""

    def __init__(self):
        engine = self.engine = Engine(MODEL, SIZES, poison=True)
        # As on a GPU: an idle rank runs all steps of a dispatch, where a CPU leaves when no row is active.
        all_steps = functools.partial(programs.decode_step, early_exit=False)
        with mock.patch.object(programs, "decode_step", all_steps):
            lowered = {k: engine.lower(k) for k in ("prefill", "decode")}
        self.programs = {k: x.compile(compiler_options=QUICK) for k, x in lowered.items()}
        self.state, self.schedules = engine.state, list(engine.ranks.schedules)
        self.tokens: dict[str, list[int]] = {}
        self.decoded = 0

    def submit(self, rank: int, name: str, prompt: tuple[int, ...], tokens: int) -> None:
        request = Request(name, prompt, SamplingParams(max_tokens=tokens))
        self.schedules[rank] = scheduler.submit(self.schedules[rank], request)
        self.tokens[name] = []

    def step(self, rank: int) -> bool:
        """Runs the rank's next step, in which the other is idle; False when it has none."""
        step = scheduler.plan_next(self.schedules[rank], decode_steps=8)
        if step is None:
            return False
        self.schedules[rank], planned = step
        shape = self.engine.shape
        plans = [null_plan(shape, prefill=planned.kind == "prefill") for _ in range(2)]
        plans[rank] = planned.plan
        program, packed = self.programs[planned.kind], self.engine.packed(planned.kind, plans)
        self.state, outcome = program(self.engine._params, self.state, packed)
        self.decoded += 8 * (planned.kind == "decode")
        self._take(planned, jax.device_get(outcome), rank * shape.spec.rows)
        return True

    def finish(self, rank: int) -> None:
        while self.step(rank):
            pass

    def _take(self, planned: Planned, outcome: Any, first: int) -> None:
        for row, running in enumerate(planned.serves):
            if running is not None:
                made = outcome.made[:, first + row]
                self.tokens[running.request.id] += outcome.token[made, first + row].tolist()

    def share(self, rank: int) -> tuple[Any, Any]:
        """The rank's tables and rows, and its blocks, as numpy arrays."""
        state = jax.device_get(self.state)
        rows = jax.tree.map(lambda x: np.split(x, 2)[rank], (state.tables.ids, state.rows))
        return rows, jax.tree.map(lambda x: np.split(x, 2, 1)[rank], state.cache.groups)


def uneven() -> dict[str, str]:
    """Rank 0 ends two requests and begins a third in their blocks; then rank 1 goes on alone for 1,000 steps."""
    pair, symptoms = _Pair(), {}
    pair.submit(0, "left", (1, 2, 3), 4)
    pair.submit(0, "right", (4, 5, 6), 4)
    pair.step(0)
    old = pair.schedules[0].pool.held["right"]
    pair.finish(0)
    pair.submit(0, "paused", LONG, 20)
    pair.step(0)
    mine = pair.schedules[0].pool.held["paused"]
    assert all(set(old[g]) & set(mine[g]) for g in mine), "the old ids have no new owner"
    before = pair.share(0)
    for group, table in before[0][0].items():
        if table[1:].any():
            symptoms["tables"] = f"{group}: rows that nobody has name {table[1:].tolist()}"

    while pair.decoded < STEPS:
        name, prompt = f"goes on {pair.decoded}", tuple(pair.decoded % n for n in range(2, 9))
        pair.submit(1, name, prompt, 130)
        pair.finish(1)
        if tuple(pair.tokens[name]) != by_hand(prompt, 130):
            symptoms["text"] = name

    for kept, now in zip(jax.tree.leaves(before), jax.tree.leaves(pair.share(0)), strict=True):
        if kept.tobytes() != now.tobytes():
            symptoms["foreign"] = f"rank 0 was idle, and {kept.shape} {kept.dtype} changed"
    for group, ids in mine.items():
        first = jax.tree.leaves(pair.share(0)[1][group])[0][:, ids[0]]
        if not np.isfinite(first).all():
            symptoms["error"] = f"{group}: block {ids[0]} is {first.tolist()}"
    pair.finish(0)
    for name, prompt, tokens in (
        ("left", (1, 2, 3), 4),
        ("right", (4, 5, 6), 4),
        ("paused", LONG, 20),
    ):
        if tuple(pair.tokens[name]) != by_hand(prompt, tokens):
            symptoms["text"] = f"{name}: {pair.tokens[name]}"
    return symptoms
