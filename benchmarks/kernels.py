"""Speed of the kernels, beside the XLA twins and the memory's own speed, on one GPU.

    python -m benchmarks.kernels -o benchmarks/results/kernels.json
    python -m benchmarks.kernels --tune ssd_step --ops ssd_step --rows 32 128

Every result is checked first, on fresh random inputs, against a float64 computation, with NaN in all memory that a call
may not read and a comparison of the bits of all blocks that it may not write. A call whose check fails gets no time.

A time is that of one call in a loop on the device, with as many calls in its body as the pool has layers, in place as
in a decode step, over blocks that change from turn to turn; the pool is much larger than the L2 cache. The floor is the
bytes that a call must move, over the speed of a pass over 4 GB in place, which reads and writes as a decode step does,
measured in the same run.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.kernel_peers import mamba_ssm_seconds
from benchmarks.kernel_trials import (
    check,
    make_inputs,
    make_trial,
    pool_dtype,
    pool_shapes,
    trial_shapes,
)
from pallas_kernels.mosaic.config import ConvConfig, SelectiveConfig, StateConfig
from pallas_kernels.mosaic.conv import conv_step
from pallas_kernels.mosaic.selective import product, selective_step
from pallas_kernels.mosaic.state import ssd_step

ROWS = {
    "ssd_step": (1, 8, 32, 128),
    "selective_step": (1, 8, 32, 128, 256),
    "low_rank_step": (1, 8, 32, 64),
    "conv_step": (1, 8, 128),
}
GOALS = {
    ("ssd_step", 1): 3, ("ssd_step", 8): 12, ("ssd_step", 32): 43, ("ssd_step", 128): 172,
    ("selective_step", 1): 2, ("selective_step", 8): 3, ("selective_step", 32): 7,
    ("selective_step", 128): 23, ("selective_step", 256): 46,
}  # fmt: skip


def tuning(op: str, rows: int) -> list[Any]:
    """The configurations to compare at one size."""
    if op == "conv_step":
        return [ConvConfig(1), ConvConfig(2), "xla"]
    if op == "selective_step":
        if rows == 1:
            shapes = (1, 1), (1, 4), (2, 4), (4, 4)
        elif rows <= 32:
            shapes = (2, 4), (4, 4), (4, 2), (4, 4, 2)
        else:
            shapes = (2, 4), (4, 4), (4, 4, 2), (4, 4, 4), (4, 2, 2)
        return [*(SelectiveConfig(*shape) for shape in shapes), "xla"]
    if op == "low_rank_step":
        few = [SelectiveConfig(1, lanes) for lanes in (8, 4)] if rows <= 8 else []
        shapes = (2, 0, 1), (4, 0, 2), (4, 2, 1), (8, 0, 4), (8, 2, 1)
        return [*few, *(SelectiveConfig(2, 4, *shape, cores=True) for shape in shapes), "apart"]
    return [StateConfig(16), StateConfig(32), StateConfig(64), "xla"]


# Calls ----------------------------------------------------------------------------------------


def make_call(op: str, variant: Any) -> Callable:
    """`(inputs, pools, layer, read_ids, write_ids) -> (y, pools)` of one variant of an op."""
    step, options = STEPS[op], {} if variant == "apart" else {"config": variant}
    if variant == "xla":
        name = "selective_step" if op == "low_rank_step" else op
        step, options = getattr(pallas_kernels, name), {"implementation": "xla"}
    if op == "conv_step":
        options["activation"] = "silu"

    def call(i, pools, *ids):
        ((name, pool),) = pools.items()
        if variant == "apart":
            i = {**i, "dt": product(i["dt"], i["dt_weight"]), "dt_weight": None}
        y, pool = step(**i, **{name: pool}, **dict(zip(IDS, ids, strict=True)), **options)
        return y, {name: pool}

    return jax.jit(call)


STEPS = {
    "conv_step": conv_step,
    "selective_step": selective_step,
    "low_rank_step": selective_step,
    "ssd_step": ssd_step,
}
IDS = ("layer", "read_ids", "write_ids")


# Time -----------------------------------------------------------------------------------------


def bytes_moved(op: str, rows: int, inputs) -> int:
    """Bytes that a call must move: inputs once, outputs once, each row's state twice."""
    total = sum(value.size * value.dtype.itemsize for value in inputs.values())
    for shape, wanted in pool_shapes(op).values():
        total += (
            2 * rows * int(np.prod(shape)) * jnp.dtype(pool_dtype(wanted, jnp.bfloat16)).itemsize
        )
    return total + inputs["x"].size * 2


