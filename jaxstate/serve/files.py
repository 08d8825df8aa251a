"""The files that a run reads and writes, opened before anything slow begins.

Rows go out with one system call each, unbuffered: what a killed run has written is whole lines, and
a reader at the other end of a pipe sees a row as soon as it exists.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path

from jaxstate.errors import JaxstateError

STDIN, STDOUT = 0, 1


class FileError(JaxstateError):
    """A file that cannot be read or written as asked."""


def open_input(name: str) -> int:
    """Return a descriptor to read a file, or standard input for `-`.

    Raises:
      FileError: there is no such file, or it cannot be read.
    """
    if name == "-":
        _check_open(STDIN, "standard input")
        return STDIN
    try:
        fd = os.open(name, os.O_RDONLY)
    except OSError as error:
        raise FileError(f"cannot read the input {name}: {error.strerror}") from error
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileError(f"cannot read the input {name}: it is a folder")
    return fd


def input_size(fd: int) -> int | None:
    """Return the size in bytes of a regular file, None for pipes and terminals."""
    status = os.fstat(fd)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _check_open(fd: int, what: str) -> None:
    try:
        os.fstat(fd)
    except OSError as error:
        raise FileError(f"{what} is closed") from error


def check_writable(name: str, what: str) -> None:
    """Raise FileError unless a file can be made or written over at this path."""
    path = Path(name)
    folder = path.parent
    if path.is_dir():
        raise FileError(f"cannot write {what} {name}: it is a folder")
    if not folder.is_dir():
        raise FileError(f"cannot write {what} {name}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise FileError(f"cannot write {what} {name}: permission denied")


class Output:
    """Where rows go: a file, or standard output for `-`."""

    def __init__(self, name: str, *, input_fd: int, overwrite: bool):
        """Open it; an existing file with content is kept unless told otherwise.

        Raises:
          FileError: it cannot be written, is the input itself, or holds something already.
        """
        self.name = name
        self._made = False
        if name == "-":
            if input_fd == STDOUT:  # the input got the place of a closed standard output
                raise FileError("standard output is closed")
            _check_open(STDOUT, "standard output")
            self._fd = STDOUT
            return
        check_writable(name, "the output")
        self._made = not os.path.exists(name)
        try:
            self._fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise FileError(f"cannot write the output {name}: {error.strerror}") from error
        status = os.fstat(self._fd)
        if os.path.samestat(status, os.fstat(input_fd)):
            os.close(self._fd)
            raise FileError(f"the output {name} is the input itself; give it another name")
        if stat.S_ISREG(status.st_mode):
            if status.st_size and not overwrite:
                os.close(self._fd)
                raise FileError(
                    f"the output {name} exists and is not empty; "
                    "give another name, or --overwrite to replace it"
                )

    def begin(self) -> None:
        """Empty the file; until here nothing in it is touched, so that a wrong model costs nothing."""
        if stat.S_ISREG(os.fstat(self._fd).st_mode) and self._fd != STDOUT:
            os.ftruncate(self._fd, 0)

    def write(self, row: bytes) -> None:
        """Write one whole line."""
        view = memoryview(row)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # whoever made the pipe wanted it so
                select.select([], [self._fd], [])

    def close(self) -> None:
        """Close it; a file made by this run that no row reached is taken away again."""
        if self._fd == STDOUT:
            return
        empty = self._made and os.fstat(self._fd).st_size == 0
        os.close(self._fd)
        if empty:
            os.unlink(self.name)
