"""How the prefill kernels are checked and timed: what `benchmarks.ssd` and `benchmarks.selective_scan` share.

Before it is timed a variant is checked on fresh random inputs against a float64 loop: ragged rows, fresh, continued,
forked and null ones, checkpoints, padding; NaN in all memory that a call may not read, and the bits of every block that
it may not write. Rows cut at multiples of 64 tokens, moved and reordered must keep their bits. A variant that fails
gets no time.

A time is that of one call in a loop on the device, in place, over sets of inputs that are larger together than the L2
cache.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cases import Case, make_operands
from pallas_kernels.rows import Rows

XLA = "xla"  # the variant that is our portable twin, which the tests check
THREADS = ThreadPoolExecutor(8)
COMPILING: list[Future] = []
PER_TOKEN = ("x", "dt", "z", "B", "C")
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Prefill:
    """An op and everything that its checks and times need."""

    call: Callable[..., tuple[Any, Any]]  # (operands, variant, **options) -> (y, pool)
    step: Callable[..., tuple[Any, Any]]  # (float64 operands, state, token) -> (state, output)
    make_inputs: Callable[[int, jax.Array], dict[str, jax.Array]]  # of so many tokens
    shapes: tuple[Lengths, ...]
    goals: Mapping[Lengths, float]  # µs
    floor: Callable[[Lengths], float]  # seconds
    block: tuple[int, ...]  # shape of a state
    chosen: Callable[[Lengths], Any]  # the variant that a call takes by itself
    tuning: tuple[Any, ...]  # those that it is compared with
    small: Callable[[Any], Any]  # the same code as a variant's, in the sizes of the checks
    cases: tuple[Case, ...]
    one_row: Case  # whose tokens are cut and moved
    bounds: Callable[[Case], dict[str, float]]  # of the errors
    peers: Mapping[str, Callable[[Lengths], Callable[[], float]]]  # see `start`


# Checks -----------------------------------------------------------------------------------------


def truth(bench: Prefill, operands: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and pool in float64."""
    values: dict[str, Any] = {
        name: np.asarray(value, np.float32).astype(np.float64)
        for name, value in operands.items()
        if name not in ("rows", "layer", "dt_limit") and value is not None
    }
    values["dt_limit"] = operands.get("dt_limit", (0.0, np.inf))
    offsets, reads, writes, points, positions = (np.asarray(part) for part in operands["rows"])
    layer, pool = operands["layer"], values["states"]
    out, y = pool.copy(), np.zeros_like(values["x"])
    for row, write in enumerate(writes):
        h = np.zeros(pool.shape[2:]) if reads[row] == 0 else pool[layer, reads[row]]
        for t in range(offsets[row], offsets[row + 1]) if write else ():
            h, y[t] = bench.step(values, h, t)
            for point, position in zip(points[row], positions[row], strict=True):
                if point and position == t - offsets[row] + 1:
                    out[layer, point] = h
            out[layer, write] = h
    return y, out


def start_compiling(function: Callable, *args: Any, **options: Any) -> Future:
    """The compiled function, made while others are traced."""
    COMPILING.append(THREADS.submit(jax.jit(function, **options).lower(*args).compile))
    return COMPILING[-1]


def start_case(bench: Prefill, variant: Any, case: Case, seed: int) -> Callable[[], dict]:
    """`check_case` to be called when other checks have been started too."""
    operands = make_operands(case, seed)
    options = {name: operands.pop(name) for name in case.options}
    run = start_compiling(lambda operands: bench.call(operands, variant, **options), operands)
    return lambda: check_case(bench, case, operands, options, run.result())


def check_case(bench: Prefill, case: Case, operands, options, run: Callable) -> dict[str, float]:
    """Errors of one call; raises ValueError if something is wrong."""
    y, pool = run(operands)
    right_y, right_pool = truth(bench, {**operands, **options})
    y, pool, before = (np.asarray(v, np.float32) for v in (y, pool, operands["states"]))
    rows = operands["rows"]
    alive = (np.asarray(rows.write_ids) != 0) & (np.diff(rows.offsets) > 0)
    ids = [*np.asarray(rows.write_ids)[alive], *np.asarray(rows.checkpoint_ids)[alive].ravel()]
    named = np.setdiff1d(ids, [0]).astype(int)
    errors, wrong = {}, []
    pairs = (("y", y, right_y), ("states", pool[-1, named], right_pool[-1, named]))
    for name, got, right in pairs:
        errors[name] = float(np.max(np.abs(got - right)) / np.max(np.abs(right)))
        errors[name + "_rms"] = float(np.linalg.norm(got - right) / np.linalg.norm(right))
    for name, bound in bench.bounds(case).items():
        if not errors[name] <= bound:
            wrong.append(f"{name} is off")
    if np.any(y[right_y == 0] != 0):
        wrong.append("null rows or padding are not 0")
    rest = np.setdiff1d(np.arange(pool.shape[1]), named)
    kept = pool[-1, rest].tobytes() == before[-1, rest].tobytes()
    if not kept or pool[0].tobytes() != before[0].tobytes():
        wrong.append("a block that the call does not name changed")
    if wrong:
        raise ValueError(f"{case.name}: {'; '.join(wrong)} {errors}")
    return errors


