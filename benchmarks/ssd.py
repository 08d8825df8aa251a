"""Speed of Mamba-2's prefill beside its XLA twin and its peers, on one GPU.

    python -m benchmarks.ssd -o benchmarks/results/ssd.json

The kernels are checked first, on fresh random inputs, against a float64 loop: ragged rows, fresh, continued,
forked and null ones, checkpoints, padding; NaN in all memory that a call may not read, and the bits of every block that
it may not write. Rows cut at multiples of 64 tokens, moved and reordered must keep their bits. If something is wrong
they get no time.

A time is that of one call in a loop on the device, in place, over sets of inputs that are larger together than the L2
cache. The floor is the bytes that a call must move at the speed of a pass in place, measured in the same run.
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
from benchmarks.kernels import pass_bandwidth
from benchmarks.ssd_peers import PEERS
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic.ssd_walk import ssd
from pallas_kernels.rows import Rows

H, P, G, N = 80, 64, 1, 128
SHAPES = ((2048,), (8192,), (32768,), (2048,) * 8)
GOALS = {(2048,): 60, (8192,): 150, (32768,): 520, (2048,) * 8: 220}
CHECKS = (
    Case(
        "ssd",
        {"H": 4, "P": 64, "G": 2, "N": 128},
        (3, 0, 64, 70, 1, 200, 33, 129),
        21,
        3,
        "bfloat16",
    ),
    Case(
        "ssd",
        {"H": 2, "P": 128, "G": 1, "N": 64},
        (130, 5),
        3,
        2,
        "bfloat16",
        options={"dt_limit": (0.1, 0.9)},
    ),
    Case(
        "ssd",
        {"H": 2, "P": 64, "G": 1, "N": 128},
        (128, 65),
        0,
        0,
        "bfloat16",
        absent=("skip", "dt_bias"),
    ),
)
RMS = 5e-3  # of outputs and states, whose factors the tensor cores take in bfloat16
PER_TOKEN = ("x", "dt", "B", "C")


def call(operands, variant: str, **changes):
    operands = {**operands, **changes}
    if variant == "xla":
        return pallas_kernels.ssd(**operands, implementation="xla")
    return ssd(**operands)


# Checks -----------------------------------------------------------------------------------------


def truth(operands) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and pool in float64."""
    low, high = operands.get("dt_limit", (0.0, np.inf))
    v: dict[str, Any] = {
        name: np.asarray(value, np.float32).astype(np.float64)
        for name, value in operands.items()
        if name not in ("rows", "layer", "dt_limit") and value is not None
    }
    offsets, reads, writes, points, positions = (np.asarray(part) for part in operands["rows"])
    layer, pool = operands["layer"], v["states"]
    dt = np.clip(np.logaddexp(0, v["dt"] + v.get("dt_bias", 0)), low, high)
    skip = v.get("skip", np.zeros(pool.shape[2]))[:, None]
    share = pool.shape[2] // v["B"].shape[1]
    B, C = (np.repeat(v[name], share, axis=1) for name in "BC")
    out, y = pool.copy(), np.zeros_like(v["x"])
    for row, write in enumerate(writes):
        h = np.zeros(pool.shape[2:]) if reads[row] == 0 else pool[layer, reads[row]]
        for t in range(offsets[row], offsets[row + 1]) if write else ():
            h = np.exp(dt[t] * v["A"])[:, None, None] * h
            h = h + (dt[t][:, None] * v["x"][t])[:, :, None] * B[t][:, None]
            y[t] = np.einsum("hpn,hn->hp", h, C[t]) + skip * v["x"][t]
            for point, position in zip(points[row], positions[row], strict=True):
                if point and position == t - offsets[row] + 1:
                    out[layer, point] = h
            out[layer, write] = h
    return y, out


