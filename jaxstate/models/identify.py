"""Which model this is, as a file can say it: a name and a hash."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstate.models.base import CausalLM
from jaxstate.models.tensors import Unread
from jaxstate.state.identity import Identity
from jaxstate.typing import Array, UInt32


def identify(model: CausalLM) -> Identity:
    """The model's name, and a hash of its config and of its tensors' names, shapes, dtypes and every bit."""
    named = jax.tree_util.tree_flatten_with_path(model)[0]
    digest = hashlib.blake2b(repr(model.config).encode(), digest_size=16)
    # All are on their way before the first is waited for, but for what is still to be read: that may not all fit.
    sums = jax.device_get(
        [
            jax.device_get(_checksum(jnp.asarray(leaf)))
            if isinstance(leaf, Unread)
            else _checksum(leaf)
            for _, leaf in named
        ]
    )
    for (path, leaf), values in zip(named, sums, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        digest.update(f"{name} {leaf.shape} {leaf.dtype}".encode() + values.tobytes())
    dtype = getattr(model, "dtype", named[0][1].dtype)
    return Identity(type(model).__name__, digest.hexdigest(), np.dtype(dtype).name)


@jax.jit
def _checksum(values: Array) -> UInt32[Array, "2"]:
    """Two sums over hashes of each element's bits and place; integers, so that no order of summing changes them."""
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize]
    bits = lax.bitcast_convert_type(values, width).astype(jnp.uint32).ravel()
    place = lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B9)
    first = _mixed(bits + place)
    return jnp.stack([first.sum(), _mixed(first ^ place ^ bits).sum()]).astype(jnp.uint32)


def _mixed(x: Array) -> Array:
    """A bijection of 32 bits in which every bit depends on every other (MurmurHash3's finaliser, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
