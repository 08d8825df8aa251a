"""The folder beside an output, in which the processes of a job keep their rows until all are there.

Every process writes to a file of its own, made anew at every start and named after the start, so that a process that
was thought gone and is not can write to nobody's rows but its own. A row counts once it stands there as a whole line;
a line of input that has a row, in whichever file, is done. So the folder is all that a later start needs, with any
number of processes, and nothing in it is ever changed.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxstate.serve.files import FileError

_JOB = "job.json"
_MERGED = "merged"


class _Head(msgspec.Struct):
    line: int
    error: Any = None


@dataclasses.dataclass(frozen=True)
class Merged:
    """The output as it became: rows, those of them that are errors, lines that had two rows that differ."""

    rows: int
    failed: int
    differ: tuple[int, ...]


def folder_of(output: str) -> Path:
    """The folder that belongs to an output."""
    return Path(os.path.realpath(output) + ".parts")


class Part:
    """One process's rows of one start."""

    def __init__(self, folder: Path, start: str, process: int):
        self.path = folder / f"{start}-{process:04}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def write(self, row: bytes) -> None:
        """Write one whole line."""
        view = memoryview(row)
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        """Close it, so that other hosts see all of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Parts:
    """The folder of one job."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def job(self) -> dict[str, Any] | None:
        """What `begin` was told last; None where there is nothing yet."""
        try:
            return json.loads((self.folder / _JOB).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise FileError(f"cannot read {self.folder / _JOB}: {error}") from error

    def begin(self, job: dict[str, Any]) -> None:
        """Make the folder, or use it again, for this job."""
        try:
            self.folder.mkdir(exist_ok=True)
            fresh = self.folder / f"{_JOB}.new"
            fresh.write_text(json.dumps(job, indent=2) + "\n")
            fresh.replace(self.folder / _JOB)
        except OSError as error:
            raise FileError(f"cannot write {self.folder}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the folder with all rows in it: at once, so that none of them is ever taken for another job's.

        Raises:
          FileError: it cannot be removed.
        """
        away = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}.old")
        try:
            self.folder.rename(away)
        except FileNotFoundError:
            return
        except OSError as error:
            raise FileError(f"cannot remove {self.folder}: {error.strerror}") from error
        shutil.rmtree(away, ignore_errors=True)

    def done(self) -> set[int]:
        """The lines of input that have a row."""
        return {head.line for *_, head in self._rows()}

    def merge(self, output: str, lines: int) -> Merged:
        """Write the rows of all parts to the output, in the order of lines, a row a line; then remove the folder.

        The output is there whole or not at all. Of two rows for one line the earlier start's is taken; they are equal
        but for what was reused of other prompts, or the line is told.

        Raises:
          RuntimeError: some of this many lines have no row; nothing was changed.
        """
        import numpy as np  # late, since help should be quick

        paths: list[Path] = []
        columns = [array.array("q") for _ in range(5)]  # line, part, offset, length, failed
        for path, offset, length, head in self._rows():
            if not paths or paths[-1] != path:
                paths.append(path)
            row = head.line, len(paths) - 1, offset, length, head.error is not None
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        rows = np.array(columns, np.int64).reshape(5, -1)
        rows = rows[:, np.lexsort((rows[2], rows[1], rows[0]))]
        first = np.diff(rows[0], prepend=-1) != 0
        if (there := int(first.sum())) != lines:
            raise RuntimeError(
                f"{lines:,} lines have {there:,} rows in {self.folder}; start the job again"
            )
        with contextlib.ExitStack() as stack:
            fds = [os.open(path, os.O_RDONLY) for path in paths]
            for fd in fds:
                stack.callback(os.close, fd)
            merged = stack.enter_context(open(self.folder / _MERGED, "wb"))
            differ, kept = [], b""
            for (line, part, offset, length, _), new in zip(rows.T.tolist(), first, strict=True):
                data = os.pread(fds[part], length, offset)
                if new:
                    merged.write(data)
                    kept = data
                elif _apart_from_usage(data) != _apart_from_usage(kept):
                    differ.append(line)
            merged.flush()
            os.fsync(merged.fileno())
        os.replace(self.folder / _MERGED, os.path.realpath(output))
        self.remove()
        return Merged(there, int(rows[4][first].sum()), tuple(differ))

    def _rows(self) -> Iterator[tuple[Path, int, int, _Head]]:
        """Every whole row with its file, offset and length, earlier starts first."""
        decoder = msgspec.json.Decoder(_Head)
        for path in sorted(self.folder.glob("*.jsonl")):
            offset = 0
            with open(path, "rb") as file:
                for data in file:
                    if data.endswith(b"\n"):  # else cut off where its host went down
                        with contextlib.suppress(msgspec.DecodeError):
                            yield path, offset, len(data), decoder.decode(data)
                    offset += len(data)


def fingerprint(fd: int) -> tuple[str, int]:
    """A hash of a file's bytes, and how many lines it has at most."""
    digest, offset, lines = hashlib.blake2b(digest_size=16), 0, 1
    while chunk := os.pread(fd, 1 << 20, offset):
        digest.update(chunk)
        offset, lines = offset + len(chunk), lines + chunk.count(b"\n")
    return digest.hexdigest(), lines


def _apart_from_usage(data: bytes) -> dict[str, Any]:
    row = json.loads(data)
    row.pop("usage", None)
    return row
