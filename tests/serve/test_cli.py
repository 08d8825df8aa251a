"""The command line, in this process, with an engine that needs no device."""

import json
import os
import re
import signal
import threading
import warnings

import pytest

import jaxstate.serve.model
from jaxstate.errors import CheckpointError, SpecError
from jaxstate.serve import files
from jaxstate.serve.cli import main
from tests.serve.conftest import run


@pytest.mark.parametrize("verb", [(), ("batch",)])
def test_a_file_to_a_file(model, prompts, results, rows_of, capfd, verb):
    assert run(*verb, "some-model", "-i", prompts, "-o", results) == 0
    rows = rows_of(results)
    assert sorted(row["id"] for row in rows) == [f"r{i}" for i in range(9)]
    assert {row["text"] for row in rows} == {"a", "ba", "cba"}
    assert model.engine.compiled == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "compiling decode, 2 rows" in err
    assert "rows      9 ok, 0 failed" in err
    assert "blocks    g 2 of 2" in err


def test_flags_are_defaults_that_a_line_overrides(model, tmp_path, results, rows_of):
    path = tmp_path / "in"
    path.write_text('{"prompt":"abcdef"}\n{"prompt":"abcdef","max_tokens":4,"logprobs":false}\n')
    flags = ("--max-tokens", 2, "--logprobs", "--rows", 3, "--chunk-tokens", 64, "--checkpoints", 0)
    assert run("m", "-i", path, "-o", results, *flags, "--dtype", "bfloat16") == 0
    first, second = rows_of(results)
    assert (first["text"], first["tokens"], first["logprobs"]) == ("fe", [102, 101], [-1.0, -1.0])
    assert second["text"] == "fedc"
    assert "tokens" not in second
    assert model.asked == [
        ("m", {"dtype": "bfloat16", "rows": 3, "max_len": None, "chunk_tokens": 64,
               "decode_steps": None, "checkpoints": 0, "data_parallel": None,
               "tensor_parallel": None}),
    ]  # fmt: skip


def test_text_from_standard_input_to_standard_output(model, monkeypatch, rows_of, capfd):
    source, sink = os.pipe()
    os.write(sink, "one\n\ntwø".encode())
    os.close(sink)
    monkeypatch.setattr(files, "STDIN", source)
    monkeypatch.setattr(files, "open_input", lambda name: source)
    assert run("m") == 0
    out, err = capfd.readouterr()
    rows = rows_of(out)
    assert [row["id"] for row in rows] == ["1", "3"]
    assert rows[0]["text"] == "eno"
    assert "read as text" in err
    os.close(source)


JSON_LINE = '{"id":"r", "prompt":"a"}'


@pytest.mark.parametrize(
    ("lines", "flags", "warned"),
    [
        (["one", JSON_LINE, "two", JSON_LINE], [], [2]),
        (["one", "two {", '{ "x" : 1}', "{prompt}"], [], []),
        ([JSON_LINE, JSON_LINE], [], []),  # read as JSON
        (["one", JSON_LINE], ["--input-format", "text"], []),  # as was asked for
    ],
)
def test_json_among_lines_of_text_is_warned_of_once(
    model, tmp_path, results, capfd, lines, flags, warned
):
    path = tmp_path / "in"
    path.write_text("\n".join(lines).replace('"r"', '"r1"', 1))
    assert run("m", "-i", path, "-o", results, "--progress", "none", *flags) == 0
    err = capfd.readouterr().err
    for number in warned:
        assert f"warning   line {number} looks like JSON" in err
        assert "--input-format jsonl" in err
    assert err.count("warning") == len(warned)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    model, tmp_path, results, rows_of
):
    read = []
    encode = model.tokenizer.encode
    model.tokenizer.encode = lambda text: read.append(text) or encode(text)
    model.prompt_bytes = 6
    path = tmp_path / "in.txt"
    path.write_text("abcdef\néééé\n")
    assert run("m", "-i", path, "-o", results) == 1
    rows = {row["line"]: row for row in rows_of(results)}
    assert read == ["abcdef"]
    assert rows[1]["text"] == "fedcba"
    assert rows[2]["error"]["code"] == "too_long"
    assert "the prompt has 8 bytes" in rows[2]["error"]["message"]
    assert "raise --max-len" in rows[2]["error"]["message"]


