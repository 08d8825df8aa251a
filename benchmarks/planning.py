"""What a step costs the host before it can be dispatched: microseconds a plan, and where they go.

    python -m benchmarks.planning -o benchmarks/results/planning.json

256 rows, all busy, 10,000 checkpoints in index and pool. A *decode* plan is one in which nobody enters or leaves; the
*mix* is a steady trace of arrivals, prompts, decode steps, ends and evictions: one of 20 stems of 1,024 tokens, 64 to
320 tokens of its own, 512 to 1,024 new ones. Every plan is timed by itself, with its check. So is all else that the
host does for a step but calling the device: `submit` (of one request), `pack` (the plan as one array), `publish` (what
the step left, and giving back the memory of what has gone) and, in steps after these, `observe` (a step's tokens to
the requests that made them, 16 each in a decode step; without text). A decode plan is for 16 steps of the model, a
prefill plan for one. `on_cpu` is the share of the time in which the process had a processor: if it is far from 1,
something else had it, and the numbers say little.

`hand_over` is what a call costs that is given a plan: its arrays as they are, or packed in one, with the packing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate import scheduler
from jaxstate.packing import Packing
from jaxstate.page import Page
from jaxstate.plan import PlanShape, null_plan
from jaxstate.prefix import Checkpoint
from jaxstate.progress import Progress
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Planned, Schedule, plan_next, publish, submit
from jaxstate.state import CacheSpec, GroupSpec
from jaxstate.step import Outcome

VOCAB, STEPS, PROMPT, OUTPUT = 4096, 16, 1024, 1024
PARTS: dict[str, tuple[Any, str]] = {
    "rows that leave": (scheduler, "_release"),
    "who enters: match, room, blocks": (scheduler, "admit"),
    "who reads what, checkpoints": (scheduler, "_plan_prefill"),
    "decode steps": (scheduler, "_plan_decode"),
    "arrays": (Page, "plan"),
    "the check": (scheduler, "check_plan"),
}


def full_schedule(rows: int, nodes: int, rng: np.random.Generator) -> Schedule:
    """A schedule with so many checkpoints, no block to spare and every row free."""
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32)
    group = GroupSpec("state", "recurrent", 1, leaf, blocks=rows + nodes + 1)
    spec = CacheSpec((group,), rows=rows, max_len=131_072)
    shape = PlanShape(spec, chunk_tokens=2048, decode_steps=STEPS, checkpoints=4)
    schedule = Schedule.create(shape)
    ledger, index = schedule.pool.open(), schedule.index
    for i in range(nodes):
        holder = f"\x00checkpoint {i}"
        ids = ledger.allocate(holder, {"state": 1})
        ledger.seal(holder, ids)
        blocks, cost = {"state": ids["state"][0]}, int(rng.integers(64, 2048))
        index = index.insert(Checkpoint(rng.bytes(16), 64, blocks, holder, "before", cost))
    return dataclasses.replace(schedule, pool=ledger.close(), index=index)


class Trace:
    """Requests over 20 shared stems; eight wait at any time."""

    def __init__(self, rows: int, nodes: int):
        self.rng = np.random.default_rng(0)
        self.schedule, self.sent = full_schedule(rows, nodes, self.rng), 0
        self.stems = [self._text(PROMPT) for _ in range(20)]
        self.submit_us: list[float] = []
        self.progress: dict[str, Progress] = {}
        shape = self.schedule.shape
        self.packings = {
            kind: Packing.of(shape, prefill=kind == "prefill", poison=False)
            for kind in ("prefill", "decode")
        }

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, VOCAB, length).tolist())

    def fill_queue(self) -> None:
        while len(self.schedule.waiting) < 8:
            stem = self.stems[min(int(self.rng.zipf(1.5)), 20) - 1]
            most = int(self.rng.integers(OUTPUT // 2, OUTPUT))
            request = Request(
                f"r{self.sent}",
                stem + self._text(int(self.rng.integers(64, 320))),
                SamplingParams(max_tokens=most),
            )
            begin = time.perf_counter()
            self.schedule = submit(self.schedule, request)
            self.submit_us.append((time.perf_counter() - begin) * 1e6)
            self.sent += 1

    def step(self) -> tuple[Planned, dict[str, float]]:
        """The next step, and microseconds of each thing that the host does for it."""
        begin = time.perf_counter()
        step = plan_next(self.schedule, decode_steps=STEPS)
        planned_at = time.perf_counter()
        assert step is not None
        planned = step[1]
        self.packings[planned.kind].pack([planned.plan])
        packed_at = time.perf_counter()
        self.schedule = publish(step[0], planned.staged)
        published_at = time.perf_counter()
        times = {"plan": planned_at - begin, "pack": packed_at - planned_at}
        times |= {"publish": published_at - packed_at}
        return planned, {name: seconds * 1e6 for name, seconds in times.items()}

    def observe(self, planned: Planned) -> float:
        """Microseconds to give the step's tokens to whom they belong."""
        rows, at, steps = len(planned.serves), planned.at.tolist(), STEPS
        made = np.zeros((1 if planned.kind == "prefill" else STEPS, rows), bool)
        for row, running in enumerate(planned.serves):
            if planned.plan.prefill is not None:
                made[0, row] = planned.plan.prefill.sample[row]
            elif running is not None:
                made[: min(steps, running.budget - at[row]), row] = True
            if running is not None and running.request.id not in self.progress:
                progress = Progress.start(running.request, running.budget, (), None)
                progress.tokens, progress.logprobs = [0] * at[row], [0.0] * at[row]
                self.progress[running.request.id] = progress
        numbers = np.arange(made.size, dtype=np.int32).reshape(made.shape)
        outcome = Outcome(numbers, -numbers.astype(np.float32), made, np.zeros_like(made))
        begin = time.perf_counter()
        for row, (tokens, logprobs) in enumerate(outcome.by_row()):
            running = planned.serves[row]
            if running is not None and tokens:
                event = self.progress[running.request.id].push(tokens, logprobs, at[row])
                if event.completion is not None:
                    del self.progress[running.request.id]
        return (time.perf_counter() - begin) * 1e6

    def warm_up(self) -> None:
        """Until every row is busy and requests end as fast as they come."""
        for _ in range(400):
            self.fill_queue()
            self.step()


