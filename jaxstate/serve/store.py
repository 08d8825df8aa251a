"""A folder of states for prompts that begin alike, read before the first line and written after the last."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Protocol

from jaxstate.errors import SnapshotError
from jaxstate.serve.report import Report


class Keeps(Protocol):
    """The part of an engine's prefixes that the store uses."""

    def load(self, folder: str) -> Any: ...
    def save(self, folder: str, *, most_bytes: int | None) -> Any: ...


@dataclasses.dataclass
class Store:
    """The store of one run; what became of it is told in `counts`."""

    folder: str
    most_bytes: int
    prefixes: Keeps
    report: Report
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def open(self) -> None:
        """Read what is there; a file that is not whole is named, and the run goes on without it.

        Raises:
          SnapshotError: the folder cannot be made or written, or has states of another model.
          SpecError: prefix reuse is off.
        """
        folder = Path(self.folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(
                f"cannot make the prefix store {self.folder}: {error.strerror}"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SnapshotError(f"the prefix store {self.folder} cannot be written")
        self._tell("loaded", "read from", self.prefixes.load(self.folder))

    def save(self) -> None:
        """Write what is kept now. It never hides how the run itself ended."""
        try:
            stored = self.prefixes.save(self.folder, most_bytes=self.most_bytes)
        except Exception as error:
            self.report.say(f"warning   prefixes are not kept for the next run: {error}")
        else:
            self._tell("saved", "written to", stored)

    def _tell(self, what: str, how: str, stored: Any) -> None:
        self.counts[what] = stored.states
        for problem in stored.problems:
            self.report.say(f"warning   {problem}")
        self.report.stage("prefixes", f"{stored} {how} {self.folder}")
