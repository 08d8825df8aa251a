"""Reading prompts with whole models, against what their matrix products alone would take.

    python -m benchmarks.prompts -o benchmarks/results/h200_prompts.json --profile
    python -m benchmarks.prompts --small

The models are those of `benchmarks.steps`. Nothing is timed before a few layers of the same width gave the scores that
XLA's twins give, for ragged rows. A time is that of the engine's own compiled program that reads prompts, with the
sampling of a first token. The floor is the products with the layers' matrices at the speed of a product of 8192 square
bf16 matrices, measured in the same run. `--small` does this with tiny models, wherever JAX runs.
"""

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.steps import FULL, SMALL, TOLERANCE, alive
from benchmarks.trace import profile
from jaxstate.engine import Engine
from jaxstate.models import from_random
from jaxstate.models.base import CausalLM
from jaxstate.plan import StepPlan, null_plan
from jaxstate.sizing import Sizes
from pallas_kernels.dispatch import PREFERENCE


def prompt_plan(engine: Engine, lengths: list[int]) -> StepPlan:
    """The plan that reads so many further tokens of each row."""
    rng, plan = np.random.default_rng(0), null_plan(engine.shape, prefill=True)
    prefill = plan.prefill
    assert prefill is not None
    prefill.tokens[:] = rng.integers(1, engine.model.config.vocab_size, prefill.tokens.shape)
    prefill.offsets[1:] = np.cumsum([*lengths, *[0] * (engine.spec.rows - len(lengths))])
    prefill.starts[:] = 64
    prefill.sample[: len(lengths)] = True
    return plan


def product_rate(size: int, repeats: int = 5) -> float:
    """Operations per second of a product of square bf16 matrices."""
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.bfloat16) for n in range(2))

    @jax.jit
    def chain(a, b):
        for _ in range(8):
            a = (a @ b) * jnp.bfloat16(size**-0.5)
        return a

    jax.block_until_ready(chain(a, b))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(chain(a, b))
        times.append(time.perf_counter() - begin)
    return 8 * 2 * size**3 / statistics.median(times)


def layer_products(model: CausalLM, tokens: int) -> int:
    """Operations of the products with the layers' matrices."""
    matrices = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim == 2 and min(leaf.shape) > 16]
    vocabulary = model.config.vocab_size
    return 2 * tokens * sum(leaf.size for leaf in matrices if vocabulary not in leaf.shape)


