"""Checkpoints in a folder, one file each, for a later run to start from.

A file is named after the prefix that it holds the state of, and its header says of which model and layout the state is
and in which circumstances it was computed. States of another model are refused. States of the same model that were
computed with other versions, sizes or on another device may differ in their last bits, and so could a text that starts
from them; they are passed over. It is a cache: what cannot be read is named, and the run goes on without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import msgspec
import numpy as np

from jaxstate.compilation import instructions
from jaxstate.errors import SnapshotError
from jaxstate.models.base import CausalLM
from jaxstate.models.identify import identify
from jaxstate.plan import PlanShape
from jaxstate.prefix import Checkpoint, Key, PrefixIndex, salt_bytes
from jaxstate.schedule import Schedule, adopt
from jaxstate.state.identity import Identity, Layout, check_same, named_leaves, versions
from jaxstate.state.spec import GroupSpec, format_bytes
from jaxstate.state.tensor_file import read_file, read_header, write_file
from jaxstate.typing import Device, PyTree
from pallas_kernels.rows import CHUNK

Blocks = dict[str, int]
"""The block of each group that holds one checkpoint."""

FORMAT = 1
"""Version of the file format; files of another are passed over."""

KIND = "stored prefix"

NAME = re.compile(r"([0-9a-f]{32})\.safetensors(\.\d+\.part)?")

HEADER_BYTES, NAME_BYTES = 8_192, 40
"""What a file's header takes, and each name in it, as far as the size of a store is reckoned."""

STALE_S = 600.0
"""Age at which a file that was never finished is taken for one that never will be."""


class _Header(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    format: int
    versions: dict[str, str]
    identity: Identity
    layout: tuple[Layout, ...]
    circumstances: dict[str, str | int]
    chain: tuple[str, ...]  # names of all 64-token prefixes up to this one
    salt: str  # a hash of it
    cost: int
    uses: int
    worth: float  # priority above that of the last one let go
    checksum: str


@dataclasses.dataclass(frozen=True)
class Stored:
    """What came of reading or writing a store: how many states, how large, how many had no room, and what was wrong."""

    states: int = 0
    nbytes: int = 0
    no_room: int = 0
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.states:,} state{'s' * (self.states != 1)} ({format_bytes(self.nbytes)})"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of the store that may be read, and the checkpoint that it holds, without blocks yet."""

    path: pathlib.Path
    checkpoint: Checkpoint


