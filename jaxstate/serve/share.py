"""Which lines of a job's input are this process's.

The lines are numbered in units of a few, and a process that has room claims the next unit that nobody has: a fast
process takes more, one that is slow holds up the end by no more than what it has under way, and prompts that stand
together stay together. Every process reads the whole input, and of others' lines only the ids, so that an id that
stands there twice is refused with the words of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxstate.serve.lines import Line, LineReader

MOST = 16
"""Lines of a unit at most."""

_PASSED = 256  # lines of others at most, before the caller has its turn


def unit_of(lines: int, processes: int) -> int:
    """Lines of a unit: so few that each process has several units to take."""
    return max(1, min(MOST, lines // (8 * processes)))


class Share:
    """A reader of lines like `LineReader`, of this process's alone.

    Args:
      reader: the whole input.
      done: numbers of lines that have a row already.
      unit: lines of a unit.
      claim: the number of the next unit that nobody has, which from then on is ours.
      skip: is told of every line that is not given out.
    """

    def __init__(
        self, reader: LineReader, done: Collection[int], unit: int,
        claim: Callable[[], int], skip: Callable[[Line], None],
    ):  # fmt: skip
        self._reader, self._done, self._unit = reader, done, unit
        self._claim, self._skip = claim, skip
        self._mine = -1
        self.lines = 0  # of the whole input, once it has ended

    @property
    def ended(self) -> bool:
        return self._reader.ended

    @property
    def bytes_taken(self) -> int:
        return self._reader.bytes_taken

    def next(self, timeout: float = 0.0) -> Line | None:
        """Return the next line that is ours, or None when there was none in time (see `ended`)."""
        for _ in range(_PASSED):
            line = self._reader.next(timeout)
            if line is None:
                return None
            at, self.lines = self.lines // self._unit, self.lines + 1
            if at > self._mine:
                self._mine = self._claim()
            if at == self._mine and line.number not in self._done:
                return line
            self._skip(line)
        return None