def test_rows_that_failed_make_the_exit_code_one(model, tmp_path, results, rows_of, capfd):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"a"}\noops\n{"prompt":"b"}\n')
    assert run("m", "-i", path, "-o", results, "--stats", tmp_path / "stats.json") == 1
    assert sorted("error" in row for row in rows_of(results)) == [False, False, True]
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["rows"] == {"ok": 2, "failed": 1, "errors": {"bad_json": 1}}
    assert stats["finished"] is True
    assert stats["seconds"]["compile"] == 0.125
    assert "2 ok, 1 failed (bad_json 1)" in capfd.readouterr().err


def test_the_summary_alone_when_no_progress_is_wanted(model, prompts, results, capfd):
    assert run("m", "-i", prompts, "-o", results, "--progress", "none") == 0
    assert capfd.readouterr().err.startswith("rows      9 ok")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--stop", ""], "none of them empty"),
        (["--rows", "0"], "0 is below 1"),
        (["--rows", "many"], "'many' is not a whole number"),
        (["--rows", "1" * 5000], "is not a whole number"),
        (["--max-tokens", "abc"], "'abc' is not a whole number"),
        (["--seed", "1.5"], "'1.5' is not a whole number"),
        (["--top-p", "much"], "'much' is not a number"),
        (["--max-len", "1"], "1 is below 2, a token of prompt and a generated one"),
        (["--checkpoints", "-1"], "-1 is below 0"),
        (["--row", "3"], "--row 3; did you mean --rows?"),
        (["--max-tokenz=3", "--overrite"], "did you mean --max-tokens and --overwrite?"),
        (["--frequency", "3"], "unrecognized arguments: --frequency 3\n"),
        (["--dtype", "int8"], "int8"),
        (["--progress", "loud"], "loud"),
        (["--max-token", "3"], "--max-token"),
        (["--n", "3"], "--n"),
        (["-i", "nowhere.jsonl"], "cannot read the input nowhere.jsonl: No such file"),
        (["-i", "."], "it is a folder"),
        (["-o", "no/such/folder/out"], "there is no folder no/such/folder"),
        (["-o", "."], "cannot write the output .: it is a folder"),
        (["--stats", "no/such/folder/out"], "cannot write the stats"),
    ],
)
def test_a_wrong_command_line_is_found_before_anything_is_loaded(
    model, prompts, tmp_path, monkeypatch, capfd, flags, message
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    try:
        code = main(["m", "-i", str(prompts), *flags])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capfd.readouterr().err
    assert model.asked == []
    assert sorted(tmp_path.iterdir()) == before


def test_no_model_is_a_wrong_command_line(capfd):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert "MODEL" in capfd.readouterr().err


@pytest.mark.parametrize("error", [CheckpointError("no config.json"), SpecError("too many rows")])
def test_a_model_that_cannot_be_loaded(monkeypatch, prompts, results, capfd, error):
    def load(name, **options):
        raise error

    monkeypatch.setattr(jaxstate.serve.model, "load", load)
    assert run("m", "-i", prompts, "-o", results) == 2
    assert str(error) in capfd.readouterr().err
    assert not results.exists()
    results.write_text("an older run\n")
    assert run("m", "-i", prompts, "-o", results, "--overwrite") == 2
    assert results.read_text() == "an older run\n"


def test_an_output_with_something_in_it_is_kept(model, prompts, results, rows_of, capfd):
    results.write_text("hours of work\n")
    assert run("m", "-i", prompts, "-o", results) == 2
    assert "exists and is not empty" in capfd.readouterr().err
    assert results.read_text() == "hours of work\n"
    assert model.asked == []
    assert run("m", "-i", prompts, "-o", results, "--overwrite") == 0
    assert len(rows_of(results)) == 9


def test_the_input_is_never_the_output(model, prompts, capfd):
    before = prompts.read_text()
    assert run("m", "-i", prompts, "-o", prompts, "--overwrite") == 2
    assert "is the input itself" in capfd.readouterr().err
    assert prompts.read_text() == before


def test_a_place_where_one_may_not_write(model, prompts, results, monkeypatch, capfd):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert run("m", "-i", prompts, "-o", results) == 2
    assert f"cannot write the output {results}: permission denied" in capfd.readouterr().err
    assert model.asked == []


def test_a_closed_standard_input_or_output_is_a_wrong_command_line(
    model, prompts, monkeypatch, capfd
):
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    for name, flags in (("STDIN", []), ("STDOUT", ["-i", prompts])):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, closed)
            assert run("m", *flags) == 2
        assert "is closed" in capfd.readouterr().err
    assert model.asked == []


