"""Bits per byte of a text file under an exported model.

    python evaluate.py --model demo_model heldout.txt

Each document is led by ``<|endoftext|>`` and read from a zero state to its end, the state carried
along; every token after the lead counts, and so do all bytes of the documents' UTF-8 text.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import data
import jax
import jax.numpy as jnp
import model
import numpy as np
from tokenizers import Tokenizer


@partial(jax.jit, static_argnums=(0, 6))
def _window(config, params, state, tokens, targets, counted, dtype):
    hidden, state = model.forward(config, params, tokens, state, dtype=dtype)
    losses = model.token_losses(params, hidden, targets, dtype)
    return jnp.sum(jnp.where(counted, losses, 0), axis=1), state


def document_nats(
    config: model.Config,
    params: model.Params,
    documents: list[np.ndarray],
    *,
    window: int = 1024,
    reset: bool = False,
    dtype=jnp.float32,
) -> np.ndarray:
    """Returns each document's total loss in nats; ``reset`` forgets the state at every window."""
    batch = len(documents)
    longest = max(len(doc) for doc in documents) - 1
    length = -(-longest // window) * window
    tokens = np.zeros((batch, length + 1), np.int32)
    counted = np.zeros((batch, length), bool)
    for lane, doc in enumerate(documents):
        tokens[lane, : len(doc)] = doc
        counted[lane, : len(doc) - 1] = True
    zero = state = model.init_state(config, batch, dtype)
    totals = []
    for at in range(0, length, window):
        part = slice(at, at + window)
        inputs, targets = tokens[:, part], tokens[:, at + 1 : at + window + 1]
        state = zero if reset else state
        nats, state = _window(config, params, state, inputs, targets, counted[:, part], dtype)
        totals.append(nats)
    return np.sum(np.asarray(totals, np.float64), axis=0)


def read_documents(
    tokenizer: Tokenizer, path: Path, limit: int | None = None
) -> tuple[list[np.ndarray], list[int]]:
    """Returns every document's tokens, led by the separator, and its bytes.

    ``limit`` keeps the first tokens only, and the bytes that they stand for.
    """
    texts = list(data.documents(data.read_text(path)))
    tokens, starts = data.pack_documents(tokenizer, texts)
    documents = np.split(tokens, starts[1:])
    if limit is None:
        return documents, [len(text.encode()) for text in texts]
    documents = [doc[: limit + 1] for doc in documents]
    return documents, [len(tokenizer.decode(doc[1:].tolist()).encode()) for doc in documents]


def bits_per_byte(nats: np.ndarray, sizes: list[int]) -> float:
    """Returns total bits over total bytes."""
    return float(np.sum(nats) / np.log(2) / np.sum(sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder with the exported model")
    parser.add_argument("--limit", type=int, help="first tokens of each document only")
    parser.add_argument("--window", type=int, default=1024, help="tokens per call")
    parser.add_argument("--reset", action="store_true", help="forget the state at every window")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    config, params = model.load(args.model)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    documents, sizes = read_documents(tokenizer, args.text, args.limit)
    options = {"window": args.window, "reset": args.reset, "dtype": jnp.dtype(args.dtype)}
    nats = document_nats(config, params, documents, **options)
    scored = sum(len(doc) - 1 for doc in documents)
    report = {
        "bits_per_byte": round(bits_per_byte(nats, sizes), 5),
        "nats_per_token": round(float(nats.sum()) / scored, 5),
        "tokens": scored,
        "bytes": sum(sizes),
        "per_document": [round(bits_per_byte(n, [s]), 4) for n, s in zip(nats, sizes, strict=True)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
