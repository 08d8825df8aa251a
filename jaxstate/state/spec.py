"""What state a model keeps, and how much room it takes: the one place where capacities are worked out.

A group is the layers that share a state layout and a block size. A *recurrent* group's block is one whole state; with a
block size it keeps one block per so many tokens, without one a single block for the whole sequence. An *attention*
group's block holds the keys and values of `block_size` tokens. Context parallelism divides the tokens of attention over
shards and leaves recurrent state whole on each, so the two kinds need rows of different width: the width is a property
of the group and nothing else computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import numpy as np
from jax.core import Tracer

from jaxstate.errors import CapacityError, SpecError
from jaxstate.typing import PyTree

NULL = 0
"""The block that is never handed out: it reads as zeros and drops what is written to it."""


def _positive(value: object, what: str) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{what} is {value!r}; it must be a whole number of at least 1")


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """The state layout of the layers of one group.

    Args:
      name: key of the group in tables, caches and pools.
      kind: `recurrent` (a state, replicated over context shards) or `attention` (tokens, divided over them).
      layers: how many layers the group has; the leading axis of each of its cache arrays.
      leaves: pytree of `jax.ShapeDtypeStruct`, one layer's share of one block.
      block_size: tokens that one block covers; None, for recurrent groups only, for one block a sequence.
      blocks: blocks in the pool, the null block among them; None for as many as all rows can fill.

    Raises:
      SpecError: a size below one, an unknown kind, no leaves.
    """

    name: str
    kind: Literal["recurrent", "attention"]
    layers: int
    leaves: PyTree
    block_size: int | None = None
    blocks: int | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"a group's name is {self.name!r}; it must be a text")
        if self.kind not in ("recurrent", "attention"):
            raise SpecError(
                f"group {self.name!r}: kind is {self.kind!r}; it must be 'recurrent' or 'attention'"
            )
        _positive(self.layers, f"group {self.name!r}: layers")
        if self.block_size is not None:
            _positive(self.block_size, f"group {self.name!r}: block_size")
        elif self.kind == "attention":
            raise SpecError(
                f"group {self.name!r}: an attention group needs a block_size (tokens in a block)"
            )
        if self.blocks is not None:
            _positive(self.blocks, f"group {self.name!r}: blocks")
        leaves = jax.tree.leaves(self.leaves)
        if not leaves or not all(
            hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves
        ):
            raise SpecError(
                f"group {self.name!r}: leaves must be a pytree of jax.ShapeDtypeStruct, and not empty"
            )

    def __hash__(self) -> int:
        # Leaves come in any container; what they are and their structure can be hashed: a spec can be static in a jit.
        leaves, structure = jax.tree.flatten(self.leaves)
        shapes = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in leaves)
        return hash(
            (self.name, self.kind, self.layers, self.block_size, self.blocks, structure, shapes)
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers and leaves."""
        leaves = jax.tree.leaves(self.leaves)
        return self.layers * sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in leaves)

    def tokens_per_block(self, context_shards: int) -> int | None:
        """Tokens that one id in a table row stands for; None when one block serves the whole sequence."""
        if self.block_size is None:
            return None
        return self.block_size * (context_shards if self.kind == "attention" else 1)

    def need(self, tokens: int, context_shards: int) -> int:
        """Blocks that a sequence of so many tokens fills."""
        per_block = self.tokens_per_block(context_shards)
        return min(tokens, 1) if per_block is None else -(-tokens // per_block)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The groups of a model, how many sequences run at once, and how long each may grow.

    Args:
      groups: one `GroupSpec` per group, with distinct names.
      rows: sequences in flight.
      max_len: most tokens (prompt and generated) of one sequence.
      context_shards: over how many devices each sequence's attention tokens are divided.

    Raises:
      SpecError: a size below one, duplicate names, or a pool too small for one sequence of `max_len` tokens.
    """

    groups: tuple[GroupSpec, ...]
    rows: int
    max_len: int
    context_shards: int = 1

    def __post_init__(self):
        object.__setattr__(self, "groups", tuple(self.groups))
        for field in ("rows", "max_len", "context_shards"):
            _positive(getattr(self, field), field)
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise SpecError(
                f"groups need distinct names and there must be at least one; they are {names}"
            )
        for group in self.groups:
            if self.blocks(group.name) - 1 < self.capacity(group.name):
                raise SpecError(
                    f"group {group.name!r}: a pool of {self.blocks(group.name)} blocks (one of them null) cannot hold "
                    f"one sequence of {self.max_len} tokens, which needs {self.capacity(group.name)}; raise blocks "
                    f"to at least {self.capacity(group.name) + 1} or lower max_len"
                )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.groups)

    def group(self, name: str) -> GroupSpec:
        """The group of that name; SpecError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError(f"there is no group {name!r}; the groups are {', '.join(self.names)}")

    def capacity(self, name: str) -> int:
        """Block ids that a row of this group's table holds: those of a sequence of `max_len` tokens."""
        return self.group(name).need(self.max_len, self.context_shards)

    def blocks(self, name: str) -> int:
        """Blocks in this group's pool, the null block among them."""
        group = self.group(name)
        return group.blocks if group.blocks is not None else self.rows * self.capacity(name) + 1

    def need(self, tokens: int, request: str = "") -> dict[str, int]:
        """Blocks per group that a sequence of so many tokens fills.

        Raises:
          CapacityError: the sequence is longer than `max_len`, refused whole over all groups.
          SpecError: `tokens` is no count.
        """
        whole = type(tokens) is int or isinstance(tokens, np.integer)
        if not whole or tokens < 0:
            raise SpecError(
                f"a sequence of {tokens!r} tokens cannot be; give a whole number of at least 0"
            )
        if tokens > self.max_len:
            # Named after the group whose row would overflow; all have the same max_len, so the first will do.
            group = self.groups[0]
            for candidate in self.groups:
                if candidate.need(tokens, self.context_shards) > self.capacity(candidate.name):
                    group = candidate
                    break
            raise CapacityError(
                request=request, group=group.name, need=tokens, capacity=self.max_len, unit="tokens in a row",
                remedy=f"raise max_len from {self.max_len} to at least {tokens}, or shorten the request",
            )  # fmt: skip
        shards = self.context_shards
        return {group.name: group.need(tokens, shards) for group in self.groups}

    def check_row(self, name: str, need: int, request: str = "") -> None:
        """Raises CapacityError when `need` block ids do not fit a row of this group."""
        if need > self.capacity(name):
            per_block = self.group(name).tokens_per_block(self.context_shards)
            tokens = need * per_block if per_block is not None else self.max_len
            raise CapacityError(
                request=request, group=name, need=need, capacity=self.capacity(name), unit="block ids in a row",
                remedy=f"raise max_len from {self.max_len} to at least {tokens}, or shorten the request",
            )  # fmt: skip

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that one sequence of `max_len` tokens takes on each device, over all groups."""
        return sum(g.bytes_per_block * self.capacity(g.name) for g in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache on each device, the null blocks among them."""
        return sum(g.bytes_per_block * self.blocks(g.name) for g in self.groups)

    def describe(self) -> str:
        """A table of groups, capacities and bytes, one line per group."""
        lines = [
            f"{self.rows} rows of up to {self.max_len} tokens, {format_bytes(self.nbytes)} of state"
        ]
        for g in self.groups:
            size = (
                "1 block a sequence"
                if g.block_size is None
                else f"{g.tokens_per_block(self.context_shards)} tokens a block"
            )
            lines.append(
                f"  {g.name}: {g.kind}, {g.layers} layers, {size}, {self.capacity(g.name)} ids a row, "
                f"{self.blocks(g.name)} blocks of {format_bytes(g.bytes_per_block)}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"CacheSpec({self.describe()})"


def format_bytes(n: int) -> str:
    """A size for people: `1.5 MiB`."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def has_values(tree: PyTree) -> bool:
    """Whether every leaf is an array that can be read here and now: not traced, not a mere shape, not donated."""
    return all(
        isinstance(x, np.ndarray)
        or (isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_deleted())
        for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    )


def format_leaves(tree: PyTree) -> list[str]:
    """One line per leaf, `path: dtype[shape] size`, whatever the leaves are."""
    lines = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            size = format_bytes(math.prod(leaf.shape) * leaf.dtype.itemsize)
            lines.append(f"  {name}: {leaf.dtype}{list(leaf.shape)} {size}")
        else:
            lines.append(f"  {name}: {leaf!r}")
    return lines