@pytest.mark.timeout(20)
def test_rows_wait_for_a_pipe_that_does_not_block(monkeypatch):
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    monkeypatch.setattr(files, "STDOUT", sink)
    output = files.Output("-", input_fd=source, overwrite=False)
    row = bytes(range(256)) * 1024  # more than a pipe holds
    got = []
    reader = threading.Thread(target=lambda: got.append(read_all(source)), daemon=True)
    reader.start()
    try:
        output.write(row)
    finally:
        os.close(sink)  # ends the reader, however the writer fared
        reader.join(timeout=10)
    assert got == [row]
    os.close(source)


def read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 4096):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("which", ["input", "output", "link to the output", "standard output"])
def test_stats_never_overwrite_the_input_or_the_rows(
    model, prompts, results, tmp_path, monkeypatch, capfd, which
):
    before = prompts.read_text()
    link = tmp_path / "link"
    link.symlink_to(results)  # which is not there yet
    (tmp_path / "folder").mkdir()
    stats = {
        "input": prompts, "output": tmp_path / "folder" / ".." / results.name,
    }.get(which, results if which == "standard output" else link)  # fmt: skip
    arguments = ["m", "-i", prompts, "--stats", stats]
    if which == "standard output":
        sink = os.open(results, os.O_WRONLY | os.O_CREAT)
        monkeypatch.setattr(files, "STDOUT", sink)
    else:
        arguments += ["-o", results]
    assert run(*arguments) == 2
    end = "input" if which == "input" else "output"
    assert f"the stats {stats} is the file of the {end} itself" in capfd.readouterr().err
    assert model.asked == []
    assert prompts.read_text() == before
    assert results.exists() == (which == "standard output"), "a file made in vain goes away"


def test_stats_and_rows_may_both_go_to_a_device(model, prompts):
    assert run("m", "-i", prompts, "-o", os.devnull, "--stats", os.devnull) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_stats_that_cannot_be_written_are_named(model, prompts, results, rows_of, capfd):
    assert run("m", "-i", prompts, "-o", results, "--stats", "/dev/full") == 4
    assert "cannot write the stats /dev/full: No space left" in capfd.readouterr().err
    assert len(rows_of(results)) == 9

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    model.engine.before_step = interrupt
    assert run("m", "-i", prompts, "-o", results, "--overwrite", "--stats", "/dev/full") == 143


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_two_runs_into_one_output_lose_no_rows(model, prompts, results, rows_of, capfd, flags):
    codes = []

    def another():  # once while the first compiles, once before it has written a row
        model.engine.before_step = model.engine.compile = lambda: None
        codes.append(run("m", "-i", prompts, "-o", results, *flags))
        model.engine.before_step = another if len(codes) < 2 else lambda: None

    model.engine.compile = another
    assert run("m", "-i", prompts, "-o", results, *flags) == 0
    assert codes == [2, 2]
    assert f"another run is writing the output {results}" in capfd.readouterr().err
    assert len(rows_of(results)) == 9
    assert run("m", "-i", prompts, "-o", results, "--overwrite") == 0, "the lock ends with the run"


@pytest.mark.timeout(20)
def test_an_input_appended_to_itself_is_refused(model, prompts, monkeypatch, capfd):
    before = prompts.read_text()
    sink = os.open(prompts, os.O_WRONLY | os.O_APPEND)
    monkeypatch.setattr(files, "STDOUT", sink)
    assert run("m", "-i", prompts) == 2
    assert "standard output is the input itself" in capfd.readouterr().err
    assert prompts.read_text() == before
    os.close(sink)


def test_info(model, capfd):
    assert run("info", "m", "--rows", 5) == 0
    out, err = capfd.readouterr()
    assert out == "group     one\nrows      2\n"
    assert err == ""
    assert model.asked[0][1]["rows"] == 5


def test_the_version_is_told_without_a_model(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"jaxstate (\d+\.\d+\.\d+|unknown)\n", capsys.readouterr().out)


def test_a_warning_while_loading_is_one_line_of_the_report(model, monkeypatch, prompts, capfd):
    def load(name, **options):
        warnings.warn("compiled programs are not kept: no such place", stacklevel=2)
        return model

    monkeypatch.setattr(jaxstate.serve.model, "load", load)
    assert run("m", "-i", prompts, "-o", os.devnull) == 0
    err = capfd.readouterr().err
    assert "warning   compiled programs are not kept: no such place\n" in err
    assert "UserWarning" not in err