def pass_bandwidth(nbytes: int = 2**32, passes: int = 10, repeats: int = 5) -> float:
    """Bytes per second of passes over one array that read and write every element in place."""

    def loop(x):
        return lax.fori_loop(0, passes, lambda _, x: x * 1.0001, x)

    step = jax.jit(loop, donate_argnums=0)
    x = jax.block_until_ready(step(jnp.ones(nbytes // 4, jnp.float32)))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        x = jax.block_until_ready(step(x))
        times.append(time.perf_counter() - begin)
    return 2 * nbytes * passes / min(times)


@dataclasses.dataclass
class Job:
    """One line of the table: its call, and the loop over calls being compiled."""

    op: str
    rows: int
    variant: Any
    calls: int = 0
    loop: Future | None = None
    once: list[Future] = dataclasses.field(default_factory=list)
    error: Exception | None = None


def loop_shape(op: str, rows: int) -> tuple[int, int]:
    """Layers and blocks of the pool that a loop runs over: a few GB at most."""
    if op == "conv_step":
        return 32, 1025
    blocks = max(33, rows + 1)
    return (max(8, min(32, 1056 // blocks)) if op == "ssd_step" else 32), blocks


def input_shapes(op: str, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda key: make_inputs(op, rows, jnp.bfloat16, key), jax.random.key(0))


def spread(inputs: dict[str, Any], layers: int) -> dict[str, Any]:
    """The inputs of a loop: a matrix for each layer, so that none stays in the cache."""
    matrix = inputs.get("dt_weight")
    if matrix is None:
        return inputs
    make = jax.jit(lambda matrix: tuple(jnp.roll(matrix, n) for n in range(layers)))
    return inputs | {"dt_weight": make(matrix)}


def of_layer(inputs: dict[str, Any], layer: int) -> dict[str, Any]:
    """The inputs of a loop's call."""
    return {name: v[layer] if isinstance(v, tuple) else v for name, v in inputs.items()}


def make_pools(op: str, rows: int) -> dict[str, jax.Array]:
    layers, blocks = loop_shape(op, rows)
    return {
        name: jax.random.normal(
            jax.random.key(n), (layers, blocks, *shape), pool_dtype(wanted, jnp.bfloat16)
        )
        for n, (name, (shape, wanted)) in enumerate(pool_shapes(op).items())
    }


def trials_of(job: Job) -> list[tuple[int, Any]]:
    """Rows and dtype of the calls that a job is checked with."""
    if job.op == "low_rank_step":  # the last program has too few rows
        return [(job.rows, jnp.bfloat16), (max(job.rows - 3, 11), jnp.bfloat16)]
    return [(max(job.rows, 8), jnp.bfloat16), (8, jnp.float32)]


def start(job: Job, floor: float, threads: ThreadPoolExecutor) -> None:
    """Lowers a job's call and the loop over it, and has both compiled in the background."""
    layers, blocks = loop_shape(job.op, job.rows)
    guess = (20 if job.variant == "xla" else 1) * floor + 3e-6
    # A turn is one CUDA graph; long ones hide that a graph takes a few microseconds to start.
    rounds = max(1, 64 // layers) if guess < 2e-5 else 1
    turns = max(-(-200 // (layers * rounds)), int(0.02 / (guess * layers * rounds)))
    job.calls, call = turns * rounds * layers, make_call(job.op, job.variant)

    def loop(pools, inputs, ids):
        def turn(_, carry):
            (pools, ids), every = carry, dict(inputs)
            for step in range(rounds * layers):
                if step % layers == 0:
                    ids = 1 + (ids + 6) % (blocks - 1)
                layer = step % layers
                own = of_layer(every, layer)
                y, pools = call(own, pools, jnp.int32(layer), ids, ids)
                if "dt_weight" in every:  # so that no product is done ahead or once for many calls
                    every["dt"], _ = lax.optimization_barrier((every["dt"], y))
            return pools, ids

        return lax.fori_loop(0, turns, turn, (pools, ids))[0]

    inputs = jax.eval_shape(lambda i: spread(i, layers), input_shapes(job.op, job.rows))
    pools = jax.eval_shape(lambda: make_pools(job.op, job.rows))
    ids = jax.ShapeDtypeStruct((job.rows,), jnp.int32)
    try:
        lowered = jax.jit(loop, donate_argnums=0).lower(pools, inputs, ids)
        job.loop = threads.submit(lowered.compile)
        for rows, dtype in trials_of(job):
            lowered = call.lower(*trial_shapes(job.op, rows, dtype))
            job.once.append(threads.submit(lowered.compile))
    except Exception as error:  # one variant must not stop the others
        job.error = error


def time_loop(job: Job, pools, inputs, repeats: int = 5) -> tuple[float, Any]:
    """Seconds per call, the median of `repeats` runs after one more, and the pools."""
    assert job.loop is not None
    program, blocks = job.loop.result(), loop_shape(job.op, job.rows)[1]
    order = np.random.default_rng(0).permutation(blocks - 1)[: job.rows] + 1
    ids = jnp.asarray(order, jnp.int32)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        pools = jax.block_until_ready(program(pools, inputs, ids))
        times.append((time.perf_counter() - begin) / job.calls)
    return statistics.median(times[1:]), pools


def measure(jobs: list[Job], bandwidth: float, seed: int, peers: bool) -> Iterator[dict[str, Any]]:
    """Lines of the table for jobs of one op at one batch size."""
    op, rows = jobs[0].op, jobs[0].rows
    trials = [make_trial(op, *kind, seed + n) for n, kind in enumerate(trials_of(jobs[0]))]
    inputs, pools = make_inputs(op, rows, jnp.bfloat16, jax.random.key(seed)), None
    floor = bytes_moved(op, rows, inputs) / bandwidth
    for job in jobs:
        result: dict[str, Any] = {"op": op, "rows": rows, "variant": str(job.variant or "ours")}
        result |= {"floor_us": floor * 1e6, "goal_us": GOALS.get((op, rows)), "wrong": []}
        try:
            if job.error:
                raise job.error
            for once, trial in zip(job.once, trials, strict=True):
                errors, wrong = check(once.result(), trial)
                result.setdefault("errors", []).append(errors)
                result["wrong"] += wrong
            if not result["wrong"]:
                pools = pools or jax.jit(make_pools, static_argnums=(0, 1))(op, rows)
                own = spread(inputs, loop_shape(op, rows)[0])
                seconds, pools = time_loop(job, pools, own)
                result |= {"us": seconds * 1e6, "share": floor / seconds}
        except Exception as error:
            result["wrong"].append(f"{type(error).__name__}: {error}"[:500])
            pools = None
        yield result
    if peers and op in ("ssd_step", "selective_step"):
        del pools, trials
        result = {"op": op, "rows": rows, "variant": "mamba_ssm", "floor_us": floor * 1e6}
        result |= {"goal_us": None, "wrong": []}
        try:
            peer = mamba_ssm_seconds(op, rows, *loop_shape(op, rows))
            yield result | {"us": peer * 1e6, "share": floor / peer}
        except ImportError:
            pass
        except Exception as error:
            yield result | {"wrong": [f"{type(error).__name__}: {error}"[:500]]}


def show(result: dict[str, Any]) -> str:
    name = f"{result['op']:15} {result['rows']:4}  {result['variant']:48}"
    if result["wrong"]:
        return f"{name} NOT TIMED: {'; '.join(result['wrong'])[:300]}"
    goal = f"goal {result['goal_us']}" if result["goal_us"] else ""
    return f"{name} {result['us']:8.2f} us  floor {result['floor_us']:7.2f}  share {result['share']:.2f}  {goal}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument(
        "--rows", nargs="+", type=int, help="batch sizes; default: those of each op"
    )
    parser.add_argument(
        "--tune", nargs="+", choices=tuple(ROWS), default=(), help="compare configurations of these"
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="default: another every time"
    )
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--ours", action="store_true", help="without XLA twins and peers")
    parser.add_argument("--seconds", type=float, help="start no further size after this long")
    args = parser.parse_args()
    begin = time.perf_counter()
    git = ["git", "rev-parse", "--short", "HEAD"]
    bandwidth = pass_bandwidth()
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "seed": args.seed,
        "pass_tb_s": bandwidth / 1e12,
        "results": [],
    }
    print(
        f"{report['device']}, jax {jax.__version__}, in-place pass {bandwidth / 1e12:.2f} TB/s, seed {args.seed}",
        flush=True,
    )
    with ThreadPoolExecutor() as threads:
        groups = []
        for op in args.ops:
            for rows in args.rows or ROWS[op]:
                plain = [None, "xla", *(["apart"] if op == "low_rank_step" else [])]
                variants = tuning(op, rows) if op in args.tune else plain
                variants = [v for v in variants if v != "xla" or not args.ours]
                groups.append([Job(op, rows, variant) for variant in variants])

        def start_group(group: list[Job]) -> None:
            op, rows = group[0].op, group[0].rows
            floor = bytes_moved(op, rows, input_shapes(op, rows)) / bandwidth
            for job in group:
                start(job, floor, threads)

        start_group(groups[0])
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            if following:  # compiles while this one runs
                start_group(following)
            if args.seconds and time.perf_counter() - begin > args.seconds:
                print(f"out of time before {group[0].op} {group[0].rows}", flush=True)
                break
            for result in measure(group, bandwidth, args.seed, not args.ours):
                report["results"].append(result)
                print(show(result), flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(result["wrong"] for result in report["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
