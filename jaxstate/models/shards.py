"""How a model's mixers are divided over the `model` axis of a mesh: heads and channels, and their state, by shard.

A shard is a model of its own with fewer heads or channels (Shoeybi et al. 2019, arXiv:1909.08053). Its weights are cut
out of the whole model's section by section, since one matrix holds several projections; what shards have in common is
in each of them. The only thing that passes between shards is a sum at the end of each mixer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstate.errors import SpecError
from jaxstate.state import GroupSpec
from jaxstate.typing import Array, Float, PyTree

MODEL = "model"


class Section(NamedTuple):
    """A run of channels that belong together, and into how many different parts it is cut; 1 is in every shard."""

    width: int
    parts: int


class Cut(NamedTuple):
    """Along which axis a tensor is cut, and its sections in order."""

    axis: int
    sections: tuple[Section, ...]

    def width(self, shards: int) -> int:
        """Of one shard's part, along the axis."""
        return sum(part.stop - part.start for part in self.parts(0, shards))

    def parts(self, shard: int, shards: int) -> list[slice]:
        """What a shard has of each section."""
        made, at = [], 0
        for width, parts in self.sections:
            size = width // parts
            begin = at + shard * parts // shards * size
            made.append(slice(begin, begin + size))
            at += width
        return made

    def share(self, value: Any, shard: int, shards: int) -> np.ndarray:
        """A shard's part of a tensor; nothing else is read of it."""
        assert sum(section.width for section in self.sections) == value.shape[self.axis], self
        before, after = self.axis, len(value.shape) - self.axis - 1
        every = slice(None)
        return np.concatenate(
            [
                np.asarray(value[(*[every] * before, part, *[every] * after)])
                for part in self.parts(shard, shards)
            ],
            self.axis,
        )


@dataclasses.dataclass(frozen=True)
class Divided:
    """A model as its shards run it.

    Attributes:
      params: the whole model's arrays, or what is to be read.
      cuts: how each is cut; None for one that all shards have whole.
      tree: what makes one shard's arrays a model.
      groups: one shard's state layout.
      leaf_axes: per leaf of a block the axis along which shards lie; None for a model that is not divided.
    """

    params: list[Any]
    cuts: list[Cut | None]
    tree: Any
    groups: tuple[GroupSpec, ...]
    leaf_axes: dict[str, PyTree] | None = None


def divide(model: Any, shards: int) -> Divided:
    """The model cut into so many shards; one shard is the model as it is.

    Raises:
      SpecError: its heads, groups or channels do not divide, or it is not a model that can be cut.
    """
    params, tree = jax.tree.flatten(model)
    if shards == 1:
        return Divided(params, [None] * len(params), tree, model.groups())
    if not hasattr(model, "blueprint"):
        raise SpecError(
            f"tensor_parallel is {shards}; {type(model).__name__} runs on 1 device a rank"
        )
    shard, cuts = model.blueprint(shards), model.cuts(shards)
    wanted = [
        cuts.get(tensor.name.partition(".mixer.")[2])
        for tensor in jax.tree.leaves(model.blueprint(1))
    ]
    groups = cast(tuple[GroupSpec, ...], shard.groups())
    leaf_axes = {model.GROUP: model.leaf_axes}
    return Divided(params, wanted, jax.tree.structure(shard), groups, leaf_axes)


def check_divides(what: str, size: int, shards: int) -> None:
    """SpecError when so many heads or channels cannot be dealt out evenly."""
    if size % shards:
        raise SpecError(
            f"tensor_parallel is {shards}, which does not divide the model's {what}, {size}; use a divisor of {size}"
        )


def total(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum over all shards, the same on each of them."""
    return lax.psum(x, MODEL)


def normed_total(
    partial: Float[Array, "... d"], squares: Float[Array, "... 1"], groups: int, shards: int, width: int, eps: float,
) -> Float[Array, "... d"]:  # fmt: skip
    """The output of a projection whose inputs are normed over groups of channels that shards divide among them.

    The root mean square of a group is known only once all have added their squares. As it divides every channel of
    the group alike it can be divided by after the projection, so that one sum over shards serves both.
    """
    ours = lax.axis_index(MODEL) * groups // shards
    mine = jnp.concatenate([partial, squares], -1)[..., None, :]
    mine = jnp.where(jnp.arange(groups)[:, None] == ours, mine, 0.0)
    summed = total(mine)
    scale = lax.rsqrt(summed[..., -1:] / width + eps)
    return (summed[..., :-1] * scale).sum(-2)
