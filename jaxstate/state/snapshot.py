"""Sequences outside every cache: their state in host arrays, as a value or as one safetensors file.

The file's header says of which model and layout the state is, so that it is restored there or not at all, and holds a
checksum, so that a damaged file is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxstate.errors import SnapshotError
from jaxstate.state.sequence import Sequence
from jaxstate.state.spec import NULL, GroupSpec, format_bytes
from jaxstate.typing import PyTree

FORMAT = 1
"""Version of the file format; files of another are refused."""

SCORES = "scores"


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which model a state is of: its name, a hash of its config and a sample of its weights, their dtype."""

    model: str
    fingerprint: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """A group's state layout as a file tells it; `leaves` are the shape and dtype of one block by path."""

    name: str
    kind: str
    layers: int
    block_size: int | None
    leaves: dict[str, tuple[tuple[int, ...], str]]

    @classmethod
    def of(cls, group: GroupSpec) -> Layout:
        leaves = {
            path: (tuple(x.shape), np.dtype(x.dtype).name) for path, x in _paths(group.leaves)
        }
        return cls(group.name, group.kind, group.layers, group.block_size, leaves)


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
            for group in groups for path, leaf in _paths(state[group.name])
        }  # fmt: skip
        return cls(identity, tuple(map(Layout.of, groups)), sequences, arrays, scores)

    def state(self, group: GroupSpec) -> PyTree:
        """The group's arrays in the container that the group keeps its state in."""
        leaves = [self.arrays[f"{group.name}/{path}"] for path, _ in _paths(group.leaves)]
        return jax.tree.unflatten(jax.tree.structure(group.leaves), leaves)

    def check(self, identity: Identity, groups: tuple[GroupSpec, ...]) -> None:
        """Raises SnapshotError, with both sides of every difference, unless it is of this model and layout."""
        problems, here = [], tuple(map(Layout.of, groups))
        for what in ("model", "dtype"):
            theirs, ours = getattr(self.identity, what), getattr(identity, what)
            if theirs != ours:
                problems.append(f"its {what} is {theirs}, this one's is {ours}")
        if self.layout != here:
            problems.append(f"its layout is {_told(self.layout)}, this model's is {_told(here)}")
        if not problems and self.identity.fingerprint != identity.fingerprint:
            problems.append(
                f"its model has the fingerprint {self.identity.fingerprint}, this one {identity.fingerprint}: "
                "another config or other weights"
            )
        if problems:
            raise SnapshotError(
                f"the snapshot is not of this model: {'; '.join(problems)}; load the model that it was taken with"
            )

    def save(self, path: str | os.PathLike) -> None:
        """Writes one safetensors file, whole or not at all; one that is there is replaced."""
        path, tensors = pathlib.Path(path), self._tensors()
        header = _Header(
            FORMAT, self.versions, self.identity, self.layout, self.sequences, ""
        )  # fmt: skip
        header = msgspec.structs.replace(header, checksum=_checksum(header, tensors))
        whole = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            save_file(tensors, whole, metadata={"jaxstate": msgspec.json.encode(header).decode()})
            os.replace(whole, path)
        finally:
            whole.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Snapshot:
        """The snapshot in a file.

        Raises:
          SnapshotError: no file, not a snapshot, of another format version, truncated or damaged.
        """
        try:
            with safe_open(path, framework="np") as file:
                text = (file.metadata() or {}).get("jaxstate")
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as a snapshot: {error}") from error
        if text is None:
            raise SnapshotError(f"{path} is a safetensors file but not a snapshot of jaxstate")
        try:
            version = msgspec.json.decode(text, type=dict[str, Any]).get("format")
            if version != FORMAT:
                raise SnapshotError(
                    f"{path} has format {version!r}; this version of jaxstate reads format {FORMAT}"
                )
            header = msgspec.json.decode(text, type=_Header)
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"{path} has a header that is not a snapshot's: {error}") from error
        if _checksum(header, tensors) != header.checksum:
            raise SnapshotError(f"{path} is damaged: its content does not have its checksum")
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
        arrays = {**self.arrays, SCORES: self.scores}
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(s)) for s in self.sequences)
        return (
            f"Snapshot({len(self)} of {self.identity.model} {self.identity.fingerprint[:8]}, "
            f"after {lengths} tokens, {format_bytes(self.nbytes)})"
        )


def versions() -> dict[str, str]:
    """Versions that a snapshot was made with, for whoever wonders."""
    try:
        ours = metadata.version("jaxstate")
    except metadata.PackageNotFoundError:
        ours = "unknown"
    return {"jaxstate": ours, "jax": jax.__version__}


def _paths(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def _told(layout: tuple[Layout, ...]) -> str:
    return " and ".join(f"{g.name} ({g.layers} layers, {g.leaves})" for g in layout)


def _checksum(header: _Header, tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(msgspec.structs.replace(header, checksum="")))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