def check_scores(config: Any, tokens: int) -> str | None:
    """What is wrong with the scores after prompts, ours beside XLA's; None if they agree."""
    config = dataclasses.replace(config, num_hidden_layers=2)
    model = from_random(config, 1, jnp.bfloat16)
    engine = Engine(model, Sizes(4, 4 * tokens, tokens, 2, checkpoints=0), poison=False)
    state, (group,) = alive(engine), engine.spec.groups
    ids = state.tables.ids[group.name][:, 0]
    lengths = np.array([tokens // 2, 3, 0, tokens // 2 - 70])
    offsets = jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
    none = jnp.zeros((4, 0), jnp.int32)
    rows = {group.name: pallas_kernels.Rows(offsets, ids, ids, none, none)}
    values = np.random.default_rng(3).integers(1, config.vocab_size, tokens)

    def run():
        def scores(model, cache, tokens):
            hidden, cache = model.prefill(tokens, tokens, rows, cache)
            return model.logits(hidden[: sum(lengths)]), cache.groups[group.name]

        return jax.jit(lambda *args: scores(*args))(
            model, state.cache, jnp.asarray(values, jnp.int32)
        )

    ours = run()
    with pallas_kernels.prefer("xla"):
        theirs = run()
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        difference = float(np.abs(x - y).max() / np.abs(y).max())
        if not difference <= TOLERANCE:
            return f"{jax.tree_util.keystr(path)} differs from XLA's by {difference:.2e}"
    return None


def measure(engine: Engine, program, lengths: list[int], repeats: int) -> tuple[float, Callable]:
    """Seconds of a dispatch, the median, and what runs one."""
    state, plan = alive(engine), engine.packed("prefill", [prompt_plan(engine, lengths)])

    def run(count: int = 1) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(count):
            state, outcome = program(engine._params, state, plan)
        jax.block_until_ready(outcome)
        seconds = (time.perf_counter() - begin) / count
        if not np.asarray(outcome.made)[0, : len(lengths)].all():
            raise AssertionError("a row made no token")
        return seconds

    run(2)
    return statistics.median(run(4) for _ in range(repeats)), run


def show(r: dict[str, Any]) -> str:
    name = f"{r['model']:7}"
    if "error" in r:
        return f"{name} NOT TIMED: {r['error']}"
    return (
        f"{name} {r['rows']} x {r['tokens'] // r['rows']} tokens {r['ms']:8.2f} ms  floor {r['floor_ms']:6.2f}  "
        f"share {r['share']:.2f}  {r['tokens'] / r['ms'] * 1e3:,.0f} tokens/s  compile {r['compile_s']:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(FULL), default=tuple(FULL))
    parser.add_argument("--profile", action="store_true", help="what ran on the GPU, by kernel")
    parser.add_argument("--unchecked", action="store_true", help="time without checking; to tune")
    parser.add_argument("--implementation", help="xla or reference, in place of our kernels")
    parser.add_argument("--small", action="store_true", help="tiny models, wherever JAX runs")
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    configs, tokens, repeats = (SMALL, 128, 2) if args.small else (FULL, 2048, 5)
    rate = product_rate(256 if args.small else 8192)
    git = ["git", "rev-parse", "--short", "HEAD"]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "product_tflop_s": rate / 1e12,
        "implementation": args.implementation or "chosen by the call",
        "results": [],
    }
    print(
        f"{report['device']}, jax {jax.__version__}, products {rate / 1e12:.0f} TFLOP/s", flush=True
    )
    good, jobs = True, []

    def note(result: dict[str, Any]) -> None:
        report["results"].append(result)
        print(show(result), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    order = (args.implementation,) if args.implementation else PREFERENCE
    with ThreadPoolExecutor(4) as threads, pallas_kernels.prefer(*order):
        for name in args.models:
            try:
                model = from_random(configs[name], 0, jnp.bfloat16)
                sizes = Sizes(8, tokens + 4096, tokens, 16, checkpoints=0)
                engine, begin = Engine(model, sizes, poison=False), time.perf_counter()
                lowered = engine.lower("prefill")
                compiling = threads.submit(
                    lambda lowered=lowered, begin=begin: (lowered.compile(), time.perf_counter() - begin)
                )  # fmt: skip
                jobs.append((name, engine, compiling))
            except Exception as error:
                traceback.print_exc()
                good = False
                note({"model": name, "error": f"{type(error).__name__}: {error}"[:500]})
        wrong = {
            n: None if args.unchecked else check_scores(configs[n], tokens) for n in args.models
        }
        for _, _, compiling in jobs:
            compiling.exception()
        for name, engine, compiling in jobs:
            for count in (1, 8):
                try:
                    if wrong[name]:
                        raise ValueError(wrong[name])
                    program, compile_s = compiling.result()
                    seconds, again = measure(engine, program, [tokens // count] * count, repeats)
                    floor = layer_products(engine.model, tokens) / rate
                    result = {
                        "model": name, "rows": count, "tokens": tokens, "compile_s": compile_s,
                        "ms": seconds * 1e3, "floor_ms": floor * 1e3, "share": floor / seconds,
                    }  # fmt: skip
                    if args.profile and count == 1:
                        trace = profile(functools.partial(again, 1))
                        print("\n".join(trace.lines()), flush=True)
                        result["trace"] = dataclasses.asdict(trace) | {
                            "kernels": trace.kernels[:24], "gaps": trace.gaps[:8], "host": trace.host[:8]
                        }  # fmt: skip
                except Exception as error:
                    traceback.print_exc()
                    good = False
                    result = {"model": name, "error": f"{type(error).__name__}: {error}"[:500]}
                note(result)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