@dataclasses.dataclass(frozen=True)
class PrefixStore:
    """A folder of checkpoints, as one model and one set of circumstances sees it."""

    folder: pathlib.Path
    identity: Identity
    layout: tuple[Layout, ...]
    groups: tuple[GroupSpec, ...]
    circumstances: Mapping[str, str | int]

    @classmethod
    def of(
        cls, folder: str | os.PathLike, model: CausalLM, groups: tuple[GroupSpec, ...],
        circumstances: Mapping[str, str | int],
    ) -> PrefixStore:  # fmt: skip
        """The folder as an engine sees it in these circumstances; its blocks have the layout `groups`.

        That differs from the model's own where shards have a part each, and what several need is in each of them.
        """
        layout = tuple(map(Layout.of, model.groups()))
        return cls(pathlib.Path(folder), identify(model), layout, groups, circumstances)

    def entries(self) -> tuple[list[Entry], list[str]]:
        """What can be read, the most valuable first, and a line for each file that cannot.

        Raises:
          SnapshotError: the folder cannot be read, or has states of another model or layout.
        """
        found, problems, foreign = [], [], {}
        for path in self._files():
            try:
                header = read_header(path, _Header, FORMAT, KIND)
            except SnapshotError as error:
                problems.append(f"{error}; it is passed over")
                continue
            try:
                self._check(path, header)
            except SnapshotError:
                # Whose file it is can be believed only if it is whole.
                if (damage := _damage(path)) is None:
                    raise
                problems.append(f"{damage}; it is passed over")
                continue
            there = {**header.circumstances, **header.versions}
            here = {**self.circumstances, **versions()}
            if there != here:
                differ = [k for k in {**there, **here} if there.get(k) != here.get(k)]
                told = tuple(f"{k} {there.get(k)!r} (here {here.get(k)!r})" for k in differ)
                foreign[told] = foreign.get(told, 0) + 1
                continue
            try:
                chain = tuple(bytes.fromhex(key) for key in header.chain)
            except ValueError:
                chain = ()
            if not chain or f"{chain[-1].hex()}.safetensors" != path.name:
                problems.append(
                    f"{path} holds another prefix than its name says; it is passed over"
                )
                continue
            found.append(Entry(path, _checkpoint(chain, header)))
        problems += [
            f"{n} of the states in {self.folder} were computed with {' and '.join(told)}, which may differ in "
            "the last bits; they are passed over"
            for told, n in foreign.items()
        ]
        found.sort(key=lambda e: (-e.checkpoint.priority, e.checkpoint.key))
        return found, problems

    def read(self, entry: Entry) -> dict[str, PyTree]:
        """The state in a file, per group with leaves `[layers, 1, …]`.

        Raises:
          SnapshotError: the file is gone, truncated or damaged, or is not what it was.
        """
        header, arrays = read_file(entry.path, _Header, FORMAT, KIND)
        if _checkpoint(entry.checkpoint.chain, header) != entry.checkpoint:
            raise SnapshotError(f"{entry.path} was written anew while it was read")
        state, names = {}, set()
        for group in self.groups:
            leaves = []
            for path, leaf in named_leaves(group.leaves):
                name = f"{group.name}/{path}"
                array, names = arrays.get(name), names | {name}
                shape = (group.layers, *leaf.shape)
                if array is None or array.shape != shape or array.dtype != leaf.dtype:
                    raise SnapshotError(f"{entry.path} has no {name} of {leaf.dtype}{list(shape)}")
                leaves.append(array[:, None])
            state[group.name] = jax.tree.unflatten(jax.tree.structure(group.leaves), leaves)
        if surplus := sorted(set(arrays) - names):
            raise SnapshotError(f"{entry.path} has arrays that nobody knows: {surplus}")
        return state

    def write(self, checkpoint: Checkpoint, worth: float, state: Mapping[str, PyTree]) -> int:
        """Writes one state, per group with leaves `[layers, 1, …]`, whole or not at all; returns the file's bytes.

        Raises:
          OSError: the disk is full, or the folder cannot be written.
        """
        header = _Header(
            FORMAT, versions(), self.identity, self.layout, dict(self.circumstances),
            tuple(key.hex() for key in checkpoint.chain), _hidden(checkpoint.salt),
            checkpoint.cost, checkpoint.uses, worth, "",
        )  # fmt: skip
        arrays = {
            f"{group.name}/{path}": np.asarray(leaf)[:, 0]
            for group in self.groups
            for path, leaf in named_leaves(state[group.name])
        }
        path = self._path(checkpoint.key)
        write_file(path, header, arrays)
        return path.stat().st_size

    def trim(self, most_bytes: int | None, kept: Iterable[Key]) -> None:
        """Deletes the oldest files but for `kept` until they take at most `most_bytes`, and what was never finished."""
        mine, others = {self._path(key) for key in kept}, []
        for path in self._files(parts=True):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another run's doing
            if path.suffix == ".part":
                if time.time() - stat.st_mtime > STALE_S:
                    path.unlink(missing_ok=True)
            elif path not in mine:
                others.append((stat.st_mtime, path, stat.st_size))
        for _, path, size in sorted(others, reverse=True):
            if most_bytes is not None:
                most_bytes = most_bytes - size if size <= most_bytes else 0
                if not most_bytes:
                    path.unlink(missing_ok=True)

    def _check(self, path: pathlib.Path, header: _Header) -> None:
        ours = self.identity, self.layout
        check_same(f"the prefix store's {path}", (header.identity, header.layout), ours)

    def _path(self, key: Key) -> pathlib.Path:
        return self.folder / f"{key.hex()}.safetensors"

    def _files(self, *, parts: bool = False) -> Iterator[pathlib.Path]:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError as error:
            raise SnapshotError(
                f"the prefix store {self.folder} cannot be read: {error.strerror}"
            ) from error
        for name in names:
            match = NAME.fullmatch(name)
            if match is not None and (parts or match[2] is None):
                yield self.folder / name


