"""Tokens a second of greedy generation, beside transformers on the same weights in one run.

    python benchmarks/generate.py jaxstate/demo_model --reference-python PATH/TO/python -o results.json

`--reference-python` is an interpreter with torch and transformers; it runs `benchmarks/reference_generate.py` in turn
with this project's engine, A B A B, so that a machine whose speed drifts is the same for both. The texts must agree
before a speed is printed. Compiling and loading are not counted on either side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path


def ours(folder: Path, prompts: list[list[int]], new: int, rounds: int):
    """Seconds of each round, and the tokens."""
    import jaxstate as js

    lm = js.LM.load(folder, sizes=js.Sizes(rows=len(prompts)))
    lm.engine.compile()
    lm.generate(prompts, max_tokens=8, ignore_eos=True)
    while rounds:
        begin = time.perf_counter()
        done = lm.generate(prompts, max_tokens=new, ignore_eos=True)
        yield time.perf_counter() - begin, [list(c.tokens) for c in done]
        rounds -= 1


class Reference:
    """transformers' generate in a process of its own, one round per request."""

    def __init__(self, python: str, folder: Path, prompts: list[list[int]], new: int):
        script = Path(__file__).with_name("reference_generate.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, "-P", str(script), str(folder), str(new)], **pipes)
        self.ask(prompts)

    def ask(self, message) -> dict:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the reference process ended with status {self.process.wait()}")
        return json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--reference-python")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()

    import jax
    import numpy as np

    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, vocab, (args.batch, args.prompt)).tolist()
    reference = None
    if args.reference_python:
        reference = Reference(args.reference_python, args.model, prompts, args.new)
    times: dict[str, list[float]] = {"jaxstate": [], "transformers": []}
    agree = 1.0
    for seconds, tokens in ours(args.model, prompts, args.new, args.rounds):
        times["jaxstate"].append(seconds)
        if reference is not None:
            answer = reference.ask("go")
            times["transformers"].append(answer["seconds"])
            same = np.asarray(tokens) == np.asarray(answer["tokens"])
            # Near-ties fall either way in float32; from the first one on the texts differ.
            agree = min(agree, float(np.logical_and.accumulate(same, axis=1).mean()))
    if reference is not None and agree < 0.9:
        print(
            f"the texts agree in only {agree:.0%} of their tokens; no speed is reported",
            file=sys.stderr,
        )
        return 1
    total = args.batch * args.new
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    result = {
        "batch": args.batch, "prompt": args.prompt, "new": args.new,
        "device": jax.devices()[0].device_kind, "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "jax": jax.__version__, "agree": agree,
        "commit": commit,
    }  # fmt: skip
    for name, seconds in times.items():
        if seconds:
            result[name] = {"tokens_per_s": total / statistics.median(seconds), "seconds": seconds}
    if reference is not None:
        ratios = [b / a for a, b in zip(times["jaxstate"], times["transformers"], strict=True)]
        result["ratio"] = {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
