"""A language model small enough to check by hand, with states of every kind a cache has to cope with.

Its recurrence is h = h / 2 + x with x = token + 1, in two groups: `whole` keeps one block a sequence, `paged` one block
per 4 tokens. A state is a tuple of a float vector and a dict with a token count and the last two inputs, so a leaf that
is skipped shows: every leaf enters the scores. The scores are whole numbers modulo 61, over 8, so that they come out
the same in any order of adding, and plain numpy gets exactly the same tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxstate.state import GroupSpec, StateCache
from pallas_kernels.blocks import gather_blocks, scatter_blocks
from pallas_kernels.rows import RowIds, Rows

VOCAB = 13

WEIGHT = np.random.default_rng(0).integers(1, 61, size=(3, VOCAB)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = ()
    layers: int = 2
    paged_block: int | None = 4
    blocks: int | None = None
    paged_blocks: int | None = None


class ToyLM(nnx.Module):
    """See the module's docstring; texts of `breaks_at` tokens and more have scores that are not finite."""

    def __init__(self, config: ToyConfig | None = None, breaks_at: float = np.inf):
        self.config = config or ToyConfig()
        self.weight = nnx.Param(jnp.asarray(WEIGHT))
        self.breaks_at = nnx.Param(jnp.float32(breaks_at))

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
            GroupSpec("paged", "recurrent", c.layers, leaves, c.paged_block, c.paged_blocks),
        )

    def prefill(self, tokens, positions, rows, cache: StateCache):
        hidden, groups = 0.0, dict(cache.groups)
        for name in groups:
            out, groups[name] = _packed(groups[name], tokens, rows[name])
            hidden = hidden + out
        return hidden, cache.replace(groups=groups)

    def decode(self, tokens, positions, rows, cache: StateCache):
        packed = {name: _as_rows(ids) for name, ids in rows.items()}
        return self.prefill(tokens, positions, packed, cache)

    def decoder(self):
        return self.decode

    def logits(self, hidden):
        scores = jnp.mod(jnp.dot(hidden, self.weight[...], precision="highest"), 61) / 8
        count = hidden[..., 1:2] / (2 * self.config.layers)
        return jnp.where(count < self.breaks_at[...], scores, jnp.nan)


def _as_rows(ids: RowIds) -> Rows:
    n = ids.read_ids.shape[0]
    none = jnp.zeros((n, 0), jnp.int32)
    return Rows(jnp.arange(n + 1, dtype=jnp.int32), ids.read_ids, ids.write_ids, none, none)


def _packed(leaves, tokens, rows: Rows):
    """Walks the packed tokens one by one, all layers at once; a row's states are those at its own tokens."""
    offsets, count = jnp.asarray(rows.offsets), tokens.shape[0]
    t = jnp.arange(count, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(offsets[1:], t, side="right"), 0, offsets.shape[0] - 2)
    start = jax.tree.map(lambda leaf: gather_blocks(leaf, rows.read_ids), leaves)
    x = jnp.asarray(tokens).astype(jnp.float32) + 1

    def one(states, inputs):
        x, row = inputs
        h, aux = states
        before, shifted = h[:, row], aux["last"][:, row, 1]
        last = jnp.stack([shifted, jnp.full_like(shifted, x)], axis=1)
        h = h.at[:, row].set(before / 2 + x)
        aux = {
            "count": aux["count"].at[:, row].add(1),
            "last": aux["last"].at[:, row].set(last),
        }
        return (h, aux), jax.tree.map(lambda leaf: leaf[:, row], (h, aux))

    _, after = lax.scan(one, start, (x, row))

    # Where a row's state is stored: at its end, and at the checkpoints on the way.
    has_tokens = offsets[1:] > offsets[:-1]
    ids = jnp.concatenate(
        [
            jnp.where(has_tokens, rows.write_ids, 0),
            jnp.where(rows.checkpoint_positions > 0, rows.checkpoint_ids, 0).ravel(),
        ]
    )
    at = jnp.concatenate(
        [offsets[1:] - 1, (offsets[:-1, None] + rows.checkpoint_positions - 1).ravel()]
    )
    at = jnp.clip(at, 0, count - 1)
    leaves = jax.tree.map(
        lambda leaf, seen: scatter_blocks(leaf, ids, jnp.moveaxis(seen[at], 0, 1)), leaves, after
    )

    h, aux = after
    seen = jnp.stack(
        [
            jnp.floor(h[..., 0] * 1024),
            aux["count"].astype(jnp.float32),
            aux["last"].astype(jnp.float32).sum(-1),
        ],
        axis=-1,
    ).sum(axis=1)
    live = (t >= offsets[0]) & (t < offsets[-1]) & (rows.write_ids[row] != 0)
    return jnp.where(live[:, None], seen, 0.0), leaves


def state_by_hand(text: tuple[int, ...]):
    """The state after these tokens, as one layer's block holds it, in plain numpy."""
    h = np.float32(0)
    for token in text:
        h = h / np.float32(2) + np.float32(token + 1)
    last = [0, 0, *(token + 1 for token in text)][-2:]
    return (
        np.array([h]),
        {"count": np.int32(len(text)), "last": np.array(last, np.float32).astype(jnp.bfloat16)},
    )


def scores_by_hand(
    text: tuple[int, ...], weight=WEIGHT, config: ToyConfig | None = None
) -> np.ndarray:
    """The model's scores for the token after this text, in plain numpy."""
    (h,), aux = state_by_hand(text)
    seen = np.array([np.floor(h * 1024), aux["count"], aux["last"].astype(np.float64).sum()])
    scores = (seen * 2 * (config or ToyConfig()).layers) @ np.asarray(weight, np.float64)
    return np.mod(scores, 61) / 8


def continue_by_hand(
    prompt: tuple[int, ...], steps: int, weight=WEIGHT, config: ToyConfig | None = None
) -> list[int]:
    """Greedy continuation in plain numpy, each token from the whole text."""
    config, text = config or ToyConfig(), list(prompt)
    for _ in range(steps):
        text.append(int(scores_by_hand(tuple(text), weight, config).argmax()))
        if text[-1] in config.eos_token_ids:
            break
    return text[len(prompt) :]
