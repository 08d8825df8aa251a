"""Trains the demo model and exports it in the hub's mamba2 format.

    python train.py --tokens train.npz --tokenizer tokenizer.json --out demo_model --minutes 8

A run that is killed continues from its last checkpoint when started again with the same options.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import evaluate
import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
from batches import Batches, paragraph_breaks
from tokenizers import Tokenizer


class TrainState(NamedTuple):
    """Everything a checkpoint holds on the device's side."""

    params: model.Params
    opt_state: optax.OptState
    carried: model.State


def orthogonalize(g: jax.Array, steps: int = 5) -> jax.Array:
    """Returns the nearest semi-orthogonal matrices, roughly, by Newton-Schulz in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.astype(jnp.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True) + 1e-7).astype(
        x.dtype
    )
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if tall else x
    return x.astype(jnp.float32) * max(1.0, x.shape[-2] / x.shape[-1]) ** 0.5


def scale_by_muon(parts: tuple[int, ...], momentum: float = 0.95) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): orthogonalized Nesterov momentum; in_proj one part at a time."""
    cuts = np.cumsum(parts)[:-1]

    def update(updates, trace, params=None):
        del params
        trace = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, trace, updates)
        nesterov = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, trace, updates)

        def direction(g):
            pieces = jnp.split(g, cuts, axis=-2) if g.shape[-2] == sum(parts) else [g]
            return jnp.concatenate([orthogonalize(p) for p in pieces], axis=-2)

        return jax.tree.map(direction, nesterov), trace

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


class Rates(NamedTuple):
    """Learning rates and decoupled weight decays; arguments of the step, so one program serves all."""

    matrix: float
    embedding: float
    vector: float
    matrix_decay: float
    embedding_decay: float

    def scaled(self, factor: float) -> Rates:
        rates = [np.float32(factor * rate) for rate in self[:3]]
        return Rates(*rates, *map(np.float32, self[3:]))


def make_optimizer(config: model.Config, rates: Rates) -> optax.GradientTransformation:
    """Muon for the layers' projections, AdamW for the embedding and for the small parameters."""

    def label(path, leaf):
        del leaf
        name = path[-1].key
        if name in ("mixer.in_proj.weight", "mixer.out_proj.weight"):
            return "matrix"
        return "embedding" if name == "embeddings.weight" else "vector"

    def group(direction, rate, decay=0.0) -> optax.GradientTransformation:
        decayed = optax.add_decayed_weights(decay)
        return optax.chain(direction, decayed, optax.scale_by_learning_rate(rate))

    adam = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-10)
    groups = {
        "matrix": group(scale_by_muon(config.in_proj_parts), rates.matrix, rates.matrix_decay),
        "embedding": group(adam, rates.embedding, rates.embedding_decay),
        "vector": group(adam, rates.vector),
    }
    return optax.partition(groups, lambda params: jax.tree_util.tree_map_with_path(label, params))


def learning_rate(progress: float, step: int, warmup: int, decay: float) -> float:
    """Warm-up, constant, then linear to zero over the last ``decay`` of the run."""
    return min(1.0, (step + 1) / warmup, max(0.0, 1.0 - progress) / decay)


def make_step(config: model.Config, *, remat: str, unroll: bool) -> Callable:
    """Returns the compiled training step: state and batch to state and mean loss in nats."""

    def loss_of(params, carried, tokens):
        hidden, carried = model.forward(
            config, params, tokens[:, :-1], carried, remat=remat, unroll=unroll
        )
        return jnp.mean(model.token_losses(params, hidden, tokens[:, 1:])), carried

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens, fresh, rates: Rates):
        carried = jax.tree.map(
            lambda v: jnp.where(fresh.reshape(1, -1, *[1] * (v.ndim - 2)), 0, v), state.carried
        )
        (loss, carried), grads = jax.value_and_grad(loss_of, has_aux=True)(
            state.params, carried, tokens
        )
        optimizer = make_optimizer(config, rates)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, carried), loss

    return step


