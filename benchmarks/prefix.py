"""What the reuse of prefixes saves.

    python -m benchmarks.prefix -o benchmarks/results/prefix.json
    python -m benchmarks.prefix reuse     # one of its parts: reuse, first_token

The trace (1,000 requests: stems shared by Zipf's law, conversations of several turns, branch points) runs through the
scheduler alone, with each step's states published before the next is planned. Its share of prompt tokens served from
checkpoints is set beside an oracle that keeps the state of every 64-token prefix for ever, and beside what engines with
state in blocks do: a state every 512 tokens, the least recently used one going first.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import platform
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.plan import PlanShape
from jaxstate.prefix import Checkpoint, PrefixIndex, block_keys
from jaxstate.request import Request, SamplingParams
from jaxstate.scheduler import Schedule, plan_next, publish, submit
from jaxstate.state import CacheSpec, GroupSpec
from pallas_kernels.rows import CHUNK

VOCAB, ROWS = 4096, 8
LEAF = jax.ShapeDtypeStruct((4,), jnp.float32)


# -- the trace -------------------------------------------------------------------------------------


def trace(count: int = 1000, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts in order of arrival: new ones over a Zipf stem and perhaps a branch of it, and next turns of old ones."""
    rng = np.random.default_rng(seed)

    def text(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCAB, n).tolist())

    stems = [text(int(rng.integers(200, 3000))) for _ in range(40)]
    branches = [[text(int(rng.integers(50, 800))) for _ in range(4)] for _ in stems]
    talks: collections.deque[tuple[int, ...]] = collections.deque(maxlen=32)
    prompts = []
    for _ in range(count):
        if talks and rng.random() < 0.45:
            at = int(rng.integers(len(talks)))
            # An answer of the model and what is said to it.
            prompt = (*talks[at], *text(int(rng.integers(60, 400))))
            del talks[at]
        else:
            stem = min(int(rng.zipf(1.2)), len(stems)) - 1
            prompt = stems[stem]
            if rng.random() < 0.5:
                prompt = (*prompt, *branches[stem][rng.integers(4)])
            prompt = (*prompt, *text(int(rng.integers(20, 300))))
        if len(prompt) < 6000 and rng.random() < 0.8:
            talks.append(prompt)
        prompts.append(prompt)
    return prompts


def oracle(prompts: list[tuple[int, ...]]) -> tuple[int, int]:
    """Prompt tokens served, and states kept, if every 64-token prefix is kept for ever."""
    kept: set[bytes] = set()
    served = 0
    for prompt in prompts:
        keys = block_keys(prompt)
        usable = (len(prompt) - 1) // CHUNK
        served += CHUNK * next((n for n in range(usable, 0, -1) if keys[n - 1] in kept), 0)
        kept.update(keys)
    return served, len(kept)


def aligned_lru(prompts: list[tuple[int, ...]], states: int, block: int = 512) -> int:
    """Prompt tokens served by states at multiples of `block`, the least recently used one going first."""
    kept: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    every, served = block // CHUNK, 0
    for prompt in prompts:
        keys = block_keys(prompt)[every - 1 :: every]
        usable = (len(prompt) - 1) // block
        hit = next((n for n in range(usable, 0, -1) if keys[n - 1] in kept), 0)
        served += block * hit
        for key in keys:
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > states:
            kept.popitem(last=False)
    return served


@dataclasses.dataclass(frozen=True)
class _Lru(PrefixIndex):
    """The same index with the least recently used checkpoint going first."""

    def insert(self, checkpoint: Checkpoint) -> PrefixIndex:
        return self._queued(checkpoint.ranked(0, self._tick()))

    def use(self, key: bytes) -> PrefixIndex:
        node = self.nodes[key]
        return self._put(node.ranked(node.uses + 1, self._tick()), self.queue)

    def _tick(self) -> float:
        return float(next(_ticks))


_ticks = itertools.count()


