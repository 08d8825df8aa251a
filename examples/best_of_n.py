"""Several continuations of one prompt, read once; the likeliest is shown last.

python examples/best_of_n.py "The captain looked" --n 4
"""

import argparse

import jaxstate as js


def best_of_n(lm: js.LM, prompt: str, n: int, steps: int, seed: int = 0) -> list[tuple[float, str]]:
    """The continuations with their log-probability per token, the best one last."""
    branches = lm.prefill(prompt).fork(n)
    _, out = lm.decode(branches, steps, temperature=0.9, top_p=0.95, seed=seed)
    scores = out.sum_logprob / [len(tokens) for tokens in out.tokens]
    return sorted(zip(scores.tolist(), out.text, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompt", nargs="?", default="The captain looked at the sea and")
    parser.add_argument("--model", default="demo", help="a model folder, or demo")
    parser.add_argument("--n", type=int, default=4, help="continuations")
    parser.add_argument("--steps", type=int, default=32, help="tokens of each")
    args = parser.parse_args()
    with js.LM.load(args.model) as lm:
        for score, text in best_of_n(lm, args.prompt, args.n, args.steps):
            print(f"{score:.2f} a token: …{text}\n")


if __name__ == "__main__":
    main()