def init_train_state(config: model.Config, lanes: int, seed: int) -> TrainState:
    """Returns the state before the first step."""
    params = model.init_params(config, seed)
    optimizer = make_optimizer(config, Rates(*[0.0] * 5))
    return TrainState(params, optimizer.init(params), model.init_state(config, lanes))


def save_checkpoint(path: Path, state: TrainState, meta: dict) -> None:
    """Writes a checkpoint; a kill at any moment leaves the old or the new one, whole."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    raw = {
        f"{n}": leaf.view(np.uint8 if leaf.ndim else leaf.dtype) for n, leaf in enumerate(leaves)
    }
    partial_path = path.with_suffix(".partial")
    with open(partial_path, "wb") as out:
        np.savez(out, meta=json.dumps(meta), **raw)
        out.flush()
        os.fsync(out.fileno())
    partial_path.replace(path)


def load_checkpoint(path: Path, like: TrainState) -> tuple[TrainState, dict]:
    """Reads what ``save_checkpoint`` wrote for a state of the same structure."""
    leaves, treedef = jax.tree.flatten(like)
    with np.load(path) as saved:
        meta = json.loads(str(saved["meta"]))
        loaded = [
            jnp.asarray(saved[f"{n}"].view(leaf.dtype).reshape(leaf.shape))
            for n, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(treedef, loaded), meta


def train(args: argparse.Namespace) -> dict:
    """Runs the training to its end and returns what it reached."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    vocab = tokenizer.get_vocab_size()
    config = model.Config(
        vocab_size=vocab,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        state_size=args.state,
        head_dim=args.head_dim,
        chunk_size=args.chunk,
    )
    with np.load(args.tokens) as packed:
        tokens = packed["tokens"]
    bytes_per_token = args.bytes_per_token or _bytes_per_token(tokenizer, tokens)
    ends = np.array([tokenizer.decode([i]).endswith("\n\n") for i in range(vocab)])
    ends[0] = True  # a document's first token
    batches = Batches(
        tokens,
        paragraph_breaks(tokens, ends),
        lanes=args.lanes,
        length=args.length,
        windows=args.windows,
        seed=args.seed,
    )
    rates = Rates(
        *(getattr(args, f"{name}_rate") for name in Rates._fields[:3]),
        args.weight_decay,
        args.embedding_decay,
    )
    state = init_train_state(config, args.lanes, args.seed)
    count = sum(v.size for v in jax.tree.leaves(state.params))
    meta = {"step": 0, "elapsed": 0.0}
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.npz"
    if checkpoint.exists():
        state, meta = load_checkpoint(checkpoint, state)
        print(f"resumed at step {meta['step']}, {meta['elapsed']:.0f} s", flush=True)
    step_function = make_step(config, remat=args.remat, unroll=args.unroll)
    per_step = args.lanes * args.length
    print(
        f"{count:,} parameters, {len(tokens):,} tokens of {bytes_per_token:.3f} bytes, "
        f"{per_step:,} a step, {jax.devices()[0].device_kind}",
        flush=True,
    )

    def progress(step: int, elapsed: float) -> float:
        done = step / args.steps if args.steps else 0.0
        return max(done, elapsed / (60 * args.minutes) if args.minutes else 0.0)

    losses: list[jax.Array] = []
    step, spent = meta["step"], meta["elapsed"]
    clock = time.perf_counter()
    last_print, last_save, counted_from = spent, spent, step
    while (done := progress(step, spent)) < 1.0:
        rate = learning_rate(done, step, args.warmup, args.decay)
        batch = batches(step)
        state, loss = step_function(state, batch.tokens, batch.fresh, rates.scaled(rate))
        losses.append(loss)
        step += 1
        if len(losses) > 2:
            losses[-3].block_until_ready()  # stay two steps ahead of the device, no more
        if step == meta["step"] + 1:
            jax.block_until_ready(loss)
            compiled = time.perf_counter() - clock
            print(f"compiled in {compiled:.1f} s", flush=True)
            clock += compiled
        spent = meta["elapsed"] + time.perf_counter() - clock
        if step % args.print_every == 0:
            mean = float(np.mean([float(x) for x in losses]))
            losses = []
            now = meta["elapsed"] + time.perf_counter() - clock
            speed = (step - counted_from) * per_step / max(now - last_print, 1e-9)
            last_print, counted_from = now, step
            print(
                f"step {step:6d}  {now:6.1f} s  loss {mean:.4f}  "
                f"bits/byte {mean / np.log(2) / bytes_per_token:.4f}  "
                f"rate {rate:.3f}  {speed / 1e6:.3f} Mtok/s",
                flush=True,
            )
            if not np.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {step}: lower the rates")
        if spent - last_save > args.save_every:
            save_checkpoint(checkpoint, state, {"step": step, "elapsed": spent})
            model.export(config, state.params, args.out)
            last_save = spent
    jax.block_until_ready(state)
    spent = meta["elapsed"] + time.perf_counter() - clock
    save_checkpoint(checkpoint, state, {"step": step, "elapsed": spent})
    model.export(config, state.params, args.out)
    if args.tokenizer.resolve() != (args.out / "tokenizer.json").resolve():
        shutil.copy(args.tokenizer, args.out / "tokenizer.json")
    result = {
        "parameters": count,
        "steps": step,
        "tokens": step * per_step,
        "epochs": round(step * per_step / len(tokens), 2),
        "seconds": round(spent, 1),
        "config": dataclasses.asdict(config),
    }
    if args.heldout:
        result["heldout_bits_per_byte"] = _held_out(args, tokenizer)
    return result


