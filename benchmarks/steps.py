"""Whole decode and prefill steps of whole models, against what reading weights and state once would take.

    python -m benchmarks.steps -o benchmarks/results/h200_steps.json
    python -m benchmarks.steps --models mamba2 --rows 8 --profile
    python -m benchmarks.steps --small

Weights are random and made on the device, in the shapes of Mamba 2.8B and Mamba-2 2.7B; they are bf16 and states
float32. Nothing is timed before it was checked: a few layers of the same width give the same scores with our kernels
as with XLA's, and requests that share an engine get bit for bit what each gets alone.

A decode time is that of the engine's own compiled program, per token, in a row of dispatches in which every row of the
batch is alive; the floor is (weights + states read and written) over the speed of a pass in place over 4 GB, measured
in the same run. `--small` does all this with tiny models, wherever JAX runs, to show that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks.kernels import pass_bandwidth
from benchmarks.trace import profile
from jaxstate import programs
from jaxstate.engine import Engine
from jaxstate.models import Mamba2Config, MambaConfig, from_random
from jaxstate.models.base import CausalLM
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from jaxstate.state.cache import StateCache
from jaxstate.state.tables import BlockTables
from jaxstate.step import EngineState, RowState
from pallas_kernels.dispatch import PREFERENCE

FULL = {
    "mamba": MambaConfig(
        vocab_size=50280, hidden_size=2560, num_hidden_layers=64, intermediate_size=5120,
        time_step_rank=160, state_size=16,
    ),
    "mamba2": Mamba2Config(
        vocab_size=50288, hidden_size=2560, num_hidden_layers=64, num_heads=80, head_dim=64,
        state_size=128, tie_word_embeddings=True,
    ),
}  # fmt: skip
SMALL = {
    "mamba": MambaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, intermediate_size=128,
        time_step_rank=8, state_size=16,
    ),
    "mamba2": Mamba2Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, num_heads=4, head_dim=32,
        state_size=64, tie_word_embeddings=True,
    ),
}  # fmt: skip
TOLERANCE = 2.0**-5
"""Largest difference of scores between two implementations, over their largest: a few roundings to bf16."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run does; `layers` are those of the models that results are checked with."""

    configs: dict[str, Any]
    rows: tuple[int, ...]
    prompt: int
    steps: int
    layers: int
    repeats: int
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    def sizes(self, rows: int, chunk: int | None = None) -> Sizes:
        return Sizes(rows, self.prompt + 4096, chunk or self.prompt, self.steps, checkpoints=0)


def model_bytes(model: CausalLM, rows: int) -> int:
    """Bytes that a decode step must move: weights once, each row's state twice."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model)) + 2 * rows * model.state_bytes


def alive(engine: Engine, seed: int = 0) -> EngineState:
    """A state in the midst of generating: every row is active and its blocks, in no order, hold random numbers."""
    spec, rng = engine.spec, np.random.default_rng(seed)

    def leaf(path, like, layers, blocks):
        key = jax.random.fold_in(jax.random.key(seed), len(path))
        one = 0.1 * jax.random.normal(key, (1, blocks, *like.shape), like.dtype)
        return jnp.broadcast_to(one, (layers, *one.shape[1:]))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def group(layers, blocks):
        (group,) = spec.groups
        return jax.tree_util.tree_map_with_path(
            lambda path, like: leaf(path, like, layers, blocks), group.leaves
        )

    (first,) = spec.groups
    blocks = spec.blocks(first.name)
    ids = rng.permutation(np.arange(1, blocks))[: spec.rows, None].astype(np.int32)
    rows = RowState.empty(spec).replace(
        token=jnp.asarray(rng.integers(1, engine.model.config.vocab_size, spec.rows), jnp.int32),
        position=jnp.full(spec.rows, 64, jnp.int32),
        left=jnp.full(spec.rows, 10**6, jnp.int32),
        active=jnp.ones(spec.rows, jnp.bool_),
    )
    cache = StateCache({first.name: group(first.layers, blocks)})
    return EngineState(BlockTables({first.name: jnp.asarray(ids)}), cache, rows)


# Checks ---------------------------------------------------------------------------------------


def check_scores(settings: Settings, name: str) -> str | None:
    """What is wrong with the scores of a few layers, ours beside XLA's; None if they agree."""
    config = dataclasses.replace(settings.configs[name], num_hidden_layers=settings.layers)
    model, rows = from_random(config, 1, jnp.bfloat16), 8
    engine = Engine(model, settings.sizes(rows), poison=False)
    state, (group,) = alive(engine), engine.spec.groups
    ids = state.tables.ids[group.name][:, 0]

    def scores(model, cache, tokens):
        ids_ = {group.name: pallas_kernels.RowIds(ids, ids)}
        hidden, cache = model.decode(tokens, tokens, ids_, cache)
        return model.logits(hidden), cache.groups[group.name]

    def run():
        return jax.jit(lambda *args: scores(*args))(model, state.cache, state.rows.token)

    ours = run()
    with pallas_kernels.prefer("xla"):
        theirs = run()
    for path, x in jax.tree_util.tree_leaves_with_path(ours):
        y = functools.reduce(
            lambda v, k: v[getattr(k, "idx", getattr(k, "key", None))], path, theirs
        )
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        if not np.isfinite(x).all():
            return f"{jax.tree_util.keystr(path)} is not finite"
        difference = float(np.abs(x - y).max() / np.abs(y).max())
        if difference > TOLERANCE:
            return f"{jax.tree_util.keystr(path)} differs from XLA's by {difference:.2e}"
    return None


