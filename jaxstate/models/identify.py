"""Which model this is, as a file can say it: a name and a hash."""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from jaxstate.models.base import CausalLM
from jaxstate.state.identity import Identity

SAMPLED = 64
"""Weights of each tensor that enter a model's fingerprint."""


def identify(model: CausalLM) -> Identity:
    """The model's name, and a hash of its config, its tensors' names, shapes and dtypes and a sample of each."""
    named = jax.tree_util.tree_flatten_with_path(model)[0]
    digest = hashlib.blake2b(repr(model.config).encode(), digest_size=16)
    sample = jax.jit(lambda xs: [x.ravel()[:: max(1, x.size // SAMPLED)][:SAMPLED] for x in xs])
    for (path, leaf), values in zip(
        named, jax.device_get(sample([leaf for _, leaf in named])), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        digest.update(f"{name} {leaf.shape} {leaf.dtype}".encode() + values.tobytes())
    dtype = getattr(model, "dtype", named[0][1].dtype)
    return Identity(type(model).__name__, digest.hexdigest(), np.dtype(dtype).name)
