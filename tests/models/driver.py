"""Runs a model as the engine does: packed rows, blocks by id, and NaN in every block that nobody wrote."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models import load_model
from jaxstate.state import CacheSpec, StateCache
from pallas_kernels.rows import RowIds, Rows

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
VARIANTS = sorted(path.parent.name for path in FIXTURES.glob("*/golden.npz"))

# One shape for every prefill and one for every decode, so that each model is compiled twice.
TOKENS, ROWS, BLOCKS = 208, 6, 10


@functools.cache
def model_of(variant, dtype="float32"):
    return load_model(FIXTURES / variant, dtype)


@functools.cache
def golden(variant):
    with np.load(FIXTURES / variant / "golden.npz") as file:
        return dict(file)


@jax.jit
def _prefill(model, tokens, rows, cache):
    with jax.default_matmul_precision("highest"):
        hidden, cache = model.prefill(tokens, jnp.zeros_like(tokens), {"mamba": rows}, cache)
        return model.logits(hidden), cache


@jax.jit
def _decode(model, tokens, rows, cache):
    with jax.default_matmul_precision("highest"):
        hidden, cache = model.decode(tokens, jnp.zeros_like(tokens), {"mamba": rows}, cache)
        return model.logits(hidden), cache


def new_cache(model):
    """A cache in which every byte is NaN."""
    spec = CacheSpec(model.groups(), rows=BLOCKS - 1, max_len=1024)
    return StateCache.create(spec, poison=True)


def prefill(model, cache, rows, *, lead=0, checkpoint=None):
    """Packs rows (read, write, tokens) one after another; returns each row's logits, and the cache.

    `lead` tokens of padding come first; `checkpoint` is (row, position, block).
    """
    offsets = np.full(ROWS + 1, lead, np.int32)
    ids = np.zeros((2, ROWS), np.int32)
    points = np.zeros((2, ROWS, 1), np.int32)
    tokens = np.full(TOKENS, 7, np.int32)
    for r, (read, write, new) in enumerate(rows):
        offsets[r + 1 :] = offsets[r] + len(new)
        ids[:, r] = read, write
        tokens[offsets[r] : offsets[r + 1]] = new
    if checkpoint is not None:
        row, position, block = checkpoint
        points[:, row, 0] = block, position
    packed = Rows(*map(jnp.asarray, (offsets, *ids, *points)))
    logits, cache = _prefill(model, jnp.asarray(tokens), packed, cache)
    return [np.asarray(logits)[offsets[r] : offsets[r + 1]] for r in range(len(rows))], cache


def decode(model, cache, rows):
    """One token for each row (read, write, token); returns each row's logits, and the cache."""
    ids, tokens = np.zeros((2, ROWS), np.int32), np.full(ROWS, 7, np.int32)
    for r, (read, write, token) in enumerate(rows):
        ids[:, r], tokens[r] = (read, write), token
    logits, cache = _decode(model, jnp.asarray(tokens), RowIds(*map(jnp.asarray, ids)), cache)
    return np.asarray(logits)[: len(rows)], cache


def block(cache, index):
    """One block's state, leaves `[layers, ...]`."""
    return {name: np.asarray(leaf[:, index]) for name, leaf in cache.groups["mamba"].items()}