def check_case(variant: str, case: Case, seed: int) -> dict[str, float]:
    """Errors of one call; raises ValueError if something is wrong."""
    operands = make_operands(case, seed)
    options = {name: operands.pop(name) for name in case.options}
    y, pool = jax.jit(lambda operands: call(operands, variant, **options))(operands)
    right_y, right_pool = truth({**operands, **options})
    y, pool, before = (np.asarray(v, np.float32) for v in (y, pool, operands["states"]))
    rows = operands["rows"]
    alive = (np.asarray(rows.write_ids) != 0) & (np.diff(rows.offsets) > 0)
    named = np.unique(
        [*np.asarray(rows.write_ids)[alive], *np.asarray(rows.checkpoint_ids)[alive].ravel()]
    )
    named = named[named > 0]
    errors, wrong = {}, []
    results = (("y", y, right_y), ("states", pool[-1, named], right_pool[-1, named]))
    for name, got, right in results:
        errors[name] = float(np.max(np.abs(got - right)) / np.max(np.abs(right)))
        errors[name + "_rms"] = float(np.linalg.norm(got - right) / np.linalg.norm(right))
        if not (errors[name] <= 2.0**-7 and errors[name + "_rms"] <= RMS):
            wrong.append(f"{name} is off")
    if np.any(y[right_y == 0] != 0):
        wrong.append("null rows or padding are not 0")
    rest = np.setdiff1d(np.arange(pool.shape[1]), named)
    if (
        pool[-1, rest].tobytes() != before[-1, rest].tobytes()
        or pool[0].tobytes() != before[0].tobytes()
    ):
        wrong.append("a block that the call does not name changed")
    if wrong:
        raise ValueError(f"{case.name}: {'; '.join(wrong)} {errors}")
    return errors


