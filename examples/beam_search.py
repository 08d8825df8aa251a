"""Beam search: at each token, every beam forks into its likeliest next tokens, and the best of all go on.

python examples/beam_search.py "The captain looked" --width 4
"""

import argparse

import jax
import numpy as np

import jaxstate as js


def beam_search(
    lm: js.LM, prompt: str, width: int, steps: int
) -> tuple[js.Sequences, list[tuple[float, str]]]:
    """The beams, best first, and their log-probability and text."""
    beams = lm.prefill(prompt)
    start, totals = beams.lengths[0], np.zeros(1)
    for _ in range(steps):
        scores = np.asarray(jax.nn.log_softmax(beams.scores))
        tokens = np.argsort(-scores, axis=1)[:, :width]  # the likeliest of each beam
        children = (totals[:, None] + np.take_along_axis(scores, tokens, axis=1)).ravel()
        best = np.argsort(-children, kind="stable")[:width]
        totals = children[best]
        # Forking and choosing copy nothing; only what goes on gets a state of its own.
        chosen = [[int(token)] for token in tokens.ravel()[best]]
        beams, _ = lm.decode(beams.fork(width)[best.tolist()], 1, forced=chosen, ignore_eos=True)
    texts = [lm.tokenizer.decode(tokens[start:]) for tokens in beams.tokens]
    return beams, list(zip(totals.tolist(), texts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default="The captain looked at the sea and")
    parser.add_argument("--model", default="demo", help="a model folder, or demo")
    parser.add_argument("--width", type=int, default=4, help="beams")
    parser.add_argument("--steps", type=int, default=16, help="tokens of each")
    args = parser.parse_args()
    with js.LM.load(args.model) as lm:
        for total, text in beam_search(lm, args.prompt, args.width, args.steps)[1]:
            print(f"{total:.2f}: …{text}\n")


if __name__ == "__main__":
    main()
