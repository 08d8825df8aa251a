"""What ran on a GPU and when, read from a profile of jax.profiler."""

from __future__ import annotations

import collections
import dataclasses
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

HOST_EVENTS = re.compile(r"command.?buffer|graph|condition|memcpyd2h", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Kernels by name, and the time in which none ran.

    Attributes:
      span_us: from the start of the first kernel to the end of the last.
      busy_us: time in which at least one ran.
      launches: kernels and copies that ran.
      kernels: (name without its number, how often, microseconds in all), the longest first.
      gaps: (the kernel before, the kernel after, how often, microseconds in all) of pauses over 1 us.
      host: (event, how often, microseconds in all) of the host's work on CUDA graphs.
    """

    span_us: float
    busy_us: float
    launches: int
    kernels: list[tuple[str, int, float]]
    gaps: list[tuple[str, str, int, float]]
    host: list[tuple[str, int, float]]

    def lines(self, most: int = 24) -> list[str]:
        """The trace as a table."""
        idle = self.span_us - self.busy_us
        share = idle / max(self.span_us, 1e-9)
        lines = [
            f"{self.launches} launches in {self.span_us:.0f} us, idle {idle:.0f} us ({share:.0%})"
        ]
        lines += [f"  {us:9.1f} us {n:6} x {us / n:7.2f}  {k}" for k, n, us in self.kernels[:most]]
        lines += [f"  {us:9.1f} us {n:6} gaps {a} -> {b}" for a, b, n, us in self.gaps[:8]]
        lines += [f"  {us:9.1f} us {n:6} on the host: {k}" for k, n, us in self.host[:8]]
        return lines


def profile(work: Callable[[], Any]) -> Trace:
    """The trace of `work`, which waits for what it starts."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return read(jax.profiler.ProfileData.from_file(str(file)))


def read(data: Any) -> Trace:
    """The trace in a profile's data."""
    events, host = [], []
    for plane in data.planes:
        device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if device and line.name.startswith("Stream"):
                events += [(e.start_ns, e.duration_ns, _family(e.name)) for e in line.events]
            elif plane.name.startswith("/host"):
                host += [(e.name, e.duration_ns) for e in line.events if HOST_EVENTS.search(e.name)]
    return summary(sorted(events), host)


def summary(
    events: list[tuple[float, float, str]], host: list[tuple[str, float]] | None = None
) -> Trace:
    """The trace of events (start, duration, name) in nanoseconds, in order of their starts."""
    kernels, gaps = collections.defaultdict(list), collections.defaultdict(list)
    busy, end, last = 0.0, None, ""
    for start, duration, name in events:
        kernels[name].append(duration)
        if end is not None and start - end > 1000:
            gaps[last, name].append(start - end)
        begin = start if end is None else max(start, end)
        busy += max(0.0, start + duration - begin)
        if end is None or start + duration >= end:
            end, last = start + duration, name
    span = 0.0 if end is None else end - events[0][0]
    works = collections.defaultdict(list)
    for name, duration in host or []:
        works[name].append(duration)
    return Trace(
        span / 1e3,
        busy / 1e3,
        len(events),
        _totals(kernels),
        [(*pair, n, us) for pair, n, us in _totals(gaps)],
        _totals(works),
    )


def _totals(durations: dict[Any, list[float]]) -> list[tuple[Any, int, float]]:
    totals = [(name, len(ns), sum(ns) / 1e3) for name, ns in durations.items()]
    return sorted(totals, key=lambda total: -total[2])


def _family(name: str) -> str:
    """A kernel's name without the number that tells it from others of its kind."""
    return re.sub(r"(_\d+)+$", "", name)