def check_company(settings: Settings, name: str) -> str | None:
    """What a request's tokens depend on that they must not; None if on nothing."""
    config = dataclasses.replace(settings.configs[name], num_hidden_layers=settings.layers)
    model, rng = from_random(config, 2, jnp.bfloat16), np.random.default_rng(3)
    engine = Engine(model, settings.sizes(4, chunk=256), poison=True)
    requests = [
        Request(
            f"r{i}",
            tuple(rng.integers(1, config.vocab_size, rng.integers(1, 300)).tolist()),
            SamplingParams(max_tokens=int(rng.integers(4, 40)), temperature=i % 2, ignore_eos=True),
        )
        for i in range(10)
    ]
    together = {c.id: c for c in engine.completions(requests)}
    for request in requests:
        (alone,) = engine.completions([request])
        company = together[request.id]
        if company.error or (alone.tokens, alone.logprobs) != (company.tokens, company.logprobs):
            return f"{request.id}: {company.error or 'alone and in company it differs'}"
    if engine.stats.late_compilations:
        return f"{engine.stats.late_compilations} programs compiled after the start"
    return None


# Time -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Job:
    """A decode program on its way."""

    rows: int
    engine: Engine
    lower_s: float
    compiled: Future


def start(settings: Settings, model: CausalLM, rows: int, threads: ThreadPoolExecutor) -> Job:
    """Lowers the decode program of an engine with that many rows and has it compiled in the background."""
    engine = Engine(model, settings.sizes(rows), poison=False)
    shapes = jax.eval_shape(functools.partial(EngineState.create, engine.spec))
    begin = time.perf_counter()
    lowered = engine._jitted["decode"].lower(engine._params, shapes, engine.packed("decode"))
    lower_s = time.perf_counter() - begin
    own = programs.options("decode", engine.shape, engine.platform)

    def compiled():
        begin = time.perf_counter()
        program = lowered.compile(compiler_options={**own, **settings.options} or None)
        return program, time.perf_counter() - begin

    return Job(rows, engine, lower_s, threads.submit(compiled))


def pool_copies(text: str, layers: int, blocks: int) -> int:
    """Instructions of an optimized program that make a whole pool anew."""
    made = re.compile(rf"= [^=]*\[{layers},{blocks},[^=]* (copy|copy-start|transpose|convert)\(")
    return sum(bool(made.search(line)) for line in text.splitlines())


def measure_decode(settings: Settings, job: Job, bandwidth: float, traced: bool) -> dict[str, Any]:
    """One line of the table."""
    engine, steps = job.engine, settings.steps
    program, compile_s = job.compiled.result()
    memory, (group,) = program.memory_analysis(), engine.spec.groups
    state, plan = alive(engine), engine.packed("decode")
    pools = engine.spec.nbytes
    result: dict[str, Any] = {
        "rows": job.rows, "lower_s": job.lower_s, "compile_s": compile_s,
        "temp_mb": memory.temp_size_in_bytes / 1e6, "donated": memory.alias_size_in_bytes >= pools,
        "pool_copies": pool_copies(program.as_text(), group.layers, engine.spec.blocks(group.name)),
    }  # fmt: skip

    def run(count: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(count):
            state, outcome = program(engine._params, state, plan)
        jax.block_until_ready(outcome)
        seconds = (time.perf_counter() - begin) / count / steps
        if not np.asarray(outcome.made).all():
            raise AssertionError("a row made no token")
        return seconds

    run(2)
    count = max(2, min(8, int(0.3 / (run(1) * steps))))
    seconds = statistics.median(run(count) for _ in range(settings.repeats))
    floor = model_bytes(engine.model, job.rows) / bandwidth
    result |= {"ms": seconds * 1e3, "floor_ms": floor * 1e3, "share": floor / seconds}
    if traced:
        trace = profile(lambda: run(1))
        result["trace"] = dataclasses.asdict(trace) | {
            "kernels": trace.kernels[:24], "gaps": trace.gaps[:8], "host": trace.host[:8]
        }  # fmt: skip
        print("\n".join(trace.lines()), flush=True)
    return result


def measure_engine(settings: Settings, model: CausalLM, rows: int) -> dict[str, Any]:
    """What an engine takes from prompts to tokens: the start, the first prompt, a full batch."""
    begin = time.perf_counter()
    engine = Engine(model, settings.sizes(rows), poison=False)
    engine.compile()
    start_s, rng = time.perf_counter() - begin, np.random.default_rng(0)

    def request(name: str, length: int, tokens: int) -> Request:
        prompt = tuple(rng.integers(1, model.config.vocab_size, length).tolist())
        return Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))

    firsts = []
    for i in range(4):
        (done,) = engine.completions([request(f"first {i}", settings.prompt, 1)])
        firsts.append(done.total_s)

    def full(tokens: int) -> float:
        requests = [request(f"{tokens} {i}", 8, tokens) for i in range(rows)]
        begin = time.perf_counter()
        assert all(len(done.tokens) == tokens for done in engine.completions(requests))
        return time.perf_counter() - begin

    # Two lengths, so that reading the prompts and coming to an end drop out; the best of several.
    steps = 8 * settings.steps
    short, long = (
        min(full(settings.steps + more + 1) for _ in range(settings.repeats)) for more in (0, steps)
    )
    ms = (long - short) / steps * 1e3
    return {
        "rows": rows, "start_s": start_s, "prompt_tokens": settings.prompt,
        "first_token_ms": min(firsts) * 1e3, "ms": ms, "tokens_per_s": rows / ms * 1e3,
        "late_compilations": engine.stats.late_compilations,
        "kernels": pallas_kernels.dispatch.describe(pallas_kernels.dispatch.chosen()),
    }  # fmt: skip


