"""Products of few rows with the matrices of whole models, beside XLA's and the memory's own speed, on one GPU.

    python -m benchmarks.matmul -o benchmarks/results/h200_matmul.json
    python -m benchmarks.matmul --tune --rows 64 --matrices in_proj

Every result is checked before it is timed: against a product of float32, for NaN from what lies past an array's end,
and for bits that depend on other rows. A time is that of one product in a loop on the device over matrices that
together are larger than the L2 cache, each of which waits for the one before; what waiting costs is taken off. The
floor is the matrix, read once, over the speed of a pass in place over 4 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels import pass_bandwidth
from pallas_kernels import xla
from pallas_kernels.mosaic.batch_matmul import batch_matmul
from pallas_kernels.mosaic.config import (
    BatchMatmulConfig,
    MatmulConfig,
    batch_matmul_config,
    matmul_config,
)
from pallas_kernels.mosaic.matmul import rows_matmul


class Matrix(NamedTuple):
    """A matrix of a model, the dtype of its products, and whether they are added to a residual."""

    features: int
    inputs: int
    dtype: Any = jnp.bfloat16
    residual: bool = False


MATRICES = {
    "in_proj": Matrix(10240, 2560),  # Mamba 2.8B
    "x_proj": Matrix(192, 5120),
    "dt_proj": Matrix(5120, 160),
    "out_proj": Matrix(2560, 5120, residual=True),
    "in_proj2": Matrix(10576, 2560),  # Mamba-2 2.7B
    "head": Matrix(50280, 2560, jnp.float32),
}
ROWS = (1, 8, 64, 128, 256)


def tuning(name: str, rows: int) -> list[MatmulConfig]:
    """The configurations to compare."""
    C, n = MatmulConfig, min(64, -(-rows // 8) * 8)
    if rows > 64:
        B = BatchMatmulConfig
        return {
            "in_proj": [B(128, 160, 1, 6), B(256, 80, 1, 5)],
            "in_proj2": [B(128, 168, 1, 5), B(256, 88, 1, 5)],
            "out_proj": [B(128, 80, 2, 6), B(128, 40, 1, 8)],
            "x_proj": [B(64, 64, 8, 10), B(64, 64, 8, 6), B(128, 64, 8, 6)],
            "head": [B(128, 160, 1, 5)],
        }.get(name, [])
    if rows < 8:
        return [matmul_config(rows, *MATRICES[name][:2])]
    if n <= 32:
        return {
            "out_proj": [C(64, n, 4, 8), C(64, n, 2, 12), C(64, n, 8, 5, 2)],
            "x_proj": [C(64, n, 8, 10), C(64, n, 8, 5, 2)],
            "dt_proj": [C(64, n, 1, 1, 5)],
        }.get(name, [C(64, n, 1, 8), C(64, n, 2, 8)])
    return {
        "in_proj": [C(64, n, 1, 6), C(128, n, 2, 4), C(256, n, 4, 2)],
        "in_proj2": [C(64, n, 1, 6), C(128, n, 2, 4), C(256, n, 4, 2)],
        "out_proj": [C(64, n, 4, 6), C(128, n, 8, 4), C(128, n, 4, 8)],
        "x_proj": [C(64, 32, 8, 10), C(64, 16, 8, 10), C(64, 64, 8, 5, 2)],
        "dt_proj": [C(64, n, 1, 1, 5), C(64, 32, 1, 1, 5)],
        "head": [C(128, n, 1, 4), C(256, n, 1, 2)],
    }[name]


def chosen(name: str, rows: int) -> list[Any]:
    """What the kernels choose; nothing where they decline."""
    features, inputs, _, residual = MATRICES[name]
    if rows <= 64:
        return [matmul_config(rows, features, inputs)]
    kept = jnp.float32 if residual else None
    declined = inputs % 64 or features > 32768
    return [] if declined else [batch_matmul_config(rows, features, inputs, kept)]


def product(config: Any, matrix: Matrix) -> Callable:
    """`(x, weight, residual) -> y` of one variant."""
    if config == "xla":
        return functools.partial(xla.rows_matmul, dtype=matrix.dtype)
    if isinstance(config, BatchMatmulConfig):
        return functools.partial(batch_matmul, dtype=matrix.dtype, config=config)
    return functools.partial(rows_matmul, dtype=matrix.dtype, config=config)


def operands(matrix: Matrix, rows: int, seed: int = 0) -> tuple[jax.Array, jax.Array | None]:
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, matrix.inputs), jnp.bfloat16)
    residual = jax.random.normal(keys[1], (rows, matrix.features)) if matrix.residual else None
    return x, residual


def weights(matrix: Matrix) -> list[jax.Array]:
    """Matrices that the L2 cache does not hold together."""
    count = max(2, min(64, -(-(2**28) // (2 * matrix.features * matrix.inputs))))
    make = jax.jit(
        lambda k: 0.02 * jax.random.normal(k, (matrix.features, matrix.inputs), jnp.bfloat16)
    )
    return [make(jax.random.key(i)) for i in range(count)]


def check(call: Callable, matrix: Matrix, rows: int, weight: jax.Array) -> tuple[float, str | None]:
    """The largest error over the largest value, and what is wrong."""
    x, residual = operands(matrix, rows, 1)
    y = np.asarray(call(x, weight, residual), np.float32)
    right = np.asarray(x, np.float32) @ np.asarray(weight).astype(np.float32).T
    right = right if residual is None else right + np.asarray(residual)
    error = float(np.abs(y - right).max() / np.abs(right).max())
    if not error < (2.0**-7 if matrix.dtype == jnp.bfloat16 else 1e-5):
        return error, f"error {error:.1e}"
    own = rows // 2
    others = jnp.full_like(x, jnp.nan).at[own].set(x[own])
    alone = np.asarray(call(others, weight, residual), np.float32)[own]
    if (alone != y[own]).any():
        return error, "a row's bits depend on other rows"
    again = np.asarray(call(x, weight, residual), np.float32)
    return error, "two calls differ" if (again != y).any() else None


@dataclasses.dataclass
class Job:
    """One line of the table."""

    name: str
    rows: int
    variant: Any
    calls: int = 0
    once: Any = None
    loop: Any = None


def start(job: Job, count: int, floor: float, threads: ThreadPoolExecutor) -> None:
    """Has a job's call and the loop over it compiled in the background."""
    matrix = MATRICES[job.name]
    call = jax.jit(product(job.variant, matrix)) if job.variant != "wait" else None
    turns = max(2, int(0.01 / ((2 * floor + 3e-6) * count)))
    job.calls = turns * count

    def loop(x, weights, residual):
        def turn(_, x):
            for weight in weights:
                y = x if call is None else call(x, weight, residual)
                y = lax.optimization_barrier(y)
                seen = jnp.clip(y[0, 1], -1, 1).astype(x.dtype)
                x = lax.optimization_barrier(x.at[0, 0].set(seen))
            return x

        return lax.fori_loop(0, turns, turn, x)

    x, residual = jax.eval_shape(functools.partial(operands, matrix, job.rows))
    weight = jax.ShapeDtypeStruct((matrix.features, matrix.inputs), jnp.bfloat16)
    lowered = jax.jit(loop).lower(x, [weight] * count, residual)
    job.loop = threads.submit(lowered.compile)
    if call is not None:
        lowered_once = call.lower(x, weight, residual)
        job.once = threads.submit(lowered_once.compile)


