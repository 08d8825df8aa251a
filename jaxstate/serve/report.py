"""What a run says while it runs and when it is done; all of it goes to standard error.

On a terminal there is a live line; elsewhere a plain one every few seconds, fit for a log file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import IO, Any

INTERVAL_S = 5.0
"""Seconds between two plain lines of progress."""


@dataclasses.dataclass
class Counts:
    """What came of the lines so far."""

    ok: int = 0
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    generated: int = 0  # also those of requests under way, and those that a stop text then cut off
    cached_tokens: int = 0
    first_token_sum_s: float = 0.0
    first_token_max_s: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        mine, others = vars(self), vars(other)
        both: dict[str, Any] = {name: mine[name] + others[name] for name in mine}
        most = max(self.first_token_max_s, other.first_token_max_s)
        return dataclasses.replace(Counts(**both), first_token_max_s=most)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"errors": dict(self.errors)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Counts:
        """What `as_dict` returned, perhaps by way of JSON."""
        return dataclasses.replace(cls(**values), errors=collections.Counter(values["errors"]))

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def rows(self) -> int:
        return self.ok + self.failed


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run as a whole: the counts, the seconds of its parts, and what the engine tells of itself."""

    counts: Counts
    load_s: float
    generate_s: float
    engine: dict[str, Any]
    finished: bool = True

    @property
    def compile_s(self) -> float:
        return self.engine["engine"]["compile_s"]

    def as_dict(self) -> dict[str, Any]:
        """Return what `--stats` writes."""
        counts, seconds = self.counts, max(self.generate_s, 1e-9)
        return {
            "rows": {"ok": counts.ok, "failed": counts.failed, "errors": dict(counts.errors)},
            "tokens": {
                "prompt": counts.prompt_tokens,
                "completion": counts.completion_tokens,
                "cached": counts.cached_tokens,
                "prompt_per_s": counts.prompt_tokens / seconds,
                "completion_per_s": counts.completion_tokens / seconds,
            },
            "first_token_s": {
                "mean": counts.first_token_sum_s / max(counts.ok, 1),
                "max": counts.first_token_max_s,
            },
            "seconds": {
                "load": self.load_s,
                "compile": self.compile_s,
                "generate": self.generate_s,
            },
            "finished": self.finished,
            **self.engine,
        }

    def lines(self) -> list[str]:
        """Return what a person reads at the end."""
        values = self.as_dict()
        rows, tokens, first = values["rows"], values["tokens"], values["first_token_s"]
        causes = ", ".join(f"{code} {n:,}" for code, n in self.counts.errors.most_common())
        blocks = ", ".join(
            f"{group} {used['peak']:,} of {used['pool']:,}"
            for group, used in values.get("blocks", {}).items()
        )
        lines = [f"rows      {rows['ok']:,} ok, {rows['failed']:,} failed"]
        lines[0] += f" ({causes})" if causes else ""
        lines[0] += "" if self.finished else "; stopped before the end of the input"
        if self.counts.ok:
            lines += [
                f"tokens    {tokens['prompt']:,} in ({tokens['prompt_per_s']:,.0f}/s), "
                f"{tokens['completion']:,} out ({tokens['completion_per_s']:,.0f}/s)",
                f"latency   first token after {first['mean']:.2f} s on average, "
                f"{first['max']:.2f} s at most",
            ]
        if team := values.get("processes"):
            each = ", ".join(f"{process['rows']:,}" for process in team["each"])
            kept = f"; {team['kept']:,} kept from before" if team["kept"] else ""
            lines.append(f"processes {len(team['each'])}, with {each} rows{kept}")
        if blocks:
            lines.append(f"blocks    {blocks} in use at most")
        reuse = values["engine"].get("prefix", {})
        if reuse and set(reuse) != {"off"}:
            share = tokens["cached"] / max(tokens["prompt"], 1)
            why = ", ".join(f"{reason} {n:,}" for reason, n in sorted(reuse.items()))
            lines.append(f"prefixes  {share:.0%} of prompt tokens reused ({why})")
        lines.append(
            f"time      load {self.load_s:.1f} s, compile {self.compile_s:.1f} s, "
            f"generate {self.generate_s:.1f} s"
        )
        return lines


class Report:
    """Progress as a live line (`rich`), as `plain` lines or `none`; `auto` looks where it goes."""

    def __init__(
        self,
        mode: str = "auto",
        *,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        if mode == "auto":
            mode = "rich" if self._stream.isatty() else "plain"
        self.mode = mode
        self.prefix = ""  # of every line, where several processes write to one log
        self._live: Any = None
        self._started = self._last = clock()

    def stage(self, name: str, text: str) -> None:
        """Say that a part of the start-up is done or begins."""
        if self.mode != "none":
            self.say(f"{name:<9} {text}")

    def say(self, text: str) -> None:
        """Write a line, whatever the mode."""
        text = self.prefix + text
        # Nobody may read the messages any more; the rows matter more than they do.
        with contextlib.suppress(OSError):
            if self._live is not None:
                self._live.console.print(text, highlight=False, markup=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)

    def begin(self) -> None:
        """Start the clock of the rates and, on a terminal, the live line."""
        self._started = self._last = self._clock()
        if self.mode == "rich":
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._stream), refresh_per_second=4, transient=True
            )
            self._live.start()

    def progress(self, counts: Counts, running: int, share: float | None) -> None:
        """Show where the run stands; cheap enough for every step."""
        now = self._clock()
        if self.mode == "none" or now - self._last < (0.25 if self._live else INTERVAL_S):
            return
        self._last = now
        line = progress_line(counts, running, share, now - self._started)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        else:
            self.say(line)

    def end(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_line(counts: Counts, running: int, share: float | None, seconds: float) -> str:
    """Return one line on rows, tokens and time; `share` is how much of the input has been read."""
    seconds = max(seconds, 1e-9)
    parts = [f"{counts.rows:,} row{'s' * (counts.rows != 1)}"]
    parts += [f"{share:.0%} read"] if share is not None else []
    parts += [f"{counts.failed:,} failed"] if counts.failed else []
    rates = counts.prompt_tokens / seconds, counts.generated / seconds
    parts += [f"{running:,} under way", "tokens/s: {:,.0f} in, {:,.0f} out".format(*rates)]
    if share is not None and 0 < share < 1:
        parts += [f"{_duration(seconds * (1 - share) / share)} left"]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
