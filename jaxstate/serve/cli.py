"""Flags and exit codes. Nothing slow is imported before the command line is known to be right."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxstate.errors import JaxstateError, SpecError
from jaxstate.request import SamplingParams
from jaxstate.serve import files, protocol
from jaxstate.serve.batch import Batch
from jaxstate.serve.flags import (
    PROG,
    SIZES,
    STORE_BYTES,
    batch_parser,
    info_parser,
    size_in_bytes,
)
from jaxstate.serve.lines import Line, LineReader
from jaxstate.serve.report import Report, Summary
from jaxstate.serve.signals import Interrupted, Interrupts
from jaxstate.serve.store import Store, make_folder
from jaxstate.serve.team import Stopped
from jaxstate.serve.work import Alone, Several, stop_here

OK, SOME_FAILED, USAGE, STOPPED, BROKEN, BROKEN_PIPE = 0, 1, 2, 3, 4, 141


def main(argv: list[str]) -> int:
    """Run a command line and return its exit code."""
    files.hold_standard()
    verb, rest = ("batch", argv)
    if argv and argv[0] in VERBS:
        verb, rest = argv[0], argv[1:]
    parser, run = VERBS[verb]
    options = parser().parse_args(rest)
    options.prefix = ""

    def complain(message: str) -> None:
        _complain(options.prefix + message)

    try:
        with Interrupts() as interrupts:
            return run(options, interrupts)
    except Interrupted as interrupted:
        complain(f"stopped by {interrupted}")
        return interrupted.exit_code
    except BrokenPipeError:
        return BROKEN_PIPE
    except Stopped as stopped:
        complain(str(stopped))
        return STOPPED
    except JaxstateError as error:
        complain(str(error))
        return USAGE
    except Exception as error:
        if type(error).__name__ != "JaxRuntimeError" and not isinstance(error, OSError):
            traceback.print_exc()  # a fault of ours: show all there is
        complain(f"cannot go on: {error}")
        if "RESOURCE_EXHAUSTED" in str(error):
            complain("the device is out of memory; lower --rows or --chunk-tokens")
        return BROKEN


def run_batch(options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Generate for every line of the input; return the exit code."""
    sampling = _sampling(options)
    report = Report(_progress_mode(options))
    with _work(options, report) as work:
        options.prefix = report.prefix
        input_fd = files.open_input(options.input)
        if options.input != "-":
            work.callback(os.close, input_fd)
        work.open(input_fd)
        stats_name = options.stats if work.leads else None
        if stats_name is not None:
            files.check_writable(stats_name, "the stats")
            # Once the output exists, a path that leads there does so however it is spelled.
            ends = {"the input": input_fd, **work.ends()}
            files.check_apart(stats_name, "the stats", ends)
        most = _store_bytes(options)
        if options.prefix_store is not None:
            make_folder(options.prefix_store)
        model = _load(options, report)
        store = None
        if options.prefix_store is not None:
            store = Store(options.prefix_store, most, model.engine.prefixes, report)
            store.open()
        work.compile(model, sampling)

        parser = _Parser(options, report, sampling, model)
        reader = work.lines(LineReader(input_fd), parser.skip)
        size = files.input_size(input_fd)

        def pause() -> None:
            interrupts.check()
            work.check()
            share = min(1.0, reader.bytes_taken / size) if size else None
            report.progress(work.totals(batch.counts), len(batch.jobs), share)

        batch = Batch(model.engine, reader, parser.parse, work.write, 2 * model.rows, pause)
        if options.input == "-" and os.isatty(files.STDIN):
            report.stage("input", "type prompts, one a line; Ctrl-D ends")
        interrupts.deferred = True
        begin = time.monotonic()
        work.begin(lambda: batch.counts, interrupts.check)
        report.begin()
        done, sound, told, failed = False, False, True, 0
        try:
            batch.run()
            sound = True
            failed = work.end(batch.counts)
            done = True
        except JaxstateError as error:
            raise RuntimeError("the engine broke a rule of its own") from error
        except (Interrupted, OSError, Stopped):
            sound = True
            raise
        finally:
            report.end()
            seconds = time.monotonic() - begin
            stats = model.stats() | work.stats(batch.counts)
            if store is not None and sound:
                store.save()
                stats["prefix_store"] = store.counts
            summary = Summary(work.totals(batch.counts), model.load_s, seconds, stats, done)
            if work.leads:
                for line in summary.lines():
                    report.say(line)
            if stats_name is not None:
                told = _write_stats(stats_name, summary)
    if not told:
        return BROKEN
    return SOME_FAILED if failed else OK


