"""Lines of an input, read as they are wanted, so that memory does not grow with the file.

A line ends at a newline byte and nowhere else: a carriage return before it is dropped, and U+2028
in a string is an ordinary character. A byte order mark at the start is dropped, and blank lines are
skipped but counted, so that line numbers are those of an editor.
"""

from __future__ import annotations

import dataclasses
import os
import select
from collections import deque

MAX_LINE = 16 << 20
"""Bytes of the longest line that is read; of a longer one only the fact is kept."""

_CHUNK = 1 << 16
_READS = 4  # at most, before the caller has its turn
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of input, without its end. `cut` says that it was longer than `MAX_LINE`."""

    number: int
    data: bytes
    cut: bool = False


class LineReader:
    """The lines behind a file descriptor: a file, a pipe or a terminal."""

    def __init__(self, fd: int):
        self._fd = fd
        self._ready: deque[Line] = deque()
        self._parts: list[bytes] = []  # of the line that is not complete yet
        self._length = 0
        self._number = 0
        self._closed = False
        self.bytes_taken = 0  # of the lines handed out, skipped ones aside

    @property
    def ended(self) -> bool:
        """Whether every line has been handed out."""
        return self._closed and not self._ready

    def next(self, timeout: float = 0.0) -> Line | None:
        """Return the next line, or None when none came in time or in a few reads (see `ended`).

        However long a line is, or a run of blank ones, the caller gets to look at other things.
        """
        for i in range(_READS):
            if self._ready or self._closed:
                break
            if not select.select([self._fd], [], [], 0.0 if i else timeout)[0]:
                return None
            self._read()
        if not self._ready:
            return None
        line = self._ready.popleft()
        self.bytes_taken += len(line.data) + 1
        return line

    def _read(self) -> None:
        chunk = os.read(self._fd, _CHUNK)
        if not chunk:
            self._closed = True
            if self._length:
                self._end_line()
            return
        *ends, rest = chunk.split(b"\n")
        for part in ends:
            self._add(part)
            self._end_line()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        if self._length <= MAX_LINE:
            self._parts.append(part)

    def _end_line(self) -> None:
        self._number += 1
        data, cut = b"".join(self._parts), self._length > MAX_LINE
        if self._number == 1:
            data = data.removeprefix(_BOM)
        data = data.removesuffix(b"\r")
        if cut or data.strip():
            self._ready.append(Line(self._number, data, cut))
        self._parts, self._length = [], 0