def scheduled(prompts: list[tuple[int, ...]], states: int, index: PrefixIndex) -> dict:
    """The same through the scheduler: tokens served, evictions, checkpoints skipped."""
    spec = CacheSpec(
        (GroupSpec("state", "recurrent", 1, LEAF, blocks=ROWS + states + 1),),
        rows=ROWS, max_len=8192,
    )  # fmt: skip
    shape = PlanShape(spec, chunk_tokens=2048, decode_steps=8, checkpoints=4)
    schedule = dataclasses.replace(Schedule.create(shape), index=index)
    left, served = collections.deque(enumerate(prompts)), 0
    while left or not schedule.idle:
        while left and len(schedule.waiting) < 2:
            i, prompt = left.popleft()
            request = Request(str(i), prompt, SamplingParams(max_tokens=8))
            schedule = submit(schedule, request)
        step = plan_next(schedule, decode_steps=8)
        assert step is not None
        schedule, planned = step
        for row in np.flatnonzero(planned.plan.admission.rows):
            served += schedule.rows[row].cached
        schedule = publish(schedule, planned.staged)
    return {"served": served, "evicted": schedule.evicted, "skipped": schedule.skipped}


def reuse(seeds: int = 2) -> list[dict]:
    """Shares of the oracle's hits at a tenth of its memory, and at others."""
    out = []
    for seed in range(seeds):
        prompts = trace(seed=seed)
        total = sum(map(len, prompts))
        best, states = oracle(prompts)
        for share in (0.1, 0.03):
            room = int(states * share)
            greedy = scheduled(prompts, room, PrefixIndex())
            lru = scheduled(prompts, room, _Lru())
            out.append({
                "seed": seed, "prompt_tokens": total, "oracle_states": states, "oracle_share": best / total,
                "states": room, "memory_share": share,
                "greedy_dual": greedy["served"] / best, "lru": lru["served"] / best,
                "aligned_512_lru": aligned_lru(prompts, room) / best,
                "evicted": greedy["evicted"], "skipped": greedy["skipped"],
            })  # fmt: skip
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in out[-1].items()})
    return out


# -- time to first token ---------------------------------------------------------------------------


def first_tokens(name: str = "demo", count: int = 20, stem: int = 1024) -> dict:
    """Seconds to the first token of requests that come one by one and share a prefix, with and without reuse."""
    import jaxstate as js

    rng, out = np.random.default_rng(1), {}
    shared = tuple(rng.integers(1, VOCAB, stem).tolist())
    prompts = [(*shared, *rng.integers(1, VOCAB, 48).tolist()) for _ in range(count)]
    for what, checkpoints in (("without", 0), ("with", 32)):
        sizes = js.Sizes(rows=8, max_len=2048, chunk_tokens=256, checkpoints=checkpoints)
        with js.LM.load(name, sizes=sizes) as lm:
            lm.engine.compile()
            lm.generate([list(prompts[0][:40])], max_tokens=1)
            done = [lm.generate([list(p)], max_tokens=4, ignore_eos=True)[0] for p in prompts]
        out[what] = {
            "median_s": statistics.median(c.first_token_s for c in done),
            "mean_s": statistics.mean(c.first_token_s for c in done),
            "cached_tokens": sum(c.cached_tokens for c in done),
            "tokens": [c.tokens for c in done],
        }
    same = out["with"].pop("tokens") == out["without"].pop("tokens")
    assert same, "the two runs must come to the same tokens"
    out["ratio_of_means"] = out["without"]["mean_s"] / out["with"]["mean_s"]
    out["ratio_of_medians"] = out["without"]["median_s"] / out["with"]["median_s"]
    return {"requests": count, "shared": stem, "own": 48, **out}


PARTS = {"reuse": reuse, "first_token": first_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", help=f"what to measure: {', '.join(PARTS)}; default all"
    )
    parser.add_argument("-o", "--output", type=Path, help="a file whose other parts are kept")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)}; the parts are {', '.join(PARTS)}")
    results = {}
    if args.output and args.output.exists():
        results = json.loads(args.output.read_text())
    machine = {
        "python": platform.python_version(),
        "cpu": platform.machine(),
        "jax": jax.__version__,
    }
    results["machine"] = machine
    for part in args.parts or PARTS:
        results[part] = PARTS[part]()
    print(json.dumps({k: v for k, v in results.items() if k != "reuse"}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
