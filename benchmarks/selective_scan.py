"""Speed of Mamba's prefill scan beside its XLA twin, on one GPU.

    python -m benchmarks.selective_scan -o benchmarks/results/selective_scan.json
    python -m benchmarks.selective_scan --tune

Every configuration is checked first, on fresh random inputs, against a float64 loop: ragged rows, fresh, continued,
forked and null ones, checkpoints, padding; NaN in all memory that a call may not read, and the bits of every block that
it may not write. Rows cut at multiples of 64 tokens, moved and reordered must keep their bits. A configuration that
fails gets no time.

A time is that of one call in a loop on the device over two sets of inputs, in place. The floor is one exponential per
token, channel and state at 16 a clock and multiprocessor, 1.98 GHz.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic.config import ScanConfig, scan_config
from pallas_kernels.mosaic.scan import selective_scan
from pallas_kernels.rows import Rows

SIZES = {"D": 5120, "N": 16}
SHAPES = ((2048,), (8192,), (2048,) * 8)
GOALS = {(2048,): 90, (8192,): 320, (2048,) * 8: 480}
RAGGED = (3, 0, 64, 70, 1, 200, 33, 129)
TUNING = (
    ScanConfig(32, 4, 16, 8),
    ScanConfig(32, 4, 32, 8),
    ScanConfig(64, 4, 16, 4),
    ScanConfig(64, 2, 16, 4),
    ScanConfig(32, 4, 16, 4),
    ScanConfig(64, 4, 16, 8),
    ScanConfig(128, 1, 16, 4),
    ScanConfig(64, 2, 32, 4),
)


def scan(operands, config: ScanConfig | None, **changes):
    operands = {**operands, **changes}
    if config is None:
        return pallas_kernels.selective_scan(**operands, implementation="xla")
    return selective_scan(**operands, config=config)


# Checks -----------------------------------------------------------------------------------------


def truth(operands) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and pool in float64."""
    v = {
        name: np.asarray(value, np.float32).astype(np.float64)
        for name, value in operands.items()
        if name not in ("rows", "layer")
    }
    rows, layer, pool = (
        [np.asarray(part) for part in operands["rows"]],
        operands["layer"],
        v["states"],
    )
    offsets, reads, writes, points, positions = rows
    dt = np.logaddexp(0, v["dt"] + v["dt_bias"])
    gate = v["z"] / (1 + np.exp(-v["z"]))
    out, y = pool.copy(), np.zeros_like(v["x"])
    for row, write in enumerate(writes):
        h = np.zeros(pool.shape[2:]) if reads[row] == 0 else pool[layer, reads[row]]
        for t in range(offsets[row], offsets[row + 1]) if write else ():
            h = np.exp(dt[t] * v["A"].T) * h + v["B"][t][:, None] * (dt[t] * v["x"][t])
            y[t] = (v["C"][t] @ h + v["skip"] * v["x"][t]) * gate[t]
            for point, position in zip(points[row], positions[row], strict=True):
                if point and position == t - offsets[row] + 1:
                    out[layer, point] = h
            out[layer, write] = h
    return y, out


