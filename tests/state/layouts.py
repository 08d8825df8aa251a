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
    "one array": leaf(3, 2),
    "dict": {"conv": leaf(3, 2, dtype=jnp.bfloat16), "ssm": leaf(2, 2)},
    # What a delta-rule layer keeps: bf16 conv window, float32 state, and two records.
    "tuple": (leaf(3, dtype=jnp.bfloat16), leaf(2, 2), leaf(4), leaf(2, 1, 3, dtype=jnp.bfloat16)),
    "list": [leaf(2, dtype=jnp.float16), leaf(1)],
    "namedtuple": Named(leaf(2), (leaf(dtype=jnp.int32), {"deep": leaf(1, 1)})),
    "scalars": (leaf(), leaf(dtype=jnp.int32), leaf(dtype=jnp.bool_)),
    "whole numbers": {
        "i8": leaf(2, dtype=jnp.int8),
        "u8": leaf(2, dtype=jnp.uint8),
        "u32": leaf(dtype=jnp.uint32),
        "flag": leaf(3, dtype=jnp.bool_),
    },
    "none inside": (leaf(2), None, {"empty": None, "full": leaf(1)}),
}


def spec_of(layout: str, *, blocks: int = 6, layers: int = 2) -> CacheSpec:
    """One group `g` of this layout, 6 blocks with null, and a second group that must not be touched."""
    other = GroupSpec("other", "recurrent", 1, leaf(2), blocks=blocks)
    group = GroupSpec("g", "recurrent", layers, LAYOUTS[layout], blocks=blocks)
    return CacheSpec((group, other), rows=2, max_len=8)


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


def noisy_cache(spec: CacheSpec, seed: int = 0) -> StateCache:
    """A cache whose every element, in the null block too, is random and not zero."""
    return noise(jax.eval_shape(lambda: StateCache.create(spec)), seed)


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
