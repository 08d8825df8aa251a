"""The files that a run reads and writes, opened before anything slow begins.

Rows go out with one system call each, unbuffered: what a killed run has written is whole lines, and
a reader at the other end of a pipe sees a row as soon as it exists.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import sys
from pathlib import Path

from jaxstate.errors import JaxstateError

STDIN, STDOUT = 0, 1


class FileError(JaxstateError):
    """A file that cannot be read or written as asked."""


def hold_standard() -> None:
    """Give descriptors 0 to 2 that are closed to the null device, so that no file gets their place.

    The first two are opened the wrong way round: what is written to a closed standard output is
    refused, not lost.
    """
    for fd, way in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, way)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
    if sys.stderr is None:  # what Python makes of a closed one; print would take standard output
        sys.stderr = open(2, "w", closefd=False)


def open_input(name: str) -> int:
    """Return a descriptor to read a file, or standard input for `-`.

    Raises:
      FileError: there is no such file, or it cannot be read.
    """
    if name == "-":
        check_open(STDIN, "standard input", os.O_WRONLY)
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


def check_open(fd: int, what: str, wrong: int) -> None:
    """Raise FileError if a descriptor is closed, or open for the other way only."""
    try:
        way = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise FileError(f"{what} is closed") from error
    if way == wrong:
        raise FileError(f"{what} is closed")


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


def check_apart(name: str, what: str, others: dict[str, int]) -> None:
    """Raise FileError if a path leads to one of these open files, named by what they are.

    Devices and pipes are nobody's to lose: only regular files count.
    """
    try:
        status = os.stat(name)
    except OSError:
        return  # there is none yet; those others exist
    for other, fd in others.items():
        if _same_regular(status, os.fstat(fd)):
            raise FileError(f"{what} {name} is the file of {other} itself; give it another name")


def _same_regular(first: os.stat_result, second: os.stat_result) -> bool:
    return stat.S_ISREG(first.st_mode) and os.path.samestat(first, second)


class Output:
    """Where rows go: a file, or standard output for `-`."""

    def __init__(self, name: str, *, input_fd: int, overwrite: bool):
        """Open it; an existing file with content is kept unless told otherwise.

        Raises:
          FileError: it cannot be written, is the input itself, is being written by another run, or
            holds something already.
        """
        self.name = name
        self._standard = name == "-"
        self._made = False
        if self._standard:
            check_open(STDOUT, "standard output", os.O_RDONLY)
            # Rows appended to the input would be read as lines, without end.
            if _same_regular(os.fstat(STDOUT), os.fstat(input_fd)):
                raise FileError("standard output is the input itself; write to another file")
            self.fd = STDOUT
            return
        check_writable(name, "the output")
        try:
            self.fd, self._made = _open_or_make(name)
        except OSError as error:
            raise FileError(f"cannot write the output {name}: {error.strerror}") from error
        try:
            self._claim(input_fd, overwrite)
        except FileError:
            os.close(self.fd)
            raise

    def _claim(self, input_fd: int, overwrite: bool) -> None:
        if os.path.samestat(os.fstat(self.fd), os.fstat(input_fd)):
            raise FileError(f"the output {self.name} is the input itself; give it another name")
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            return
        if not _lock(self.fd, self.name):
            raise FileError(
                f"another run is writing the output {self.name}; give another name, or wait for it"
            )
        if os.fstat(self.fd).st_size and not overwrite:
            raise FileError(
                f"the output {self.name} exists and is not empty; "
                "give another name, or --overwrite to replace it"
            )

    def begin(self) -> None:
        """Empty the file; until here nothing in it is touched, so that a wrong model costs nothing."""
        if not self._standard and stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.ftruncate(self.fd, 0)

    def replaced(self) -> None:
        """Another file has taken its place, and that one stays."""
        self._made = False

    def write(self, row: bytes) -> None:
        """Write one whole line."""
        view = memoryview(row)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # whoever made the pipe wanted it so
                select.select([], [self.fd], [])

    def close(self) -> None:
        """Close it; a file made by this run that no row reached is taken away again."""
        if self._standard:
            return
        if self._made and os.fstat(self.fd).st_size == 0:
            os.unlink(self.name)  # before the lock goes with the descriptor
        os.close(self.fd)


def _open_or_make(name: str) -> tuple[int, bool]:
    """Return a descriptor to write to, and whether there was no file before."""
    try:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:  # a link that leads nowhere counts as one too
        return os.open(name, os.O_WRONLY | os.O_CREAT, 0o666), False


def _lock(fd: int, name: str) -> bool:
    """Take a file for as long as it is open; whether nobody else has it, or took it away before."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return os.path.exists(name) and os.path.samestat(os.stat(name), os.fstat(fd))