def check(config: ScanConfig | None, seed: int, dtype: str) -> dict[str, float]:
    """Largest errors as shares of the largest right value; raises ValueError if something is wrong."""
    case = Case("selective_scan", {"D": 256, "N": 16}, RAGGED, 21, 3, dtype)
    operands = make_operands(case, seed)
    run = jax.jit(lambda operands: scan(operands, config))
    y, pool = run(operands)
    right_y, right_pool = truth(operands)
    y, pool, before = (np.asarray(v, np.float32) for v in (y, pool, operands["states"]))
    rows = operands["rows"]
    alive = (np.asarray(rows.write_ids) != 0) & (np.diff(rows.offsets) > 0)
    named = np.unique(
        [*np.asarray(rows.write_ids)[alive], *np.asarray(rows.checkpoint_ids)[alive].ravel()]
    )
    named = named[named > 0]
    errors, wrong = {}, []
    for name, got, right in (
        ("y", y, right_y),
        ("states", pool[-1, named], right_pool[-1, named]),
    ):
        errors[name] = float(np.max(np.abs(got - right)) / np.max(np.abs(right)))
        bound = 2.0**-8 if name == "y" and dtype == "bfloat16" else 1e-5
        errors[name + "_rms"] = float(np.linalg.norm(got - right) / np.linalg.norm(right))
        if not errors[name] <= bound:
            wrong.append(f"{name}: error {errors[name]:.1e}")
    if np.any(y[right_y == 0] != 0):
        wrong.append("null rows or padding are not 0")
    rest = np.setdiff1d(np.arange(pool.shape[1]), named)
    if (
        pool[-1, rest].tobytes() != before[-1, rest].tobytes()
        or pool[0].tobytes() != before[0].tobytes()
    ):
        wrong.append("a block that the call does not name changed")
    if wrong:
        raise ValueError(f"{dtype}: {'; '.join(wrong)} {errors}")
    check_bits(run, operands, seed)
    return errors


def check_bits(run, operands, seed: int) -> None:
    """Raises ValueError if a cut at a multiple of 64, company or place changes a bit."""
    total, rng = 300, np.random.default_rng(seed)
    count, points = operands["rows"].checkpoint_ids.shape
    names = ("x", "dt", "z", "B", "C")
    base = {name: rng.normal(size=operands[name].shape) for name in names}
    T = len(base["x"])
    sequence = {name: base[name][:total].copy() for name in names}

    def call(pool, begin, end, place, read, write):
        length = end - begin
        mixed = {name: rng.permutation(base[name]) for name in names}
        for name in names:
            mixed[name][place : place + length] = sequence[name][begin:end]
        mixed = {name: jnp.asarray(mixed[name], operands[name].dtype) for name in names}
        offsets = np.full(count + 1, T)
        offsets[:3] = 0, place, place + length
        ids, at = np.zeros((count, points)), np.zeros((count, points))
        ids[1, :2], at[1, :2] = (9, 10), (min(128, length // 64 * 64), 37)
        other = np.zeros(count)
        other[0], other[2] = 1, 2
        reads, writes = other.copy(), other.copy()
        reads[1], writes[1] = read, write
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in (offsets, reads, writes, ids, at)))
        y, pool = run({**operands, **mixed, "rows": rows, "states": pool})
        return np.asarray(y)[place : place + length], pool

    pool = jnp.zeros(operands["states"].shape, jnp.float32)
    whole, after = call(pool, 0, total, 31, 0, 3)
    for cuts, places in (((0, 64, total), (7, T - 236)), ((0, 128, 192, total), (120, 1, T - 108))):
        again, block, changed = [], 0, pool
        for begin, end, place in zip(cuts, cuts[1:], places, strict=False):
            y, changed = call(changed, begin, end, place, block, 3)
            again.append(y)
            if end == 128 and changed[1, 3].tobytes() != after[1, 9].tobytes():
                raise ValueError("a checkpoint at 128 has other bits than the state carried there")
            if begin == 0 and changed[1, 10].tobytes() != after[1, 10].tobytes():
                raise ValueError("a checkpoint at 37 has other bits at another place")
            block = 3
        if (
            np.concatenate(again).tobytes() != whole.tobytes()
            or changed[1, 3].tobytes() != after[1, 3].tobytes()
        ):
            raise ValueError(f"cut at {cuts}, placed at {places}: other bits")


# Time -------------------------------------------------------------------------------------------


