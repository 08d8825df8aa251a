"""Where a run's lines come from and its rows go: the run alone, or one process of a job (`team`, `share`, `parts`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxstate.errors import SpecError
from jaxstate.request import SamplingParams
from jaxstate.serve import files, parts
from jaxstate.serve.flags import AUTO
from jaxstate.serve.lines import Line, LineReader
from jaxstate.serve.link import Link, ManyProcesses, OneProcess
from jaxstate.serve.report import Counts, Report
from jaxstate.serve.share import Share, unit_of
from jaxstate.serve.team import Team

SEEN_S = 60.0
"""How long a shared file system may take to show one host what another wrote."""

_TELLS_BITS_APART = ("device", "jax")
_OF_THIS_HOST = ("rows", "max_len", "chunk_tokens", "decode_steps", "tensor_parallel")


class Work(Protocol):
    """What `cli.run_batch` needs of either, in this order."""

    leads: bool

    def open(self, input_fd: int) -> None: ...
    def ends(self) -> dict[str, int]: ...
    def compile(self, model: Any, sampling: SamplingParams) -> None: ...
    def lines(self, reader: LineReader, skip: Callable[[Line], None]) -> LineReader | Share: ...
    def begin(self, counts: Callable[[], Counts], pause: Callable[[], None]) -> None: ...
    def write(self, row: bytes) -> None: ...
    def check(self) -> None: ...
    def totals(self, counts: Counts) -> Counts: ...
    def end(self, counts: Counts) -> int: ...
    def stats(self, counts: Counts) -> dict[str, Any]: ...


class Alone(contextlib.ExitStack):
    """A run of one process, which writes rows to the output as soon as they are known."""

    leads = True

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self._options = options

    def open(self, input_fd: int) -> None:
        """Open the output; FileError if it cannot be written, or a job has rows for it."""
        name = self._options.output
        if name != "-" and (folder := parts.folder_of(name)).is_dir():
            raise files.FileError(
                f"{folder} has rows of a job of several processes that has not ended; go on with it by --processes "
                "(1 is enough), or remove that folder"
            )
        self._output = files.Output(name, input_fd=input_fd, overwrite=self._options.overwrite)
        self.callback(self._output.close)

    def ends(self) -> dict[str, int]:
        return {"the output": self._output.fd}

    def compile(self, model: Any, sampling: SamplingParams) -> None:
        model.engine.compile()

    def lines(self, reader: LineReader, skip: Callable[[Line], None]) -> LineReader:
        return reader

    def begin(self, counts: Callable[[], Counts], pause: Callable[[], None]) -> None:
        self._output.begin()

    def write(self, row: bytes) -> None:
        self._output.write(row)

    def check(self) -> None:
        pass

    def totals(self, counts: Counts) -> Counts:
        return counts

    def end(self, counts: Counts) -> int:
        """How many rows are errors."""
        return counts.failed

    def stats(self, counts: Counts) -> dict[str, Any]:
        return {}


class Several(contextlib.ExitStack):
    """One process of a job."""

    def __init__(self, options: argparse.Namespace, report: Report, give_up: Callable[[str], None]):
        """Join the others.

        Raises:
          SpecError: flags that say too little.
          FileError: input or output is no file that all processes could see.
          LinkError: not all came.
        """
        super().__init__()
        self._options, self._report = options, report
        _check_names(options)
        link = _link(options)
        if link.devices not in (None, "", "all"):
            import jax

            jax.config.update("jax_cuda_visible_devices", link.devices)
        self._team = Team(link, options.heartbeat_timeout, give_up)
        self.leads = self._team.id == 0
        if not self.leads:
            report.mode = "none"
        if self._team.count > 1:
            report.prefix = "" if self.leads else f"process {self._team.id}: "
        self._parts = parts.Parts(parts.folder_of(options.output))
        self._done: set[int] = set()
        self._all: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Several:
        super().__enter__()
        self.enter_context(self._team)
        self.callback(self._tell_what_is_kept)
        self._report.stage("job", ", ".join(map(str, self._team.peers.values())))
        return self

    def open(self, input_fd: int) -> None:
        if files.input_size(input_fd) is None:
            raise files.FileError(
                "the input of a job is read by every process; it must be a file, not a pipe"
            )
        self._input_fd = input_fd
        if self.leads:
            options = self._options
            self._output = files.Output(
                options.output, input_fd=input_fd, overwrite=options.overwrite
            )
            self.callback(self._output.close)

    def ends(self) -> dict[str, int]:
        return {"the output": self._output.fd}

    def compile(self, model: Any, sampling: SamplingParams) -> None:
        """Compile when all agree on what is to be done, process 0 first, so that the others find its programs.

        On a GPU XLA chooses among algorithms by their times; taking the same programs is what makes bits the same.
        """
        team, facts = self._team, _facts(self._options, model, sampling)
        facts["input_bytes"] = files.input_size(self._input_fd)
        if self.leads:
            self._lead(facts)
        else:
            self._follow(facts)
        self._done = self._parts.done()
        if not self.leads:
            team.wait("compiled")
        model.engine.compile()
        if self.leads:
            team.put("compiled", True)
        self._part = parts.Part(self._parts.folder, team.start, team.id)
        self.callback(self._part.close)
        team.gather("ready", None)  # so that nobody takes all lines before others can

    def lines(self, reader: LineReader, skip: Callable[[Line], None]) -> Share:
        claim = lambda: self._team.claim("unit")  # noqa: E731
        self._share = Share(reader, self._done, self._unit, claim, skip)
        return self._share

    def begin(self, counts: Callable[[], Counts], pause: Callable[[], None]) -> None:
        self._team.pause = pause
        self._team.tells = lambda: {"counts": counts().as_dict()}

    def write(self, row: bytes) -> None:
        self._team.check()  # a process that was taken for gone writes no more
        self._part.write(row)

    def check(self) -> None:
        self._team.check()

    def totals(self, counts: Counts) -> Counts:
        """What all processes have done, as far as it was heard of."""
        for id, told in self._heard().items():
            if id != self._team.id:
                counts = counts + told
        return counts

    def end(self, counts: Counts) -> int:
        """Wait for all, have process 0 make the rows the output, and return how many rows are errors."""
        team = self._team
        self._part.close()
        self._all = team.gather("done", counts.as_dict())
        if self.leads:
            merged = self._parts.merge(self._options.output, self._share.lines)
            self._output.replaced()
            if merged.differ:
                lines = f"{len(merged.differ):,} lines, line {merged.differ[0]} for one,"
                self._report.say(f"warning   {lines} had two rows that differ; the first was taken")
            team.put("merged", merged.failed)
        failed = team.wait("merged")
        team.done = True
        return failed

    def stats(self, counts: Counts) -> dict[str, Any]:
        rows = {id: told.rows for id, told in (self._heard() | {self._team.id: counts}).items()}
        each = [
            dataclasses.asdict(p) | {"rows": rows.get(p.id, 0)} for p in self._team.peers.values()
        ]
        return {"processes": {"each": each, "kept": len(self._done)}}

    def _heard(self) -> dict[int, Counts]:
        """What each process has done: at the end all of it, before as far as it was heard of."""
        told = {
            id: told["counts"] for id, told in self._team.told.copy().items() if "counts" in told
        }
        return {id: Counts.from_dict(counts) for id, counts in (self._all or told).items()}

    def _lead(self, facts: dict[str, Any]) -> None:
        team, kept = self._team, self._parts.job
        digest, lines = parts.fingerprint(self._input_fd)
        facts = {**facts, "input": digest}
        if kept is None:
            self._parts.remove()  # rows of nobody knows what job
        else:
            apart = _differences(kept["facts"], facts)
            bits = [told for name, told in apart.items() if name in _TELLS_BITS_APART]
            if others := [told for name, told in apart.items() if name not in _TELLS_BITS_APART]:
                if not self._options.overwrite:
                    raise files.FileError(
                        f"{self._parts.folder} has rows of another job: {'; '.join(others)}; give what it had to go on "
                        "with it, or --overwrite to begin anew"
                    )
                self._parts.remove()
            elif bits:
                self._report.say(
                    f"warning   {'; '.join(bits)}: rows may differ in last bits from those before"
                )
        unit = unit_of(lines, team.count)
        self._parts.begin({"facts": facts, "start": team.start})
        team.put("job", {"facts": facts, "unit": unit})
        self._unit = unit

    def _follow(self, facts: dict[str, Any]) -> None:
        team = self._team
        job = team.wait("job")
        self._unit = job["unit"]
        theirs = {name: value for name, value in job["facts"].items() if name in facts}
        if apart := _differences(theirs, facts):
            raise SpecError(
                f"{team.me} is asked for something else than process 0: {'; '.join(apart.values())}; start all with "
                f"the same command, and give the sizes ({', '.join(_OF_THIS_HOST)}) where devices differ"
            )
        end = time.monotonic() + SEEN_S
        while (self._parts.job or {}).get("start") != team.start:
            team.check()
            if time.monotonic() > end:
                raise files.FileError(
                    f"{team.me} does not see {self._parts.folder} as process 0 wrote it; the output must be on a file "
                    "system that all processes share"
                )
            time.sleep(0.2)

    def _tell_what_is_kept(self) -> None:
        if not self._team.done and self.leads and self._parts.folder.is_dir():
            self._report.say(
                f"kept      {len(self._parts.done()):,} rows in {self._parts.folder}; start the job again, with any "
                "number of processes, to go on"
            )


def _check_names(options: argparse.Namespace) -> None:
    """FileError or SpecError for flags of a job that cannot be."""
    if options.input == "-":
        raise files.FileError("the input of a job is read by every process; name a file with -i")
    if options.output == "-":
        raise files.FileError("the output of a job needs a name, given with -o")
    if options.processes in (1, AUTO):
        return
    count, id = options.processes, options.process_id
    if id is not None and id >= count:
        raise SpecError(f"--process-id is {id}; with --processes {count} it is 0 to {count - 1}")


def _link(options: argparse.Namespace) -> Link:
    if options.processes == 1:
        return OneProcess()
    return ManyProcesses(
        coordinator=options.coordinator,
        count=None if options.processes == AUTO else options.processes,
        id=options.process_id,
        join_s=options.join_timeout,
        silence_s=options.heartbeat_timeout,
    )


def _facts(options: argparse.Namespace, model: Any, sampling: SamplingParams) -> dict[str, Any]:
    """What decides the rows, so that two processes or two starts that differ in it are not one job."""
    stats = model.stats()
    identity = model.identity()
    return {
        "model": f"{identity['model']} {identity['fingerprint']}",
        "dtype": identity["dtype"],
        **dataclasses.asdict(sampling),
        "stop": list(sampling.stop),
        "stop_ids": list(sampling.stop_ids),
        "logprobs": options.logprobs,
        "input_format": options.input_format,
        **{name: stats["sizes"][name] for name in _OF_THIS_HOST},
        "device": stats["device"],
        "jax": stats["jax"],
    }


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Per name what it was and what it is."""
    if before.get("input", now.get("input")) != now.get("input"):
        return {"input": "the input had other lines"}
    return {
        name: f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }


def stop_here(message: str) -> None:
    """End the process where it stands: rows are written by one call each, so none is half written."""
    os.write(2, f"{message}\n".encode())
    os._exit(3)