def measure(job: Job, kept: list[jax.Array], repeats: int = 5) -> float:
    """Seconds per call, waiting included."""
    x, residual = operands(MATRICES[job.name], job.rows)
    program, times = job.loop.result(), []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(x, kept, residual))
        times.append((time.perf_counter() - begin) / job.calls)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--matrices", nargs="+", choices=tuple(MATRICES), default=tuple(MATRICES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tune", action="store_true", help="compare configurations")
    parser.add_argument("--ours", action="store_true", help="without XLA's products")
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing more after this")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    git, begin = ["git", "rev-parse", "--short", "HEAD"], time.perf_counter()
    bandwidth = pass_bandwidth()
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "pass_tb_s": bandwidth / 1e12,
        "results": [],
    }
    print(
        f"{report['device']}, jax {jax.__version__}, pass {bandwidth / 1e12:.2f} TB/s", flush=True
    )
    bad = False
    with ThreadPoolExecutor() as threads:
        for name in args.matrices:
            matrix = MATRICES[name]
            nbytes = 2 * matrix.features * matrix.inputs
            floor, kept, jobs = nbytes / bandwidth, weights(matrix), []
            for rows in args.rows:
                ours = tuning(name, rows) if args.tune else chosen(name, rows)
                for variant in ("wait", *([] if args.ours else ["xla"]), *ours):
                    jobs.append(job := Job(name, rows, variant))
                    try:
                        start(job, len(kept), floor, threads)
                    except Exception:
                        traceback.print_exc(limit=-2)
            waiting = 0.0
            for job in jobs:
                if job.loop is None or time.perf_counter() - begin > args.seconds:
                    print(f"{name} {job.rows} {job.variant} NOT RUN", flush=True)
                    continue
                result = {"matrix": name, "rows": job.rows, "variant": str(job.variant)}
                label = f"{name:9} {job.rows:4} {result['variant']:70}"
                try:
                    wrong = None
                    if job.once is not None:
                        result["error"], wrong = check(job.once.result(), matrix, job.rows, kept[0])
                    seconds = 0.0 if wrong else measure(job, kept)
                except Exception as problem:
                    wrong, seconds = f"{type(problem).__name__}: {problem}"[:300], 0.0
                if job.variant == "wait" and not wrong:
                    waiting = seconds
                    continue
                report["results"].append(result | {"wrong": wrong, "floor_us": floor * 1e6})
                if wrong:
                    bad = True
                    print(f"{label} NOT TIMED: {wrong}", flush=True)
                    continue
                seconds -= waiting
                report["results"][-1] |= {
                    "us": seconds * 1e6, "tb_s": nbytes / seconds / 1e12, "wait_us": waiting * 1e6
                }  # fmt: skip
                print(
                    f"{label} {seconds * 1e6:8.2f} us {nbytes / seconds / 1e12:5.2f} TB/s",
                    flush=True,
                )
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1) + "\n")
            del kept
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