def summary(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {
        "plans": len(times), "fastest_us": times[0], "median_us": statistics.median(times),
        "p90_us": times[len(times) * 9 // 10], "slowest_us": times[-1],
    }  # fmt: skip


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Microseconds that the plans made meanwhile spend in each of `PARTS`, summed."""
    spent = dict.fromkeys(PARTS, 0.0)
    former = {part: getattr(*place) for part, place in PARTS.items()}

    def wrap(part: str) -> Callable:
        def wrapped(*args, **options):
            begin = time.perf_counter()
            try:
                return former[part](*args, **options)
            finally:
                spent[part] += (time.perf_counter() - begin) * 1e6

        return wrapped

    for part, place in PARTS.items():
        setattr(*place, wrap(part))
    try:
        yield spent
    finally:
        for part, function in former.items():
            setattr(*PARTS[part], function)


def profile(trace: Trace, steps: int) -> dict[str, dict[str, float]]:
    """Median microseconds of each part, by kind of plan; the rest of `all` is between them."""
    seen: dict[str, dict[str, list[float]]] = {}
    for _ in range(steps):
        trace.fill_queue()
        with timed() as spent:
            planned, times = trace.step()
        kind = seen.setdefault(planned.kind, {})
        for name, us in {**spent, "all": times["plan"]}.items():
            kind.setdefault(name, []).append(us)
    return {
        kind: {part: statistics.median(us) for part, us in parts.items()}
        for kind, parts in seen.items()
    }


def hand_over(shape: PlanShape, calls: int = 500) -> dict[str, dict[str, float]]:
    """Median microseconds of a call of a program that looks at every number of a plan, and of packing."""
    out = {}

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            made = call()
            times.append((time.perf_counter() - begin) * 1e6)
            jax.block_until_ready(made)
        return statistics.median(times[calls // 10 :])

    for kind in ("prefill", "decode"):
        plan = null_plan(shape, prefill=kind == "prefill")
        packing = Packing.of(shape, prefill=kind == "prefill", poison=False)
        packed = packing.pack([plan])

        def look(plan):
            return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(plan))

        apart, one = jax.jit(look), jax.jit(lambda p, packing=packing: look(packing.unpack(p)))
        out[kind] = {
            "arrays": len(jax.tree.leaves(plan)),
            "apart_us": median(functools.partial(apart, plan)),
            "packed_us": median(functools.partial(one, packed)),
            "packing_us": median(functools.partial(packing.pack, [plan])),
        }
    return out


def measure(rows: int = 256, nodes: int = 10_000, steps: int = 600) -> dict:
    """Plans by kind of step, decode plans of rows that stay, and a profile."""
    trace = Trace(rows, nodes)
    trace.warm_up()
    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    others: dict[str, list[float]] = {}
    admitted, evicted, on_cpu, passed = 0, trace.schedule.evicted, 0.0, 0.0
    for _ in range(steps):
        trace.fill_queue()
        begin, cpu = time.perf_counter(), time.thread_time()
        planned, step_us = trace.step()
        on_cpu += time.thread_time() - cpu
        passed += time.perf_counter() - begin
        times[planned.kind].append(step_us.pop("plan"))
        for name, us in step_us.items():
            others.setdefault(f"{name}, {planned.kind}", []).append(us)
        admitted += int(planned.plan.admission.rows.sum())
    mix = {kind: summary(seen) for kind, seen in times.items()}
    mix["all plans"] = summary(times["prefill"] + times["decode"])
    model_steps = len(times["prefill"]) + STEPS * len(times["decode"])
    spent = sum(times["prefill"] + times["decode"])
    mix["submit"] = summary(trace.submit_us)
    out = {
        "rows": rows, "nodes": nodes, "running": len(trace.schedule.running), "admitted": admitted,
        "evicted": trace.schedule.evicted - evicted, "mix": mix,
        "on_cpu": on_cpu / passed, "mean_us_per_model_step": spent / model_steps,
        "hand_over": hand_over(trace.schedule.shape),
        "profile": profile(trace, steps // 2),
    }  # fmt: skip
    # By themselves: they take so long that plans between them would find every cache of the processor cold.
    for _ in range(steps // 4):
        trace.fill_queue()
        planned, _ = trace.step()
        others.setdefault(f"observe, {planned.kind}", []).append(trace.observe(planned))
    mix |= {name: summary(seen) for name, seen in sorted(others.items())}
    # Nobody waits and nobody is near an end: the plan that most steps of long answers have.
    counts = trace.schedule.counts
    counts = counts.put(slice(None), budget=counts.budget * 1000)
    calm = dataclasses.replace(trace.schedule, waiting=(), counts=counts)
    while calm.counts.reading.any() or calm.counts.leaving.any():
        calm = plan_next(calm, decode_steps=STEPS)[0]  # type: ignore[index]
    times["decode"] = []
    for _ in range(steps):
        begin = time.perf_counter()
        step = plan_next(calm, decode_steps=STEPS)
        times["decode"].append((time.perf_counter() - begin) * 1e6)
        assert step is not None and step[1].kind == "decode"
        calm = step[0]
    return {**out, "decode": summary(times["decode"])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="a file for the results, JSON")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=10_000, help="checkpoints in the index")
    parser.add_argument("--steps", type=int, default=600, help="plans to time")
    args = parser.parse_args()
    versions = {
        "python": platform.python_version(),
        "cpu": platform.machine(),
        "numpy": np.__version__,
    }
    results = {**versions, **measure(args.rows, args.nodes, args.steps)}
    text = json.dumps(results, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
