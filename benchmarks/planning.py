"""What a step costs the host before it can be dispatched: microseconds a plan, and where they go.

    python -m benchmarks.planning -o benchmarks/results/planning.json

256 rows, all busy, 10,000 checkpoints in index and pool. A *decode* plan is one in which nobody enters or leaves; the
*mix* is a steady trace of arrivals, prompts, decode steps, ends and evictions: one of 20 stems of 1,024 tokens, 64 to
320 tokens of its own, 512 to 1,024 new ones. Every plan is timed by itself, with its check; so is the publishing of
what it left behind. A decode plan is for 16 steps of the model, a prefill plan for one. `on_cpu` is the share of the
time in which the process had a processor: if it is far from 1, something else had it, and the numbers say little.

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

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate import scheduler
from jaxstate.packing import Packing
from jaxstate.plan import PlanShape, null_plan
from jaxstate.prefix import Checkpoint
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Planned, Schedule, plan_next, publish, submit
from jaxstate.state import CacheSpec, GroupSpec

VOCAB, STEPS, PROMPT, OUTPUT = 4096, 16, 1024, 1024
PARTS = {
    "_release": "rows that leave",
    "_admit": "who enters: match, room, blocks",
    "null_plan": "empty arrays",
    "_plan_prefill": "prompt tokens, checkpoints",
    "_plan_decode": "decode steps",
    "check_plan": "the check",
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

    def step(self) -> tuple[Planned, float, float]:
        """The next step, and microseconds to plan it and to publish what it left."""
        begin = time.perf_counter()
        step = plan_next(self.schedule, decode_steps=STEPS)
        planned_at = time.perf_counter()
        assert step is not None
        self.schedule = publish(step[0], step[1].staged)
        return step[1], (planned_at - begin) * 1e6, (time.perf_counter() - planned_at) * 1e6

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
    spent, former = dict.fromkeys(PARTS, 0.0), {name: getattr(scheduler, name) for name in PARTS}

    def wrap(name: str) -> Callable:
        def wrapped(*args, **options):
            begin = time.perf_counter()
            try:
                return former[name](*args, **options)
            finally:
                spent[name] += (time.perf_counter() - begin) * 1e6

        return wrapped

    for name in PARTS:
        setattr(scheduler, name, wrap(name))
    try:
        yield spent
    finally:
        for name, function in former.items():
            setattr(scheduler, name, function)


def profile(trace: Trace, steps: int) -> dict[str, dict[str, float]]:
    """Median microseconds of each part, by kind of plan; the rest of `all` is between them."""
    seen: dict[str, dict[str, list[float]]] = {}
    for _ in range(steps):
        trace.fill_queue()
        with timed() as spent:
            planned, plan_us, _ = trace.step()
        kind = seen.setdefault(planned.kind, {})
        for name, us in {**spent, "all": plan_us}.items():
            kind.setdefault(PARTS.get(name, name), []).append(us)
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
    times: dict[str, list[float]] = {"prefill": [], "decode": [], "publish": []}
    admitted, evicted, on_cpu, passed = 0, trace.schedule.evicted, 0.0, 0.0
    for _ in range(steps):
        trace.fill_queue()
        begin, cpu = time.perf_counter(), time.thread_time()
        planned, plan_us, publish_us = trace.step()
        on_cpu += time.thread_time() - cpu
        passed += time.perf_counter() - begin
        times[planned.kind].append(plan_us)
        times["publish"].append(publish_us)
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
        "hand_over": hand_over(trace.schedule.shape), "profile": profile(trace, steps // 2),
    }  # fmt: skip
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
