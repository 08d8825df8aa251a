"""Progress and summary."""

import collections
import dataclasses
import io
import json

from jaxstate.serve.report import INTERVAL_S, Counts, Report, Summary, progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def counts() -> Counts:
    return Counts(
        ok=1234, errors=collections.Counter(too_long=2, bad_json=1), prompt_tokens=6000,
        completion_tokens=8700, generated=9000, cached_tokens=500, first_token_sum_s=617.0, first_token_max_s=2.5,
    )  # fmt: skip


def test_a_line_of_progress():
    assert progress_line(counts(), 8, 0.25, 30.0) == (
        "1,237 rows  25% read  3 failed  8 under way  tokens/s: 200 in, 300 out  90 s left"
    )
    assert progress_line(Counts(ok=5), 2, None, 10.0) == (
        "5 rows  2 under way  tokens/s: 0 in, 0 out"
    )
    assert progress_line(Counts(), 0, 0.5, 7260.0).endswith("  2 h 1 min left")


def test_plain_lines_come_every_few_seconds():
    now, out = [0.0], io.StringIO()
    report = Report("auto", stream=out, clock=lambda: now[0])
    assert report.mode == "plain"
    report.begin()
    for now[0] in (0.1, INTERVAL_S - 0.1, INTERVAL_S + 0.1, INTERVAL_S + 0.2, 2 * INTERVAL_S + 0.2):
        report.progress(counts(), 1, None)
    report.end()
    assert out.getvalue().count("1,237 rows") == out.getvalue().count("\n") == 2


def test_none_says_nothing_but_what_must_be_said():
    now, out = [0.0], io.StringIO()
    report = Report("none", stream=out, clock=lambda: now[0])
    report.stage("load", "demo")
    report.begin()
    now[0] = 100.0
    report.progress(counts(), 1, None)
    report.end()
    assert out.getvalue() == ""
    report.say("summary")
    assert out.getvalue() == "summary\n"


def test_a_terminal_gets_a_live_line_that_goes_away():
    now, out = [0.0], Terminal()
    report = Report("auto", stream=out, clock=lambda: now[0])
    report.begin()
    now[0] = 1.0
    report.progress(counts(), 1, 0.5)
    report.stage("input", "[prompts] read as jsonl")
    report.end()
    report.say("done")
    shown = out.getvalue()
    assert report.mode == "rich"
    assert "1,237 rows" in shown
    assert "input     [prompts] read as jsonl" in shown
    assert shown.endswith("done\n")


def test_messages_that_nobody_reads_do_not_end_a_run():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Report("plain", stream=Gone()).say("hello")


def summary(counts: Counts) -> Summary:
    blocks = {"mamba": {"peak": 7, "pool": 8}}
    return Summary(counts, 1.0, 30.0, {"blocks": blocks, "engine": {"compile_s": 4.0}})


def test_the_summary_adds_up():
    assert summary(counts()).lines() == [
        "rows      1,234 ok, 3 failed (too_long 2, bad_json 1)",
        "tokens    6,000 in (200/s), 8,700 out (290/s)",
        "latency   first token after 0.50 s on average, 2.50 s at most",
        "blocks    mamba 7 of 8 in use at most",
        "time      load 1.0 s, compile 4.0 s, generate 30.0 s",
    ]
    values = json.loads(json.dumps(summary(counts()).as_dict(), allow_nan=False))
    assert values["rows"] == {"ok": 1234, "failed": 3, "errors": {"too_long": 2, "bad_json": 1}}
    assert values["tokens"] == {
        "prompt": 6000, "completion": 8700, "cached": 500, "prompt_per_s": 200.0,
        "completion_per_s": 290.0,
    }  # fmt: skip
    assert values["first_token_s"] == {"mean": 0.5, "max": 2.5}
    assert values["seconds"] == {"load": 1.0, "compile": 4.0, "generate": 30.0}
    assert values["finished"] is True
    stopped = dataclasses.replace(summary(counts()), finished=False)
    assert stopped.lines()[0].endswith("bad_json 1); stopped before the end of the input")


def test_a_run_without_a_good_row_has_a_summary_too():
    lines = summary(Counts(errors=collections.Counter(bad_json=2))).lines()
    assert lines[0] == "rows      0 ok, 2 failed (bad_json 2)"
    assert not any(line.startswith(("tokens", "latency")) for line in lines)
    assert summary(Counts()).lines()[0] == "rows      0 ok, 0 failed"
    json.dumps(summary(Counts()).as_dict(), allow_nan=False)
