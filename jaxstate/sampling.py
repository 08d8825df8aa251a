"""Choosing the next token on the device, one row independent of the other.

A row's draw is keyed by (seed, request, position of the token): never by its row, its neighbours or the step, so that
the same request draws the same tokens in any company.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxstate.typing import Array, Bool, Float32, Int32, UInt32

LEAST_TEMPERATURE = 1e-6
"""Below this a draw is the likeliest token; dividing scores by less would overflow."""


class Sampling(struct.PyTreeNode):
    """Sampling parameters of every row; the fields are those of `SamplingParams`, `request` a hash of the id."""

    temperature: Float32[Any, "rows"]
    top_k: Int32[Any, "rows"]
    top_p: Float32[Any, "rows"]
    min_p: Float32[Any, "rows"]
    seed: UInt32[Any, "rows"]
    request: UInt32[Any, "rows"]


def request_hash(request: str) -> int:
    """32 bits that stand for a request's id in the keys of its draws, the same in every process."""
    return int.from_bytes(
        hashlib.blake2s(request.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little"
    )


def sample(
    logits: Float32[Array, "rows vocab"],
    sampling: Sampling,
    position: Int32[Array, "rows"],
    forced: Int32[Array, "rows"] | None = None,
    filters: bool | None = None,
) -> tuple[Int32[Array, "rows"], Float32[Array, "rows"], Bool[Array, "rows"]]:
    """Draws one token per row, for the given position of its text, or takes the forced one where it is not -1.

    Whether any row has a top-k, top-p or min-p is looked at on the device, and draws are skipped if no row asks for
    one; on a GPU the device waits for the host at each such branch. With `filters` True or False, which then must hold,
    there is none. The tokens are the same.

    Returns the tokens, their log-probabilities under the unmodified distribution, and whether the row's logits were all
    finite (where not, the token is 0 and means nothing).
    """
    finite = jnp.isfinite(logits).all(axis=-1)
    greedy = sampling.temperature < LEAST_TEMPERATURE
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if filters is None:
        drawn = lax.cond(
            greedy.all(), lambda: best, lambda: _draw(logits, sampling, position, None)
        )
    else:
        drawn = _draw(logits, sampling, position, filters)
    token = jnp.where(greedy, best, drawn)
    if forced is not None:
        token = jnp.where(forced >= 0, forced, token)
    token = jnp.where(finite, token, 0)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1, mode="clip")[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1), finite


def _draw(logits: Array, sampling: Sampling, position: Array, filters: bool | None) -> Array:
    temperature = jnp.maximum(sampling.temperature, LEAST_TEMPERATURE)
    scaled = logits / temperature[:, None]
    filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)

    def some():
        return jnp.where(filtered[:, None], keep(scaled, sampling), True)

    def none():
        return jnp.ones_like(scaled, jnp.bool_)

    if filters is None:
        kept = lax.cond(filtered.any(), some, none)
    else:
        kept = some() if filters else none()
    noise = jax.vmap(lambda s, r, p: _noise(s, r, p, logits.shape[-1]))(
        sampling.seed, sampling.request, position
    )
    # The Gumbel-max trick: the largest of log p + Gumbel noise is a draw from p.
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def keep(scaled: Float32[Array, "rows vocab"], sampling: Sampling) -> Bool[Array, "rows vocab"]:
    """Which tokens top-k, then top-p among those, then min-p leave in each row; ties at a border all stay."""
    vocab = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    ranks = jnp.arange(vocab, dtype=jnp.int32)
    ordered = jnp.where(ranks < k[:, None], ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A token stays while those likelier than it do not yet reach the share; the likeliest always stays.
    last = (
        jnp.maximum(((before < sampling.top_p[:, None]) & (ranks < k[:, None])).sum(axis=-1), 1) - 1
    )
    last = jnp.where(sampling.top_p < 1, last, k - 1)
    border = jnp.take_along_axis(ordered, last[:, None], axis=-1, mode="clip")
    border = jnp.maximum(border, ordered[:, :1] + jnp.log(sampling.min_p)[:, None])
    return scaled >= border


def _noise(seed: Array, request: Array, position: Array, vocab: int) -> Array:
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, request), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