def _bytes_per_token(tokenizer: Tokenizer, tokens: np.ndarray) -> float:
    sample = tokens[: 1 << 18]
    return len(tokenizer.decode(sample.tolist()).encode()) / len(sample)


def _held_out(args: argparse.Namespace, tokenizer: Tokenizer) -> float:
    """Bits per byte of the held-out text under the exported weights."""
    config, params = model.load(args.out)
    documents, sizes = evaluate.read_documents(tokenizer, args.heldout, args.heldout_limit)
    nats = evaluate.document_nats(config, params, documents, dtype=jnp.bfloat16)
    return round(evaluate.bits_per_byte(nats, sizes), 5)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=Path, required=True, help="what data.py pack wrote")
    add("--tokenizer", type=Path, required=True)
    add("--out", type=Path, required=True, help="folder for checkpoint and model")
    add("--heldout", type=Path, help="cleaned text to score at the end")
    add("--heldout-limit", type=int, help="first tokens of each held-out document only")
    add("--steps", type=int, default=0, help="0: no limit")
    add("--minutes", type=float, default=0.0, help="0: no limit; compilation does not count")
    add("--layers", type=int, default=11)
    add("--width", type=int, default=384)
    add("--state", type=int, default=64)
    add("--head-dim", type=int, default=64)
    add("--chunk", type=int, default=64)
    add("--lanes", type=int, default=160, help="passages side by side")
    add("--length", type=int, default=512, help="tokens per lane and step")
    add("--windows", type=int, default=16, help="steps per passage, the state carried")
    add("--matrix-rate", type=float, default=0.025)
    add("--embedding-rate", type=float, default=0.004)
    add("--vector-rate", type=float, default=0.004)
    add("--weight-decay", type=float, default=0.06)
    add("--embedding-decay", type=float, default=0.0)
    add("--warmup", type=int, default=100)
    add("--decay", type=float, default=0.8, help="last part of the run in which the rate falls")
    add("--remat", choices=["none", "ssd", "layer"], default="none", help="what to recompute")
    add(
        "--unroll",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile every layer by itself: slower to build, faster to run",
    )
    add("--bytes-per-token", type=float, default=0.0, help="for the progress lines; 0: measured")
    add("--print-every", type=int, default=50)
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.steps and not args.minutes:
        parser.error("give --steps, --minutes or both")
    return args


if __name__ == "__main__":
    print(json.dumps(train(parse_args())))
