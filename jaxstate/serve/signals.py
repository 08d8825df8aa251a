"""Ctrl-C and SIGTERM, heard where no row is half written.

While nothing is at stake the first signal stops the run at once, while rows are written between two
steps. The second ends the process the hard way, for a run that hangs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType


class Interrupted(BaseException):
    """A signal asked to stop; not an `Exception`, so that nothing on the way takes it for a fault."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum
        super().__init__(signal.Signals(signum).name)


class Interrupts:
    """While entered, the first SIGINT or SIGTERM raises `Interrupted`, or waits for `check` if deferred."""

    def __init__(self):
        self.deferred = False
        self._received: int | None = None
        self._before: dict[int, object] = {}

    def check(self) -> None:
        """Raise Interrupted when a signal came meanwhile."""
        if self._received is not None:
            raise Interrupted(self._received)

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # pyright: ignore[reportArgumentType]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        self._received = signum
        with contextlib.suppress(OSError):
            os.write(2, b"stopping; once more to stop the hard way\n")
        if not self.deferred:
            self.check()
