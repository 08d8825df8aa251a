"""Sequences outside every cache: their state in host arrays, as a value or as one safetensors file.

The file's header says of which model and layout the state is, so that it is restored there or not at all, and holds a
checksum, so that a damaged file is refused.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import jax
import msgspec
import numpy as np

from jaxstate.errors import SnapshotError
from jaxstate.state.identity import Identity, Layout, check_same, named_leaves, versions
from jaxstate.state.sequence import Sequence
from jaxstate.state.spec import NULL, GroupSpec, format_bytes
from jaxstate.state.tensor_file import read_file, write_file
from jaxstate.typing import PyTree

FORMAT = 1
"""Version of the file format; files of another are refused."""

SCORES = "scores"


class _Header(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: int
    versions: dict[str, str]
    identity: Identity
    layout: tuple[Layout, ...]
    sequences: tuple[Sequence, ...]
    checksum: str


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Sequences and their state in host memory; `LM.restore` puts them back.

    `arrays` are `[layers, blocks, …]` by `group/leaf`, without a null block: block `b` of a sequence is entry `b - 1`.
    `scores` are those of each sequence's next token.

    Example:
      >>> lm.prefill("Once upon a time").snapshot().save("once.safetensors")
      >>> seqs = lm.restore(Snapshot.load("once.safetensors"))
    """

    identity: Identity
    layout: tuple[Layout, ...]
    sequences: tuple[Sequence, ...]
    arrays: dict[str, np.ndarray]
    scores: np.ndarray
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())

    @classmethod
    def create(
        cls, identity: Identity, groups: tuple[GroupSpec, ...], sequences: tuple[Sequence, ...],
        state: Mapping[str, PyTree], scores: np.ndarray,
    ) -> Snapshot:  # fmt: skip
        """A snapshot of host state, `state[group]` with leaves `[layers, blocks, …]`."""
        arrays = {
            f"{group.name}/{path}": np.asarray(leaf)
            for group in groups for path, leaf in named_leaves(state[group.name])
        }  # fmt: skip
        return cls(identity, tuple(map(Layout.of, groups)), sequences, arrays, scores)

    def state(self, group: GroupSpec) -> PyTree:
        """The group's arrays in the container that the group keeps its state in."""
        leaves = [self.arrays[f"{group.name}/{path}"] for path, _ in named_leaves(group.leaves)]
        return jax.tree.unflatten(jax.tree.structure(group.leaves), leaves)

    def check(self, identity: Identity, groups: tuple[GroupSpec, ...]) -> None:
        """Raises SnapshotError, with both sides of every difference, unless it is of this model and layout."""
        ours = identity, tuple(map(Layout.of, groups))
        check_same("the snapshot", (self.identity, self.layout), ours)

    def save(self, path: str | os.PathLike) -> None:
        """Writes one safetensors file, whole or not at all; one that is there is replaced."""
        header = _Header(
            FORMAT, self.versions, self.identity, self.layout, self.sequences, ""
        )  # fmt: skip
        write_file(pathlib.Path(path), header, self._tensors())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Snapshot:
        """The snapshot in a file.

        Raises:
          SnapshotError: no file, not a snapshot, of another format version, truncated or damaged.
        """
        header, tensors = read_file(path, _Header, FORMAT, "snapshot")
        scores = tensors.pop(SCORES, np.zeros(0))
        made = cls(header.identity, header.layout, header.sequences, tensors, scores, header.versions)  # fmt: skip
        if problem := made._problem():
            raise SnapshotError(f"{path} does not hold together: {problem}")
        return made

    def _problem(self) -> str | None:
        """What is wrong with a snapshot that somebody else may have written; None if nothing is."""
        counts = {}
        if not self.sequences or len({s.id for s in self.sequences}) < len(self.sequences):
            return "it needs at least one sequence, and ids that differ"
        if self.scores.ndim != 2 or len(self.scores) != len(self.sequences):
            return f"scores are {list(self.scores.shape)} for {len(self.sequences)} sequences"
        for group in self.layout:
            for path, (shape, dtype) in group.leaves.items():
                leaf = self.arrays.get(f"{group.name}/{path}", np.zeros(()))
                counts.setdefault(group.name, leaf.shape[1] if leaf.ndim > 1 else 0)
                if leaf.dtype != dtype or leaf.shape != (group.layers, counts[group.name], *shape):
                    return f"{group.name}/{path} is {leaf.dtype}{list(leaf.shape)}, not what the layout says"
        if len(self.arrays) != sum(len(group.leaves) for group in self.layout):
            return f"it has {len(self.arrays)} arrays and a layout for others"
        for row, s in enumerate(self.sequences):
            need = {g.name: -(-len(s) // g.block_size) if g.block_size else 1 for g in self.layout}
            wrong = {g: len(b) for g, b in s.blocks.items()} != need
            for group, blocks in s.blocks.items():
                wrong |= any(not NULL < b <= counts.get(group, 0) for b in blocks)
                wrong |= len(set(blocks)) < len(blocks)
            if wrong or s.row != row or not s.tokens or min(s.tokens) < 0:
                return f"sequence {s.id!r} has {len(s)} tokens and blocks {s.blocks}"
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of state and scores."""
        return sum(array.nbytes for array in self._tensors().values())

    def _tensors(self) -> dict[str, np.ndarray]:
        return {**self.arrays, SCORES: self.scores}

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(s)) for s in self.sequences)
        return (
            f"Snapshot({len(self)} of {self.identity.model} {self.identity.fingerprint[:8]}, "
            f"after {lengths} tokens, {format_bytes(self.nbytes)})"
        )