def make_inputs(tokens: int, key) -> dict[str, jax.Array]:
    D, N = SIZES["D"], SIZES["N"]
    shapes = {
        "x": (tokens, D),
        "dt": (tokens, D),
        "z": (tokens, D),
        "B": (tokens, N),
        "C": (tokens, N),
    }
    shapes |= {"skip": (D,), "dt_bias": (D,), "A": (D, N)}
    keys = jax.random.split(key, len(shapes))
    values = {
        n: jax.random.normal(k, s, jnp.bfloat16)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    return values | {"A": -jnp.exp(jax.random.normal(keys[-1], (D, N), jnp.float32))}


def prepare(config: ScanConfig | None, lengths: tuple[int, ...], calls: int):
    """Compiles a loop of `calls` calls."""
    count, tokens = len(lengths), sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    def loop(pool, ids, sets):
        none = jnp.zeros((count, 0), jnp.int32)
        rows = Rows(jnp.asarray(offsets, jnp.int32), ids, ids, none, none)

        def turn(_, pool):
            for layer, inputs in enumerate(sets):
                pool = scan(inputs, config, states=pool, layer=jnp.int32(layer), rows=rows)[1]
            return pool

        return lax.fori_loop(0, calls // 2, turn, pool)

    inputs = jax.eval_shape(lambda key: make_inputs(tokens, key), jax.random.key(0))
    pool = jax.ShapeDtypeStruct((2, 64, SIZES["N"], SIZES["D"]), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    return jax.jit(loop, donate_argnums=0).lower(pool, ids, [inputs] * 2).compile()


def seconds(program, calls: int, lengths, sets, repeats: int = 5) -> float:
    ids = jnp.asarray(np.random.default_rng(0).permutation(63)[: len(lengths)] + 1, jnp.int32)
    pool = jnp.zeros((2, 64, SIZES["N"], SIZES["D"]), jnp.float32)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        pool = jax.block_until_ready(program(pool, ids, sets))
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of Mamba's prefill scan.")
    parser.add_argument("--tune", action="store_true", help="compare configurations")
    parser.add_argument("--shapes", nargs="+", type=int, default=range(len(SHAPES)))
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="default: another every time"
    )
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("--no-xla", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing further after this long"
    )
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    begin, failed = time.perf_counter(), False
    git = ["git", "rev-parse", "--short", "HEAD"]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "seed": args.seed,
        "results": [],
    }
    print({name: report[name] for name in ("device", "jax", "commit", "seed")}, flush=True)
    checked: dict[Any, str] = {}
    for lengths in [SHAPES[n] for n in args.shapes]:
        chosen = scan_config(len(lengths), SIZES["D"], SIZES["N"], 0)
        configs = list(TUNING) if args.tune else [chosen]
        sets = [make_inputs(sum(lengths), jax.random.key(args.seed + n)) for n in range(2)]
        floor = sum(lengths) * SIZES["D"] * SIZES["N"] / (132 * 16 * 1.98e9)
        for config in [*configs, *([] if args.no_xla else [None])]:
            if time.perf_counter() - begin > args.seconds:
                print("out of time", flush=True)
                break
            result: dict[str, Any] = {"lengths": lengths, "config": str(config or "xla")}
            result |= {"floor_us": floor * 1e6, "goal_us": GOALS.get(lengths)}
            try:
                if config and config not in checked:
                    checked[config] = "failed"
                    kinds = ("bfloat16",) if len(configs) > 1 else ("bfloat16", "float32")
                    result["errors"] = {kind: check(config, args.seed, kind) for kind in kinds}
                    checked[config] = ""
                if config and checked[config]:
                    raise ValueError("wrong, so not timed")
                calls = 2 * max(2, round(0.01 / (floor * (30 if config is None else 3))))
                program = prepare(config, lengths, calls)
                result["us"] = seconds(program, calls, lengths, sets) * 1e6
                result["share"] = floor * 1e6 / result["us"]
                text = (
                    f"{result['us']:8.1f} us  floor {floor * 1e6:6.1f}  share {result['share']:.2f}"
                )
            except Exception as error:
                failed, text = True, f"NOT TIMED: {type(error).__name__}: {error}"[:600]
                result["wrong"] = text
            report["results"].append(result)
            name = f"{len(lengths)} x {lengths[0]}  {result['config']}"
            print(
                f"{time.perf_counter() - begin:5.0f} s  {name:70} {text}  {result.get('errors', '')}",
                flush=True,
            )
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
