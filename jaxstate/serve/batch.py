"""The loop: lines in as the engine has room for them, rows out as soon as they are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jaxstate.errors import CapacityError, RequestError
from jaxstate.request import Completion, Event, Request
from jaxstate.serve.lines import Line, LineReader
from jaxstate.serve.protocol import (
    Job,
    Refusal,
    as_request_error,
    encode_row,
    error_row,
    result_row,
)
from jaxstate.serve.report import Counts
from jaxstate.serve.share import Share

IDLE_WAIT_S = 0.2
"""How long to wait for a line when nothing runs, before looking for signals again."""


class Settles(Protocol):
    """The part of the engine's prefixes that the loop uses."""

    @property
    def unsettled(self) -> bool: ...


class Generates(Protocol):
    """The part of the engine that the loop uses."""

    @property
    def prefixes(self) -> Settles: ...
    def submit(self, request: Request) -> None: ...
    def step(self) -> Iterable[Event]: ...


@dataclasses.dataclass
class Batch:
    """One run over one input.

    Args:
      engine: what generates.
      reader: where lines come from.
      parse: makes a line a request, or says why not.
      write: takes a row as one whole line.
      window: lines to have under way at once; beyond it none is read.
      pause: called between steps, with no row half written; may raise to stop the run.
    """

    engine: Generates
    reader: LineReader | Share
    parse: Callable[[Line], Job | Refusal]
    write: Callable[[bytes], None]
    window: int
    pause: Callable[[], None]
    counts: Counts = dataclasses.field(default_factory=Counts)
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        """Read, generate and write until every line has its row."""
        while self.jobs or not self.reader.ended:
            self.pause()
            self._fill()
            # While nobody writes a line, what was said last is read, so that a next turn starts after it.
            if self.jobs or (self._spare and not self.reader.ended):
                for event in self.engine.step():
                    self._take(event)

    def _fill(self) -> None:
        # Bounded, so that a long run of lines that fail does not keep the engine waiting.
        for _ in range(self.window):
            if len(self.jobs) >= self.window:
                return
            busy = self.jobs or self._spare
            line = self.reader.next(timeout=0.0 if busy else IDLE_WAIT_S)
            if line is None:
                return
            self._begin(self.parse(line))

    @property
    def _spare(self) -> bool:
        return self.engine.prefixes.unsettled

    def _begin(self, job: Job | Refusal) -> None:
        if isinstance(job, Job):
            try:
                self.engine.submit(job.request)
            except (RequestError, CapacityError) as error:
                job = Refusal(job.line, job.request.id, as_request_error(error))
            else:
                self.jobs[job.request.id] = job
                return
        self._write(error_row(job.line, job.id, job.error))
        self.counts.errors[job.error.code] += 1

    def _take(self, event: Event) -> None:
        self.counts.generated += len(event.tokens)
        if event.completion is not None:
            self._end(self.jobs.pop(event.id), event.completion)

    def _end(self, job: Job, completion: Completion) -> None:
        self._write(result_row(job, completion))  # what could not be written is not counted
        counts = self.counts
        counts.prompt_tokens += completion.prompt_tokens
        counts.completion_tokens += len(completion.tokens)
        counts.cached_tokens += completion.cached_tokens
        if completion.error is not None:
            counts.errors[completion.error.code] += 1
        else:
            counts.ok += 1
            counts.first_token_sum_s += completion.first_token_s
            counts.first_token_max_s = max(counts.first_token_max_s, completion.first_token_s)

    def _write(self, row: dict[str, Any]) -> None:
        self.write(encode_row(row))
