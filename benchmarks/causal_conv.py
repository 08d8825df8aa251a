"""Speed of the convolution of packed rows beside its XLA twin, on one GPU.

    python -m benchmarks.causal_conv -o benchmarks/results/causal_conv.json
    python -m benchmarks.causal_conv --tune

Every configuration is checked first against the reference, on fresh random inputs: ragged rows, fresh, continued,
forked and null ones, checkpoints, padding; NaN in all memory that a call may not read, and the bits of every block that
it may not write. A configuration that fails gets no time.

A time is that of one call in a loop on the device, in place, over sets of inputs larger than the L2 cache, with a state
kept after each row and no other checkpoint. Inputs are columns of a projection, as in the models. The floor is every
input and output once, at the speed of a pass over 4 GB in place.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from benchmarks.kernels import pass_bandwidth
from pallas_kernels import Columns, Rows
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic.config import CausalConvConfig, causal_conv_config
from pallas_kernels.mosaic.packed_conv import causal_conv

WIDTHS = {"Mamba-2": (5376, 5120, 10576), "Mamba": (5120, 0, 10240)}
"""Channels, and the column at which they begin, of how many."""
SHAPES = ((2048,), (8192,), (2048,) * 8, (64,) * 32)
RAGGED = (3, 0, 64, 70, 1, 200, 33, 129, 2, 31, 32)
TAPS, LAYERS, BLOCKS = 4, 4, 65
TUNING = tuple(
    CausalConvConfig(*sizes)
    for sizes in ((1, 32, 8), (2, 16, 8), (2, 32, 4), (2, 32, 8), (2, 32, 16), (2, 64, 8), (2, 64, 16),
                  (4, 16, 8), (4, 32, 4), (4, 32, 8), (8, 32, 4))
)  # fmt: skip


@functools.partial(jax.jit, static_argnames="config")
def conv(operands, config: CausalConvConfig | str):
    if isinstance(config, str):
        return pallas_kernels.causal_conv(**operands, activation="silu", implementation=config)
    return causal_conv(**operands, activation="silu", config=config)


def check(config: CausalConvConfig | str, seed: int, dtype: str) -> float:
    """Largest error as a share of the largest right value; raises ValueError if something is wrong."""
    case = Case("causal_conv", {"D": 1024, "K": TAPS}, RAGGED, 21, 3, dtype, dtype)
    operands = make_operands(case, seed)
    right, right_pool = conv(operands, "reference")
    y, pool = conv(operands, config)
    y, right = (np.asarray(v, np.float32) for v in (y, right))
    error = float(np.max(np.abs(y - right)) / np.max(np.abs(right)))
    if not error <= (2e-6 if dtype == "float32" else 2.0**-8):
        raise ValueError(f"{dtype}: error {error:.1e}")
    if np.any(y[right == 0] != 0):
        raise ValueError(f"{dtype}: null rows or padding are not 0")
    # Windows are inputs, which are copied: every bit is right.
    if np.asarray(pool).tobytes() != np.asarray(right_pool).tobytes():
        raise ValueError(f"{dtype}: a block of the pool is wrong")
    return error


def make_inputs(tokens: int, model: str, key) -> dict[str, Any]:
    channels, first, columns = WIDTHS[model]
    keys = jax.random.split(key, 3)
    shapes = {"x": (tokens, columns), "weight": (TAPS, channels), "bias": (channels,)}
    values = {
        name: jax.random.normal(k, shape, jnp.bfloat16)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {**values, "x": Columns(values["x"], first, channels)}


def input_shapes(tokens: int, model: str) -> dict[str, Any]:
    return jax.eval_shape(lambda key: make_inputs(tokens, model, key), jax.random.key(0))


def lower(config: CausalConvConfig | str, model: str, lengths: tuple[int, ...], calls: int, sets):
    """A loop of `calls` calls."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    def loop(pool, ids, sets):
        none = jnp.zeros((len(lengths), 0), jnp.int32)
        rows = Rows(jnp.asarray(offsets, jnp.int32), ids, ids, none, none)

        def turn(_, carry):
            pool, outs = carry
            # Weights of this turn, so that nothing is taken out of the loop; 0 is added.
            weight = sets[0]["weight"] + 0 * pool[0, 0, 0, 0]
            for n, inputs in enumerate(sets):
                at = {"windows": pool, "layer": jnp.int32(n % LAYERS), "rows": rows}
                outs[n], pool = conv({**inputs, **at, "weight": weight}, config)
            return pool, outs

        outs = [jnp.zeros(inputs["x"].shape, inputs["x"].dtype) for inputs in sets]
        # All of the last outputs are results, or they would not have to be made.
        return lax.fori_loop(0, calls // len(sets), turn, (pool, outs))

    pool = jax.ShapeDtypeStruct((LAYERS, BLOCKS, TAPS - 1, WIDTHS[model][0]), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((len(lengths),), jnp.int32)
    return jax.jit(loop, donate_argnums=0).lower(pool, ids, sets)


def seconds(program, model: str, calls: int, lengths, sets, repeats: int = 5) -> float:
    order = np.random.default_rng(0).permutation(BLOCKS - 1)[: len(lengths)] + 1
    ids = jnp.asarray(order, jnp.int32)
    pool = jnp.zeros((LAYERS, BLOCKS, TAPS - 1, WIDTHS[model][0]), jnp.bfloat16)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        pool, _ = jax.block_until_ready(program(pool, ids, sets))
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tune", action="store_true", help="compare configurations")
    parser.add_argument("--models", nargs="+", choices=tuple(WIDTHS), default=tuple(WIDTHS))
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="default: another every time"
    )
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    git, failed = ["git", "rev-parse", "--short", "HEAD"], False
    bandwidth = pass_bandwidth()
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "seed": args.seed,
        "pass_tb_s": bandwidth / 1e12,
        "results": [],
    }
    print({name: value for name, value in report.items() if name != "results"}, flush=True)
    checked: dict[Any, Any] = {}
    with ThreadPoolExecutor() as threads:
        jobs = []
        for model in args.models:
            channels = WIDTHS[model][0]
            fitting = [c for c in TUNING if channels % (128 * c.width) == 0]
            for lengths in SHAPES:
                tuned = args.tune and lengths == SHAPES[0]
                configs = fitting if tuned else [causal_conv_config(sum(lengths), channels)]
                floor = sum(lengths) * channels * 4 / bandwidth
                count = max(2, round(2**28 / (sum(lengths) * WIDTHS[model][2] * 2)))
                sets = [input_shapes(sum(lengths), model)] * count
                for config in [*configs, "xla"]:
                    calls = count * max(1, round(0.02 / (floor * 3 * count)))
                    program = threads.submit(lower(config, model, lengths, calls, sets).compile)
                    jobs.append((model, lengths, config, count, calls, floor, program))
        for config in dict.fromkeys(job[2] for job in jobs):
            try:
                checked[config] = {d: check(config, args.seed, d) for d in ("bfloat16", "float32")}
            except Exception as error:
                failed, checked[config] = True, f"{type(error).__name__}: {error}"[:600]
        for job in jobs:
            job[-1].exception()
        for model, lengths, config, count, calls, floor, program in jobs:
            result: dict[str, Any] = {"model": model, "lengths": lengths, "config": str(config)}
            result |= {"floor_us": floor * 1e6, "errors": checked[config]}
            text = f"NOT TIMED: {checked[config]}"
            if not isinstance(checked[config], str):
                sets = [
                    make_inputs(sum(lengths), model, jax.random.key(args.seed + n))
                    for n in range(count)
                ]
                result["us"] = seconds(program.result(), model, calls, lengths, sets) * 1e6
                result["share"] = floor * 1e6 / result["us"]
                text = (
                    f"{result['us']:8.2f} us  floor {floor * 1e6:6.2f}  share {result['share']:.2f}"
                )
            report["results"].append(result)
            print(f"{model:8} {len(lengths):3} x {lengths[0]:5}  {config!s:52} {text}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
