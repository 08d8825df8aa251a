"""A safetensors file with a header of ours and a checksum over both: written whole or not at all, read or refused.

A header is a frozen `msgspec.Struct` with at least `format: int` and `checksum: str`; a reader knows one format.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import secrets
import stat
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxstate.errors import SnapshotError

KEY = "jaxstate"
"""The entry of the safetensors metadata that holds the header."""


def write_file(
    path: pathlib.Path, header: msgspec.Struct, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes the file beside its place and moves it there once the disk has it; one that is there is replaced.

    Raises:
      OSError: the disk is full, or the folder cannot be written.
    """
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    header = msgspec.structs.replace(header, checksum=_checksum(header, tensors))
    # A name of its own for each writer: process ids repeat between machines and threads share one.
    whole = path.with_name(f"{path.name}.{secrets.randbelow(10**18):018d}.part")
    try:
        try:
            save_file(tensors, whole, metadata={KEY: msgspec.json.encode(header).decode()})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        with open(whole, "rb") as file:
            os.fsync(file.fileno())
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def read_header[Header: msgspec.Struct](
    path: Any, kind: type[Header], format_: int, what: str
) -> Header:
    """The header of a file that calls itself a `what`; its checksum is not looked at.

    Raises:
      SnapshotError: no such file, not one of these, of another format version, or truncated.
    """
    return _read(path, kind, format_, what, tensors=False)[0]


def read_file[Header: msgspec.Struct](
    path: Any, kind: type[Header], format_: int, what: str
) -> tuple[Header, dict[str, np.ndarray]]:
    """Header and arrays of a file.

    Raises:
      SnapshotError: as `read_header`, or the content does not have its checksum.
    """
    header, tensors = _read(path, kind, format_, what, tensors=True)
    if _checksum(header, tensors) != header.checksum:  # pyright: ignore[reportAttributeAccessIssue]
        raise SnapshotError(f"{path} is damaged: its content does not have its checksum")
    return header, tensors


def _read[Header: msgspec.Struct](
    path: Any, kind: type[Header], format_: int, what: str, *, tensors: bool
) -> tuple[Header, dict[str, np.ndarray]]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is not a regular file")  # a pipe would be waited for
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(KEY)
            arrays = {name: file.get_tensor(name) for name in file.keys()} if tensors else {}
    except (SafetensorError, OSError) as error:
        raise SnapshotError(f"{path} cannot be read as a {what}: {error}") from error
    if text is None:
        raise SnapshotError(f"{path} is a safetensors file but not a {what} of jaxstate")
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("format")
        if version != format_:
            raise SnapshotError(
                f"{path} has format {version!r}; this version of jaxstate reads format {format_}"
            )
        return msgspec.json.decode(text, type=kind), arrays
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"{path} has a header that is not a {what}'s: {error}") from error


def _checksum(header: msgspec.Struct, tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(msgspec.json.encode(msgspec.structs.replace(header, checksum="")))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