def check_bits(variant: str, seed: int) -> None:
    """Raises ValueError if a cut at a multiple of 64, company or place changes a bit."""
    total, tokens, rng = 300, 704, np.random.default_rng(seed)
    case = Case("ssd", {"H": 4, "P": 64, "G": 1, "N": 128}, (tokens, 0, 0), dtype="bfloat16")
    base = make_operands(case, seed)
    drawn = {name: np.asarray(base[name]) for name in PER_TOKEN}
    run = jax.jit(lambda operands: call(operands, variant))

    def part(pool, begin, end, place, read, write):
        length, mixed = end - begin, {}
        for name, values in drawn.items():
            mixed[name] = rng.permutation(values)
            mixed[name][place : place + length] = values[begin:end]
            mixed[name][place + length + 70 :] = np.nan
        offsets = (0, place, place + length, place + length + 70)
        ids = [[0, 0, 0], [10, 11, 12], [0, 0, 0]]
        at = [[0, 0, 0], [min(128, length // 64 * 64), 37, length], [0, 0, 0]]
        parts = offsets, (1, read, 0), (1, write, 2), ids, at
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in parts))
        y, pool = run({**base, **mixed, "rows": rows, "states": pool})
        return np.asarray(y)[place : place + length], pool

    pool = jnp.zeros((2, 16, 4, 64, 128), jnp.float32)
    whole, after = part(pool, 0, total, 31, 0, 3)
    if after[1, 3].tobytes() != after[1, 12].tobytes():
        raise ValueError("a checkpoint at the end has other bits than the state")
    for cuts, places in (((0, 64, total), (7, 300)), ((0, 128, 192, total), (120, 1, 333))):
        again, block, changed = [], 0, pool
        for begin, end, place in zip(cuts, cuts[1:], places, strict=False):
            y, changed = part(changed, begin, end, place, block, 3)
            again.append(y)
            if end == 128 and changed[1, 3].tobytes() != after[1, 10].tobytes():
                raise ValueError("a checkpoint at 128 has other bits than the state carried there")
            if begin == 0 and changed[1, 11].tobytes() != after[1, 11].tobytes():
                raise ValueError("a checkpoint at 37 has other bits at another place")
            block = 3
        if (
            np.concatenate(again).tobytes() != whole.tobytes()
            or changed[1, 3].tobytes() != after[1, 3].tobytes()
        ):
            raise ValueError(f"cut at {cuts}, placed at {places}: other bits")


def check(variant: str, seed: int) -> dict[str, float]:
    """The largest errors of all checks; raises ValueError if something is wrong."""
    worst: dict[str, float] = {}
    for case in CHECKS:
        for name, value in check_case(variant, case, seed).items():
            worst[name] = max(value, worst.get(name, 0.0))
    check_bits(variant, seed)
    return worst


# Time -------------------------------------------------------------------------------------------


def make_inputs(tokens: int, key) -> dict[str, jax.Array]:
    shapes = {"x": (tokens, H, P), "dt": (tokens, H), "B": (tokens, G, N), "C": (tokens, G, N)}
    shapes |= {"skip": (H,), "dt_bias": (H,), "A": (H,)}
    keys = jax.random.split(key, len(shapes))
    values = {
        n: jax.random.normal(k, s, jnp.bfloat16)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    return values | {"A": -jnp.exp(values["A"].astype(jnp.float32))}


def bytes_moved(lengths: tuple[int, ...]) -> int:
    tokens = sum(lengths)
    return 2 * tokens * (2 * H * P + H + 2 * G * N) + 2 * len(lengths) * H * P * N * 4


def seconds(
    variant: str, lengths: tuple[int, ...], calls: int, seed: int, repeats: int = 5
) -> float:
    count, tokens = len(lengths), sum(lengths)
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    none = jnp.zeros((count, 0), jnp.int32)
    sets = [make_inputs(tokens, jax.random.key(seed + n)) for n in range(max(1, 8192 // tokens))]
    one = jax.jit(
        lambda inputs, pool, layer, ids: call(
            inputs, variant, states=pool, layer=layer, rows=Rows(offsets, ids, ids, none, none)
        )
    )
    turns = -(-calls // len(sets))

    def loop(pool, ids, sets):
        def turn(_, pool):
            for n, inputs in enumerate(sets):
                _, pool = one(inputs, pool, jnp.int32(n % 2), ids)
            return pool

        return lax.fori_loop(0, turns, turn, pool)

    ids = jnp.asarray(np.random.default_rng(seed).permutation(63)[:count] + 1, jnp.int32)
    pool = jnp.zeros((2, 64, H, P, N), jnp.float32)
    program = jax.jit(loop, donate_argnums=0).lower(pool, ids, sets).compile()
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        pool = jax.block_until_ready(program(pool, ids, sets))
        times.append((time.perf_counter() - begin) / (turns * len(sets)))
    return statistics.median(times[1:])


def measure(variant: str, lengths: tuple[int, ...], floor: float, seed: int) -> float:
    """Seconds of one call. Raises ImportError for a peer that is not installed."""
    if variant in PEERS:
        return PEERS[variant](lengths, H, P, N)
    calls = max(2, round(0.02 / (floor * (40 if variant == "xla" else 4))))
    return seconds(variant, lengths, calls, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ours", action="store_true", help="without XLA twins and peers")
    parser.add_argument("--shapes", nargs="+", type=int, default=range(len(SHAPES)))
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % 2**31, help="default: another every time"
    )
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing further after this long"
    )
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    begin, failed = time.perf_counter(), False
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
    print({name: value for name, value in report.items() if name != "results"}, flush=True)
    try:
        report["errors"] = check("ours", args.seed)
    except Exception as error:
        print(f"wrong, so not timed: {type(error).__name__}: {error}"[:600])
        return 1
    print(report["errors"], flush=True)
    for lengths in [SHAPES[n] for n in args.shapes]:
        floor = bytes_moved(lengths) / bandwidth
        for variant in ("ours",) if args.ours else ("ours", "xla", *PEERS):
            if time.perf_counter() - begin > args.seconds:
                print("out of time", flush=True)
                break
            result: dict[str, Any] = {"lengths": lengths, "variant": variant}
            result |= {"floor_us": floor * 1e6, "goal_us": GOALS[lengths]}
            try:
                result["us"] = measure(variant, lengths, floor, args.seed) * 1e6
                text = f"{result['us']:8.1f} us  floor {floor * 1e6:6.1f}  goal {result['goal_us']}"
            except ImportError:
                continue
            except Exception as error:
                failed, text = True, f"NOT TIMED: {type(error).__name__}: {error}"[:600]
                result["wrong"] = text
            report["results"].append(result)
            title = f"{len(lengths)} x {lengths[0]}  {variant}"
            print(f"{time.perf_counter() - begin:5.0f} s  {title:36} {text}", flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
