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


def make_folder(name: str) -> None:
    """Make the folder if it is not there.

    Raises:
      SnapshotError: it cannot be made, read or written.
    """
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise SnapshotError(f"the prefix store {name} is a file; name a folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"cannot make the prefix store {name}: {error.strerror}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise SnapshotError(f"the prefix store {name} may not be read and written by this user")


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
          SnapshotError: the folder has states of another model.
          SpecError: prefix reuse is off.
        """
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
        left = f"; no room for {stored.no_room:,} more" if stored.no_room else ""
        self.report.stage("prefixes", f"{stored} {how} {self.folder}{left}")
