"""State layouts in every container and dtype that a cache has to cope with, and pools to compare bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.state import CacheSpec, GroupSpec, StateCache


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Named(NamedTuple):
    conv: jax.ShapeDtypeStruct
    rest: tuple


LAYOUTS = {
    "one array": leaf(2, 2),
    "dict": {"conv": leaf(2, 2, dtype=jnp.bfloat16), "ssm": leaf(2, 2)},
    # What a delta-rule layer keeps: bf16 conv window, float32 state, and two records.
    "tuple": (
        leaf(2, 2, dtype=jnp.bfloat16), leaf(2, 2), leaf(3), leaf(2, 2, dtype=jnp.bfloat16),
    ),
    "nested": Named(leaf(3), ([leaf(dtype=jnp.int32), None], {"flag": leaf(3, dtype=jnp.bool_)})),
    "bytes": {"levels": leaf(3, dtype=jnp.uint8), "none": None},
}  # fmt: skip
"""Few different shapes, so that few programs are compiled: the containers are what differs."""

BLOCKS = 6

SPEC = CacheSpec(
    tuple(
        GroupSpec(name, "recurrent", 2, leaves, blocks=BLOCKS) for name, leaves in LAYOUTS.items()
    ),
    rows=2,
    max_len=8,
)
"""One group of each layout, with 2 layers and 6 blocks, null among them."""


def everywhere(ids):
    """The same value for every group."""
    return dict.fromkeys(LAYOUTS, ids)


def noise(like, seed: int = 0):
    """A tree of random arrays with these shapes and dtypes, none of them zero anywhere (flags are True)."""
    rng = np.random.default_rng(seed)

    def make(x):
        if x.dtype == np.bool_:
            return jnp.ones(x.shape, bool)
        values = rng.integers(1, 100, size=x.shape)
        if jnp.issubdtype(x.dtype, jnp.floating):
            values = values / 8
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(make, like)


def noisy_cache() -> StateCache:
    """A cache whose every element, in the null block too, is random and not zero."""
    return noise(jax.eval_shape(lambda: StateCache.create(SPEC)))


def raw(array) -> np.ndarray:
    """The bytes of `[layers, blocks, …]` as `[layers, blocks, bytes]`, so that NaN equals NaN of the same bits."""
    array = np.asarray(array)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape[:2], -1)


def changed_blocks(before: StateCache, after: StateCache) -> dict[str, set[int]]:
    """Which blocks of each group differ in any bit of any layer of any leaf."""
    found = {}
    for group in before.groups:
        found[group] = set()
        pairs = zip(
            jax.tree.leaves(before.groups[group]),
            jax.tree.leaves(after.groups[group]),
            strict=True,
        )
        for old, new in pairs:
            assert (old.shape, old.dtype) == (new.shape, new.dtype)
            found[group] |= set(np.flatnonzero((raw(old) != raw(new)).any((0, 2))).tolist())
    return found