def load(
    store: PrefixStore, schedule: Schedule, place: Callable[[Blocks, dict[str, PyTree]], None]
) -> tuple[Schedule, Stored]:
    """The schedule with what the store has, the most valuable first, as far as there are free blocks.

    `place` puts a state in blocks on the device. Nothing is let go for a state that is read back, and each is let go
    like any other when a request wants its block.

    Raises:
      SnapshotError: the folder cannot be read, or has states of another model or layout.
    """
    entries, problems = store.entries()
    states = nbytes = no_room = 0
    for entry in entries:
        if entry.checkpoint.key in schedule.index.nodes:
            continue
        adopted = adopt(schedule, entry.checkpoint)
        if adopted is None:
            no_room += 1
            continue
        try:
            state = store.read(entry)
        except SnapshotError as error:
            problems.append(f"{error}; it is passed over")
            continue
        schedule, blocks = adopted
        place(blocks, state)
        states, nbytes = states + 1, nbytes + sum(x.nbytes for x in jax.tree.leaves(state))
    return schedule, Stored(states, nbytes, no_room, tuple(problems))


def save(
    store: PrefixStore,
    index: PrefixIndex,
    fetch: Callable[[Blocks], dict[str, PyTree]],
    most_bytes: int | None = None,
) -> Stored:
    """Writes the checkpoints of the index, the most valuable first, as far as `most_bytes` has room.

    `fetch` gets the state in blocks from the device. What older runs left in the folder stays as long as there is room.

    Raises:
      SnapshotError: the folder has states of another model or layout, or cannot be written.
    """
    try:
        store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.entries()
        room, picked = most_bytes, []
        nodes = sorted(index.nodes.values(), key=lambda node: (-node.priority, node.key))
        each = sum(group.bytes_per_block for group in store.groups) + HEADER_BYTES
        for node in nodes:
            size = each + NAME_BYTES * len(node.chain)
            if room is not None and size > room:
                break
            picked.append(node)
            room = None if room is None else room - size
        store.trim(room, [node.key for node in picked])
        states, nbytes, problems = 0, 0, []
        for node in picked:
            state = fetch(node.blocks)
            if not _finite(state):
                problems.append(
                    f"the state after {node.position} tokens is not finite; it is not kept"
                )
                continue
            try:
                nbytes += store.write(node, node.priority - index.clock, state)
            except IsADirectoryError as error:
                problems.append(
                    f"{error.filename2} is a folder; the state of that name is not kept"
                )
                continue
            states += 1
    except OSError as error:
        raise SnapshotError(
            f"the prefix store {store.folder} cannot be written: {error.strerror or error}"
        ) from error
    return Stored(states, nbytes, len(nodes) - len(picked), tuple(problems))


def circumstances(shape: PlanShape, device: Device, shards: int) -> dict[str, str | int]:
    """What decides the last bits of a state that a prefill computes, beside the model and the versions."""
    return {
        "device": device.device_kind,
        "instructions": instructions() if device.platform == "cpu" else "",
        "compiler flags": os.environ.get("XLA_FLAGS", ""),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "rows": shape.spec.rows,
        "chunk_tokens": shape.chunk_tokens,
        "tensor_parallel": shards,
        "checkpoints in a step": shape.checkpoints,
        "matmul precision": str(jax.config.jax_default_matmul_precision),  # pyright: ignore[reportAttributeAccessIssue]
    }


def _checkpoint(chain: tuple[Key, ...], header: _Header) -> Checkpoint:
    return Checkpoint(
        key=chain[-1], position=len(chain) * CHUNK, blocks={}, holder="", writer="", cost=header.cost,
        uses=header.uses, priority=header.worth, chain=chain,
    )  # fmt: skip


def _hidden(salt: str) -> str:
    """A salt as a file tells it: which states share one, and not what it is."""
    return hashlib.blake2b(salt_bytes(salt), digest_size=16, person=b"salt").hexdigest()


def ids_of(blocks: Blocks) -> dict[str, np.ndarray]:
    """The blocks of one checkpoint as cache operations take them."""
    return {group: np.array([block], np.int32) for group, block in blocks.items()}


def _damage(path: pathlib.Path) -> str | None:
    try:
        read_file(path, _Header, FORMAT, KIND)
    except SnapshotError as error:
        return str(error)
    return None


def _finite(state: Mapping[str, PyTree]) -> bool:
    leaves = jax.tree.leaves(dict(state))
    return all(np.isfinite(x.astype(np.float32)).all() for x in leaves if x.dtype.kind not in "iub")
