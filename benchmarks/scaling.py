"""The same requests over more devices: equal tokens, and what the host pays for each step.

    python benchmarks/scaling.py outputs -o outputs.json      # the demo model, 1 to 8 ranks, shards, both
    python benchmarks/scaling.py planning -o planning.json    # the host's part alone, 256 rows a rank

A CPU shows as eight devices, so what is measured is the host's work and whether results agree, never how much faster
more devices are. `docs/scaling.md` says what follows for many GPUs, and what does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np

import jaxstate as js
from jaxstate.models import Mamba2Config
from jaxstate.models.mamba2 import Mamba2LM
from jaxstate.plan import PlanShape
from jaxstate.ranks import Ranks
from jaxstate.state import CacheSpec

LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2))
"""Ranks, and shards of each."""


def requests(count: int, vocab: int) -> list[js.Request]:
    """Prompts of 1 to 150 tokens, every third behind the same 128; greedy and sampled."""
    rng = np.random.default_rng(0)
    stem, made = tuple(rng.integers(1, vocab, 128).tolist()), []
    for i in range(count):
        prompt = tuple(rng.integers(1, vocab, rng.integers(1, 150)).tolist())
        sampling = js.SamplingParams(
            max_tokens=int(rng.integers(1, 25)), temperature=i % 2 / 1.5, seed=i, ignore_eos=True
        )
        made.append(js.Request(f"r{i}", stem + prompt if i % 3 == 0 else prompt, sampling))
    return made


def outputs(count: int) -> list[dict]:
    """One row per layout: tokens beside those of one device, and the host's time."""
    rows, first = [], None
    for ranks, shards in LAYOUTS:
        sizes = js.Sizes(rows=4, max_len=512, chunk_tokens=256, decode_steps=8, checkpoints=16,
                         data_parallel=ranks, tensor_parallel=shards)  # fmt: skip
        with js.LM.load("demo", sizes=sizes) as lm:
            lm.engine.compile()
            begin = time.perf_counter()
            asked = requests(count, lm.model.config.vocab_size)
            done = {c.id: c for c in lm.engine.completions(asked)}
            wall, stats = time.perf_counter() - begin, lm.engine.stats
        first = first or done
        off = [
            max((abs(a - b) for a, b in zip(done[k].logprobs, c.logprobs, strict=True)), default=0)
            for k, c in first.items()
            if done[k].tokens == c.tokens
        ]
        steps = stats.prefill_steps + stats.decode_steps
        rows.append({
            "data_parallel": ranks, "tensor_parallel": shards, "requests": len(done),
            "tokens_differ": sum(done[k].tokens != c.tokens for k, c in first.items()),
            "greedy_tokens_differ": sum(
                done[r.id].tokens != first[r.id].tokens for r in asked if not r.sampling.temperature
            ),
            "logprobs_off": max(off), "steps": steps, "plan_ms_a_step": 1e3 * stats.plan_s / steps,
            "generated": stats.generated_tokens, "late_compilations": stats.late_compilations,
            "seconds": wall,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def planning(per_rank: int) -> list[dict]:
    """One row per number of ranks: milliseconds to plan a step in which every row decodes, or a prompt is read."""
    config = Mamba2Config(vocab_size=50_288, hidden_size=2560, num_hidden_layers=64, num_heads=80)
    (group,) = Mamba2LM(config, jax.numpy.bfloat16).groups()
    shape = PlanShape(CacheSpec((group,), per_rank, 131_072), 2048, 16)
    rows = []
    for ranks in (1, 2, 4, 8):
        now = Ranks.create(shape, ranks)
        asked = [
            js.Request(f"r{i}", (1, 2, 3), js.SamplingParams(max_tokens=100_000))
            for i in range(per_rank * ranks)
        ]
        now, submitted = _timed(lambda now=now, asked=asked: now.submit(asked))
        (now, step), admitting = _timed(lambda now=now: now.plan_next(decode_steps=16))
        took = []
        for _ in range(60):
            (after, step), ms = _timed(lambda now=now: now.plan_next(decode_steps=16))
            assert step.kind == "decode"
            took.append(ms)
            now = after
        rows.append({
            "ranks": ranks, "rows_a_rank": per_rank, "decode_ms": min(took),
            "decode_ms_median": statistics.median(took), "admit_all_ms": admitting,
            "submit_ms_a_request": submitted / len(asked),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _timed(call):
    begin = time.perf_counter()
    return call(), 1e3 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("outputs", "planning"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="of each rank, for planning")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    rows = outputs(given.requests) if given.what == "outputs" else planning(given.rows)
    result = {"what": given.what, "jax": jax.__version__, "device": "cpu", "rows": rows}
    if given.output:
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
