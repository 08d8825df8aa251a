"""A language model small enough to check by hand, with states of every kind a cache has to cope with.

Its recurrence is h = h / 2 + x with x = token + 1, in two groups: `whole` keeps one block a sequence, `paged` one block
per 4 tokens. A state is a tuple of a float vector and a dict with a token count, so a leaf that is skipped shows: every
leaf enters the scores. The next token depends on the whole text.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxstate.state import GroupSpec, StateCache
from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import RowIds, Rows

VOCAB = 13


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = ()
    layers: int = 2
    paged_block: int | None = 4
    blocks: int | None = None


class ToyLM(nnx.Module):
    """See the module's docstring; `logits` is a fixed pseudo-random function of the hidden value."""

    def __init__(self, config: ToyConfig | None = None):
        self.config = config or ToyConfig()
        self.weight = nnx.Param(
            jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)), jnp.float32)
        )

    def groups(self):
        leaves = (
            jax.ShapeDtypeStruct((1,), jnp.float32),
            {
                "count": jax.ShapeDtypeStruct((), jnp.int32),
                "last": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
            },
        )
        c = self.config
        return (
            GroupSpec("whole", "recurrent", c.layers, leaves, blocks=c.blocks),
            GroupSpec("paged", "recurrent", c.layers, leaves, block_size=c.paged_block),
        )

    def prefill(self, tokens, positions, rows, cache: StateCache):
        hidden, groups = 0.0, dict(cache.groups)
        for name in groups:
            for layer in range(self.config.layers):
                out, groups[name] = _packed(groups[name], layer, tokens, rows[name])
                hidden = hidden + out
        return hidden, cache.replace(groups=groups)

    def decode(self, tokens, positions, rows, cache: StateCache):
        packed = {name: _as_rows(ids) for name, ids in rows.items()}
        return self.prefill(tokens, positions, packed, cache)

    def logits(self, hidden):
        return jnp.sin(7 * hidden @ self.weight[...]) * 3


def _as_rows(ids: RowIds) -> Rows:
    n = ids.read_ids.shape[0]
    none = jnp.zeros((n, 0), jnp.int32)
    return Rows(jnp.arange(n + 1, dtype=jnp.int32), ids.read_ids, ids.write_ids, none, none)


def _packed(leaves, layer, tokens, rows: Rows):
    """Walks the packed tokens one by one; row r's states are those at its own tokens."""
    start = jax.tree.map(lambda leaf: read_blocks(leaf, layer, rows.read_ids), leaves)
    offsets = jnp.asarray(rows.offsets)

    def one(states, inputs):
        token, t = inputs
        row = jnp.clip(jnp.searchsorted(offsets[1:], t, side="right"), 0, offsets.shape[0] - 2)
        h, aux = states
        x = token.astype(jnp.float32) + 1
        h = h.at[row].set(h[row] / 2 + x)
        aux = {
            "count": aux["count"].at[row].add(1),
            "last": aux["last"]
            .at[row]
            .set(jnp.stack([aux["last"][row, 1], x.astype(jnp.bfloat16)])),
        }
        here = jax.tree.map(lambda leaf: leaf[row], (h, aux))
        return (h, aux), here

    t = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    _, after = lax.scan(one, start, (jnp.asarray(tokens), t))
    live = jnp.zeros(tokens.shape[0], bool)
    for r in range(offsets.shape[0] - 1):
        live |= (t >= offsets[r]) & (t < offsets[r + 1]) & (rows.write_ids[r] != 0)

    def store(leaf, trajectory):
        positions = rows.checkpoint_positions
        for m in range(positions.shape[1]):
            at = jnp.clip(offsets[:-1] + positions[:, m] - 1, 0, tokens.shape[0] - 1)
            ids = jnp.where(positions[:, m] > 0, rows.checkpoint_ids[:, m], 0)
            leaf = write_blocks(leaf, layer, ids, trajectory[at])
        ids = jnp.where(offsets[1:] > offsets[:-1], rows.write_ids, 0)
        return write_blocks(leaf, layer, ids, trajectory[jnp.maximum(offsets[1:] - 1, 0)])

    leaves = jax.tree.map(store, leaves, after)
    h, aux = after
    out = jnp.concatenate(
        [h, aux["count"][:, None] / 8.0, aux["last"].astype(jnp.float32).sum(1, keepdims=True) / 8],
        axis=1,
    )
    return jnp.where(live[:, None], out, 0.0), leaves


def continue_by_hand(
    prompt: tuple[int, ...], steps: int, weight, config: ToyConfig | None = None
) -> list[int]:
    """Greedy continuation in plain numpy, from the recurrence's closed form over the whole text."""
    config, text = config or ToyConfig(), list(prompt)
    for _ in range(steps):
        x = np.asarray(text, np.float64) + 1
        h = float((x * 0.5 ** np.arange(len(x))[::-1]).sum())
        last = (x[-2] if len(x) > 1 else 0.0) + x[-1]
        hidden = np.array([h, len(x) / 8, last / 8]) * config.layers * 2
        scores = np.sin(7 * hidden @ np.asarray(weight, np.float64))
        text.append(int(scores.argmax()))
        if text[-1] in config.eos_token_ids:
            break
    return text[len(prompt) :]