def _work(options: argparse.Namespace, report: Report) -> Alone | Several:
    if options.processes is None:
        for name in ("process_id", "coordinator"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise SpecError(
                    f"{flag} is about one of several --processes, and none are asked for"
                )
        return Alone(options)
    return Several(options, report, stop_here)


def _store_bytes(options: argparse.Namespace) -> int:
    """How large the prefix store may be; SpecError for flags about a store that there is not."""
    if options.prefix_store is None and options.prefix_store_bytes is not None:
        raise SpecError("--prefix-store-bytes is about a --prefix-store, and none is named")
    if options.prefix_store is not None and options.checkpoints == 0:
        raise SpecError("prefix reuse is off with --checkpoints 0, and a --prefix-store needs it")
    return options.prefix_store_bytes or size_in_bytes(STORE_BYTES)


def _write_stats(name: str, summary: Summary) -> bool:
    """Write the summary; whether that went well. It never hides how the run itself ended."""
    try:
        Path(name).write_text(json.dumps(summary.as_dict(), indent=2) + "\n")
    except OSError as error:
        _complain(f"cannot write the stats {name}: {error.strerror}; what rows there are stay")
        return False
    return True


def run_info(options: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print what a model keeps and how much of it fits; return the exit code."""
    del interrupts
    files.check_open(files.STDOUT, "standard output", os.O_RDONLY)
    model = _load(options, Report("none"))
    text = "".join(f"{name:<10}{text}\n" for name, text in model.describe())
    os.write(files.STDOUT, text.encode())
    return OK


class _Parser:
    """Reads lines in the format of the input, which the first of them may decide."""

    def __init__(
        self, options: argparse.Namespace, report: Report, sampling: SamplingParams, model: Any
    ):
        encode = None if model.tokenizer is None else model.tokenizer.encode
        self._rules = protocol.Rules(
            sampling, options.logprobs, encode, model.vocab_size, model.prompt_bytes
        )
        self._options, self._report = options, report
        self._form: protocol.Plain | protocol.Text | None = None
        self._watch = False  # for lines of JSON among text

    def skip(self, line: Line) -> None:
        """Take note of a line that somebody else answers."""
        self._format(line).skip(line)

    def parse(self, line: Line) -> protocol.Job | protocol.Refusal:
        form = self._format(line)
        if self._watch and protocol.looks_like_json(line.data):
            self._watch = False  # once is enough
            self._report.say(
                f"warning   line {line.number} looks like JSON, but the input is read as text, and "
                "so the line is a prompt as it stands; --input-format jsonl reads lines as JSON"
            )
        return form.parse(line)

    def _format(self, line: Line) -> protocol.Plain | protocol.Text:
        if self._form is None:
            name = self._options.input_format
            if name == "auto":
                name = protocol.guess_format(self._options.input, line.data)
                self._report.stage("input", f"{self._options.input}, read as {name}")
            self._form = protocol.FORMS[name](self._rules)
            self._watch = self._options.input_format == "auto" and name == protocol.Text.name
        return self._form


def _load(options: argparse.Namespace, report: Report) -> Any:
    report.stage("loading", options.model)
    # Here, not at the top: importing JAX takes seconds, and a wrong flag should not.
    from jaxstate.serve import model as models

    def say(line: str) -> None:
        report.stage(*line.split(" ", 1))  # "compiling decode, …", "compiled decode, …: 6.2 s"

    sizes = {name: getattr(options, name) for name in SIZES}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = models.load(options.model, dtype=options.dtype, report=say, **sizes)
    for warning in caught:
        report.say(f"warning   {warning.message}")
    report.stage("loaded", f"{options.model}: {model.load_s:.1f} s")
    return model


def _progress_mode(options: argparse.Namespace) -> str:
    # A live line and rows on one terminal would write over each other.
    rows_on_terminal = options.output == "-" and os.isatty(files.STDOUT)
    return "plain" if options.progress == "auto" and rows_on_terminal else options.progress


def _sampling(options: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(options, name) for name in protocol.SAMPLING_FIELDS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


VERBS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[..., int]]] = {
    "batch": (batch_parser, run_batch),
    "info": (info_parser, run_info),
}


def _complain(message: str) -> None:
    # Standard error may be a pipe that nobody reads any more.
    with contextlib.suppress(OSError):
        print(f"{PROG}: {message}", file=sys.stderr, flush=True)