def start_bits(bench: Prefill, variant: Any, seed: int) -> Callable[[], None]:
    """`check_bits` to be called when other checks have been started too."""
    base = make_operands(bench.one_row, seed)
    ids = jnp.zeros((3, 3), jnp.int32)
    rows = Rows(jnp.zeros(4, jnp.int32), ids[0], ids[0], ids, ids)
    pool = jnp.zeros((2, 16, *base["states"].shape[2:]), jnp.float32)
    base |= {"rows": rows, "states": pool}
    run = start_compiling(lambda operands: bench.call(operands, variant), base)
    return lambda: check_bits(base, run.result(), seed)


def check_bits(base: Mapping[str, Any], run: Callable, seed: int) -> None:
    """Raises ValueError if a cut at a multiple of 64, company or place changes a bit."""
    rng, pool = np.random.default_rng(seed), base["states"]
    tokens = base["x"].shape[0]
    total = tokens - 404
    drawn = {name: np.asarray(base[name]) for name in PER_TOKEN if name in base}

    def part(pool, begin, end, place, read, write):
        length, mixed = end - begin, {}
        for name, values in drawn.items():
            mixed[name] = rng.permutation(values)
            mixed[name][place : place + length] = values[begin:end]
            mixed[name][place + length + 70 :] = np.nan
        offsets = (0, place, place + length, min(tokens, place + length + 70))
        ids = [[0, 0, 0], [10, 11, 12], [0, 0, 0]]
        at = [[0, 0, 0], [min(128, length // 64 * 64), 37, length], [0, 0, 0]]
        parts = offsets, (1, read, 0), (1, write, 2), ids, at
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in parts))
        y, pool = run({**base, **mixed, "rows": rows, "states": pool})
        return np.asarray(y)[place : place + length], pool

    whole, after = part(pool, 0, total, 31, 0, 3)
    if after[1, 3].tobytes() != after[1, 12].tobytes():
        raise ValueError("a checkpoint at the end has other bits than the state")
    near_end = tokens - (total - 192)
    for cuts, places in (((0, 64, total), (7, 300)), ((0, 128, 192, total), (120, 1, near_end))):
        again, block, changed = [], 0, pool
        for begin, end, place in zip(cuts, cuts[1:], places, strict=False):
            y, changed = part(changed, begin, end, place, block, 3)
            again.append(y)
            if end == 128 and changed[1, 3].tobytes() != after[1, 10].tobytes():
                raise ValueError("a checkpoint at 128 has other bits than the state carried there")
            if begin == 0 and changed[1, 11].tobytes() != after[1, 11].tobytes():
                raise ValueError("a checkpoint at 37 has other bits at another place")
            block = 3
        same = np.concatenate(again).tobytes() == whole.tobytes()
        if not same or changed[1, 3].tobytes() != after[1, 3].tobytes():
            raise ValueError(f"cut at {cuts}, placed at {places}: other bits")


def start_checks(bench: Prefill, variant: Any, seed: int) -> Callable[[], dict[str, float]]:
    """Gives the largest errors of all checks; raises ValueError if something is wrong."""
    cases = [(case, start_case(bench, variant, case, seed)) for case in bench.cases]
    bits = start_bits(bench, variant, seed)

    def finish():
        worst: dict[str, float] = {}
        for case, errors in cases:
            for name, value in errors().items():
                name = f"{name}_{case.dtype}"
                worst[name] = max(value, worst.get(name, 0.0))
        bits()
        return worst

    return finish


# Time -------------------------------------------------------------------------------------------


def start_loop(once: Callable, carry: Any, sets: list[Any], calls: int) -> Callable[[], float]:
    """Gives the median seconds of `carry = once(carry, inputs, n)` in a loop on the device, over the sets in turn."""
    turns = -(-calls // len(sets))

    def loop(carry, sets):
        def turn(_, carry):
            for n, inputs in enumerate(sets):
                carry = once(carry, inputs, jnp.int32(n % 2))
            return carry

        return lax.fori_loop(0, turns, turn, carry)

    program = start_compiling(loop, carry, sets, donate_argnums=0)

    def seconds() -> float:
        times, state = [], carry
        for _ in range(6):
            begin = time.perf_counter()
            state = jax.block_until_ready(program.result()(state, sets))
            times.append((time.perf_counter() - begin) / (turns * len(sets)))
        return statistics.median(times[1:])

    return seconds


def start(bench: Prefill, variant: Any, lengths: Lengths, seed: int) -> Callable[[], float]:
    """Gives the seconds of one call that continues all rows in place. ImportError: a peer is not installed."""
    if variant in bench.peers:
        return bench.peers[variant](lengths)
    count, tokens = len(lengths), sum(lengths)
    calls = max(2, round(0.02 / (bench.floor(lengths) * (40 if variant == XLA else 4))))
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    ids = jnp.asarray(np.random.default_rng(seed).permutation(63)[:count] + 1, jnp.int32)
    none = jnp.zeros((count, 0), jnp.int32)
    call = jax.jit(
        lambda inputs, pool, layer: bench.call(
            inputs, variant, states=pool, layer=layer, rows=Rows(offsets, ids, ids, none, none)
        )
    )
    keys = [jax.random.key(seed + n) for n in range(max(2, 8192 // tokens))]
    sets = [bench.make_inputs(tokens, key) for key in keys]
    pool = jnp.zeros((2, 64, *bench.block), jnp.float32)
    return start_loop(lambda pool, inputs, n: call(inputs, pool, n)[1], pool, sets, calls)


def jobs(bench: Prefill, args: argparse.Namespace) -> list[tuple[Lengths, Any]]:
    """Ours at every shape, then peers, the configurations compared and XLA, as asked for."""
    lengths = [bench.shapes[n] for n in args.shapes]
    result = [(shape, bench.chosen(shape)) for shape in lengths]
    if not args.ours:
        result += [(shape, peer) for shape in lengths for peer in bench.peers]
    if args.tune:
        own = [(shape, variant) for shape in lengths for variant in bench.tuning]
        result += [job for job in own if job not in result]
    if not args.ours and not args.no_xla:
        result += [(shape, XLA) for shape in lengths]
    return result


def main(bench: Prefill, description: str, about: dict[str, Any] | None = None) -> int:
    """The command line of a prefill benchmark; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--tune", action="store_true", help="compare configurations")
    parser.add_argument("--ours", action="store_true", help="without XLA twins and peers")
    parser.add_argument("--no-xla", action="store_true", help="without XLA twins")
    parser.add_argument("--shapes", nargs="+", type=int, default=range(len(bench.shapes)))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="default: another")
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    begin, failed = time.perf_counter(), False
    git = ["git", "rev-parse", "--short", "HEAD"]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "seed": args.seed,
        **(about or {}),
        "checks": {},
        "results": [],
    }
    print(report, flush=True)

    def log(text: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {text}", flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    work = jobs(bench, args)
    own = [variant for _, variant in work if variant != XLA and variant not in bench.peers]
    checks = {v: start_checks(bench, v, args.seed) for v in dict.fromkeys(map(bench.small, own))}
    started: list[Any] = []
    for lengths, variant in work:
        try:
            started.append(start(bench, variant, lengths, args.seed))
        except ImportError:
            started.append(None)
        except Exception as error:
            started.append(error)
    log(f"{len(checks)} variants to check, {len(work)} times to take")
    wrong: dict[Any, str] = {}
    for variant, finish in checks.items():
        try:
            wrong[variant], report["checks"][str(variant)] = "", finish()
        except Exception as error:
            wrong[variant] = report["checks"][str(variant)] = f"{type(error).__name__}: {error}"[
                :600
            ]
        log(f"{variant}: {report['checks'][str(variant)]}")
    wait(COMPILING)  # nothing compiles while times are taken
    for (lengths, variant), take in zip(work, started, strict=True):
        if take is None:
            continue
        floor, goal = bench.floor(lengths) * 1e6, bench.goals[lengths]
        result = {"lengths": f"{len(lengths)} x {lengths[0]}", "variant": str(variant)}
        result |= {"floor_us": floor, "goal_us": goal, "chosen": variant == bench.chosen(lengths)}
        try:
            if variant in own and wrong[bench.small(variant)]:
                raise ValueError(f"wrong, so not timed: {wrong[bench.small(variant)]}")
            if isinstance(take, Exception):
                raise take
            result["us"] = us = take() * 1e6
            text = f"{us:8.1f} us  floor {floor:6.1f} ({floor / us:.2f})  goal {goal}"
        except Exception as error:
            failed, text = True, f"NOT TIMED: {type(error).__name__}: {error}"[:600]
            result["wrong"] = text
        report["results"].append(result)
        log(f"{result['lengths']:9} {result['variant']:55} {text}")
    return int(failed)