def show(name: str, r: dict[str, Any]) -> str:
    """A line for a person."""
    if "error" in r:
        return f"{name:7} NOT TIMED: {r['error']}"
    if "tokens_per_s" in r:
        return (
            f"{name:7} engine, {r['rows']} rows: start {r['start_s']:.1f} s, {r['prompt_tokens']} prompt tokens "
            f"{r['first_token_ms']:.2f} ms, {r['ms']:.3f} ms a token, {r['tokens_per_s']:,.0f} tokens/s, "
            f"{r['late_compilations']} late compilations"
        )
    return (
        f"{name:7} {r['rows']:4} rows {r['ms']:8.3f} ms  floor {r['floor_ms']:7.3f}  share {r['share']:.2f}  "
        f"lower {r['lower_s']:.1f} s compile {r['compile_s']:.1f} s  pool copies {r['pool_copies']}"
        f"{'' if r['donated'] else '  NOT DONATED'}"
    )


def run(settings: Settings, args: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Checks and measures every model; what goes wrong with one does not stop the others."""
    good = True

    def note(name: str, kind: str, work) -> None:
        nonlocal good
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        good &= "error" not in result
        report["results"].append({"model": name, "kind": kind, **result})
        print(show(name, result), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    with ThreadPoolExecutor(4) as threads:
        for name in args.models or settings.configs:
            wrong = None if args.unchecked else check_scores(settings, name)
            wrong = wrong or (None if args.unchecked else check_company(settings, name))
            if wrong:
                print(f"{name}: NOT TIMED: {wrong}", flush=True)
                good = False
                continue
            model = from_random(settings.configs[name], 0, jnp.bfloat16)
            bandwidth = report["pass_tb_s"] * 1e12
            jobs = [start(settings, model, rows, threads) for rows in settings.rows]
            # While something compiles, XLA times variants of matrix products on the same GPU.
            for job in jobs:
                job.compiled.exception()
            for job in jobs:
                work = functools.partial(measure_decode, settings, job, bandwidth, args.profile)
                note(name, "decode", work)
            del jobs, job, work
            if args.engine:
                note(name, "engine", lambda m=model: measure_engine(settings, m, args.engine))
            del model
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(FULL))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=16, help="tokens a dispatch")
    parser.add_argument("--engine", type=int, default=8, help="rows of the whole engine; 0: none")
    parser.add_argument("--layers", type=int, help="fewer layers than the models have")
    parser.add_argument("--profile", action="store_true", help="what ran on the GPU, by kernel")
    parser.add_argument("--unchecked", action="store_true", help="time without checking; to tune")
    parser.add_argument("--implementation", help="xla or reference, in place of our kernels")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="an option for XLA's compiler")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="tiny models, wherever JAX runs")
    parser.add_argument("--commit", help="written to the result; default: ask git")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    if args.small:
        settings = Settings(SMALL, (2,), 128, 4, 2, 2, options)
        args.engine = min(args.engine, 2)
    else:
        settings = Settings(FULL, tuple(args.rows), 2048, args.steps, 2, 5, options)
    if args.layers:
        fewer = {
            n: dataclasses.replace(c, num_hidden_layers=args.layers)
            for n, c in settings.configs.items()
        }
        settings = dataclasses.replace(settings, configs=fewer)
    git = ["git", "rev-parse", "--short", "HEAD"]
    bandwidth = pass_bandwidth(2**24 if args.small else 2**32)
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "tokens_a_dispatch": settings.steps,
        "options": options,
        "implementation": args.implementation or "chosen by the call",
        "pass_tb_s": bandwidth / 1e12,
        "results": [],
    }
    print(
        f"{report['device']}, jax {jax.__version__}, pass {bandwidth / 1e12:.2f} TB/s", flush=True
    )
    order = (args.implementation,) if args.implementation else PREFERENCE
    with pallas_kernels.prefer(*order):
        return 0 if run(settings, args, report) else 1


if __name__ == "__main__":
    sys.exit(main())
