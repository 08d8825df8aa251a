"""The arrays that hold the blocks: per group a pytree of leaves `[layers, blocks, …]`, as an immutable value.

Whatever the container of a group's state, every operation goes through `jax.tree.map`, so that no leaf can be left out.
A block is zeroed when it is handed out, not when it is returned. In poison mode memory that nobody may read (fresh
arrays, returned blocks, the null block) holds NaN, so that a read of it shows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from jaxstate.errors import OwnershipError, SpecError
from jaxstate.state.ids import whole_numbers
from jaxstate.state.spec import NULL, CacheSpec, format_leaves
from jaxstate.typing import Int, PyTree
from pallas_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from pallas_kernels.ops import fill_blocks


def poison_by_default() -> bool:
    """Whether the environment asks for poison mode: JAXSTATE_POISON=1."""
    return os.environ.get("JAXSTATE_POISON", "0") not in ("", "0")


def poison_value(dtype: Any) -> Any:
    """The value that marks memory nobody may read: NaN, or the whole number furthest from 0."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    info = jnp.iinfo(dtype)
    return info.min or info.max


class StateCache(struct.PyTreeNode):
    """The state of every block of every group.

    Example:
      >>> cache = StateCache.create(spec)
      >>> cache, slices = cache.allocate({"mamba": [1, 2]})    # blocks 1 and 2 are zero now, and so are the slices
    """

    groups: dict[str, PyTree]

    @classmethod
    def create(cls, spec: CacheSpec, *, poison: bool = False) -> StateCache:
        """A cache of zeros; in poison mode of NaN, the null block included."""

        def leaf(group):
            def make(x):
                value = poison_value(x.dtype) if poison else 0
                return jnp.full((group.layers, spec.blocks(group.name), *x.shape), value, x.dtype)

            return make

        return cls({group.name: jax.tree.map(leaf(group), group.leaves) for group in spec.groups})

    def blocks(self, group: str) -> int:
        """Blocks in this group's arrays, the null block among them."""
        return jax.tree.leaves(self._group(group))[0].shape[1]

    def allocate(self, ids: Mapping[str, Int[Any, "n"]]) -> tuple[StateCache, dict[str, PyTree]]:
        """Zeroes the blocks in every layer and leaf, and returns the new cache with their slices `[layers, n, …]`.

        Raises:
          OwnershipError: a null, repeated or out-of-range id (where ids are known; under `jax.jit` they never wrap).
        """
        ids = {group: self._checked(group, given, null_ok=False) for group, given in ids.items()}
        cache = self.zero(ids)
        return cache, {group: cache.read(group, given) for group, given in ids.items()}

    def zero(self, ids: Mapping[str, Int[Any, "n"]]) -> StateCache:
        """Zeroes the blocks in every layer and leaf; id 0 is padding and does nothing."""
        return self._fill(ids, lambda leaf: 0)

    def poison(self, ids: Mapping[str, Int[Any, "n"]]) -> StateCache:
        """Fills the blocks with NaN in every layer and leaf; id 0 is padding and does nothing."""
        return self._fill(ids, lambda leaf: poison_value(leaf.dtype))

    def copy(self, copies: Mapping[str, tuple[Int[Any, "n"], Int[Any, "n"]]]) -> StateCache:
        """Copies block `source[i]` to `destination[i]`, all at once; a pair of zeros is padding and does nothing.

        Raises:
          OwnershipError: a destination named twice, an id out of range, or not as many sources as destinations.
        """
        groups = dict(self.groups)
        for group, pair in copies.items():
            source = self._checked(group, pair[0], repeat_ok=True)
            destination = self._checked(group, pair[1])
            if source.shape != destination.shape:
                raise OwnershipError(
                    "copies go from a block to a block",
                    f"group {group!r}: {source.shape[0]} sources for {destination.shape[0]} destinations",
                )
            groups[group] = jax.tree.map(
                lambda leaf, s=source, d=destination: copy_blocks(leaf, s, d), self._group(group)
            )
        return self.replace(groups=groups)

    def read(self, group: str, ids: Int[Any, "n"]) -> PyTree:
        """The blocks' state, leaves `[layers, n, …]`; the null block reads as zeros."""
        ids = self._checked(group, ids, repeat_ok=True)
        return jax.tree.map(lambda leaf: gather_blocks(leaf, ids), self._group(group))

    def write(self, group: str, ids: Int[Any, "n"], state: PyTree) -> StateCache:
        """Stores `state`, leaves `[layers, n, …]`, in the blocks; what is written to the null block is dropped.

        Raises:
          OwnershipError: an id named twice or out of range.
          ValueError: `state` is not shaped like the group's state.
        """
        ids = self._checked(group, ids)

        def store(leaf, new):
            want = (leaf.shape[0], ids.shape[0], *leaf.shape[2:])
            if np.shape(new) != want:
                raise ValueError(f"group {group!r}: a leaf is {np.shape(new)}; it must be {want}")
            return scatter_blocks(leaf, ids, jnp.asarray(new))

        leaves = jax.tree.map(store, self._group(group), state)
        return self.replace(groups={**self.groups, group: leaves})

    def _fill(self, ids: Mapping[str, Any], value) -> StateCache:
        groups = dict(self.groups)
        for group, given in ids.items():
            given = self._checked(group, given)
            groups[group] = jax.tree.map(
                lambda leaf, g=given: fill_blocks(leaf, g, value(leaf)), self._group(group)
            )
        return self.replace(groups=groups)

    def _group(self, group: str) -> PyTree:
        if group not in self.groups:
            raise SpecError(f"there is no group {group!r}; the groups are {sorted(self.groups)}")
        return self.groups[group]

    def _checked(
        self, group: str, ids: Any, *, null_ok: bool = True, repeat_ok: bool = False
    ) -> Int[Any, "n"]:
        """The ids as an array; known ones break no rule, and those known only on the device are not looked at."""
        if isinstance(ids, Tracer):
            return ids
        given, size = whole_numbers(ids, f"group {group!r}: blocks"), self.blocks(group)
        for block in given[(given < 0) | (given >= size)].tolist():
            raise OwnershipError(
                "ids are in range", f"group {group!r}: block {block} is outside the cache of {size}"
            )
        real = given[given != NULL]
        if not null_ok and len(real) < len(given):
            raise OwnershipError(
                "null is never handed out", f"group {group!r}: ids are {given.tolist()}"
            )
        if not repeat_ok and len(np.unique(real)) < len(real):
            raise OwnershipError(
                "each block once", f"group {group!r}: a block is named twice in {given.tolist()}"
            )
        return given.astype(np.int32)

    def __repr__(self) -> str:
        return "StateCache(\n" + "\n".join(format_leaves(self.groups)) + "\n)"
