"""A plan as one array of int32, since a call pays for each array that the host hands over, however small.

Floats and unsigned numbers go by their bits, truth values as 0 and 1. What nobody looks at is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstate.plan import PlanShape, StepPlan
from jaxstate.typing import Array, Int32
from jaxstate.values import changed


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each array of a plan lies; the same for every plan of a shape and kind.

    `null` is a plan of that kind without what is left out: which blocks are freed matters only where they are poisoned.
    """

    null: StepPlan
    poison: bool

    @classmethod
    def of(cls, shape: PlanShape, *, prefill: bool, poison: bool) -> Packing:
        null = shape.nulls[prefill]
        return cls(null if poison else null.replace(freed={}), poison)

    def pack(self, plans: Sequence[StepPlan]) -> np.ndarray:
        """The plans of all ranks, one after the other, as `int32[ranks * n]` in memory of its own.

        Each device's share is then that of its rank.
        """
        plans = plans if self.poison else [changed(plan, freed={}) for plan in plans]
        nulls, packed_null = self._packed
        packed, at = np.tile(packed_null, len(plans)), 0
        for plan in plans:
            for array, null in zip(jax.tree.leaves(plan), nulls, strict=True):
                # What is everybody's is there already.
                if array is not null:
                    packed[at : at + array.size] = _bits(array).ravel()
                at += array.size
        return packed

    @functools.cached_property
    def _packed(self) -> tuple[list[np.ndarray], np.ndarray]:
        """The arrays of the null plan, one by one and as one."""
        nulls = jax.tree.leaves(self.null)
        return nulls, np.concatenate([_bits(array).ravel() for array in nulls])

    def unpack(self, packed: Int32[Array, "n"]) -> StepPlan:
        """One rank's plan again, on the device."""
        leaves, tree = jax.tree.flatten(self.null)
        parts, at = [], 0
        for leaf in leaves:
            size = math.prod(leaf.shape)
            part = lax.slice(packed, (at,), (at + size,)).reshape(leaf.shape)
            parts.append(_values(part, leaf.dtype))
            at += size
        if at != packed.shape[0]:
            raise ValueError(f"a plan of {at} numbers is packed in {packed.shape[0]}")
        return jax.tree.unflatten(tree, parts)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype.kind == "b" else array.view(np.int32)


def _values(bits: Array, dtype: np.dtype) -> Array:
    if dtype.kind == "b":
        return bits != 0
    return lax.bitcast_convert_type(bits, jnp.dtype(dtype))
