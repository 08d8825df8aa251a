"""The command as a person runs it: a process, files, pipes and signals, with a real engine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxstate.errors import JaxstateError
from jaxstate.serve import model as serve_model

ROOT = Path(__file__).parents[2]
SIZES = ("--rows", "3", "--max-len", "128", "--chunk-tokens", "64", "--decode-steps", "4")


@pytest.fixture
def model(checkpoint):
    return checkpoint


@pytest.fixture
def serve(environment):
    """Run the command; its exit code, standard output and standard error."""

    def serve(*arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "jaxstate.serve", *map(str, arguments)]
        return subprocess.run(
            command, input=stdin, capture_output=True, env=environment, timeout=120, check=False
        )

    return serve


def test_a_file_with_good_and_bad_lines(serve, model, tmp_path, rows_of):
    lines = [
        '\ufeff{"id":"greedy","prompt":"Once upon a time","max_tokens":9,"ignore_eos":true}\r',
        '{"id":"drawn","prompt_ids":[1,2,3],"max_tokens":12,"temperature":1,"seed":5,'
        '"ignore_eos":true,"logprobs":true}',
        "",
        '{"id":"greedy","prompt":"again"}',
        '{"id":"long","prompt":"' + "x" * 200 + '"}',
        '{"prompt_ids":[96],"max_tokens":1000,"ignore_eos":true}',
        '{"prompt":"stop here","temprature":1}',
    ]
    path, stats = tmp_path / "in.jsonl", tmp_path / "stats.json"
    path.write_text("\n".join(lines))
    out = tmp_path / "out.jsonl"
    ran = serve(model, "-i", path, "-o", out, "--stats", stats, *SIZES)
    assert ran.returncode == 1, ran.stderr.decode()
    assert ran.stdout == b""
    rows = {row["line"]: row for row in rows_of(out)}
    assert sorted(rows) == [1, 2, 4, 5, 6, 7]
    assert rows[1]["usage"] == {
        "prompt_tokens": 16, "completion_tokens": 9, "cached_tokens": 0, "cache_miss": "too_short",
    }  # fmt: skip
    assert len(rows[2]["tokens"]) == len(rows[2]["logprobs"]) == 12
    assert rows[6]["usage"]["completion_tokens"] == 127, "as many as 128 tokens leave room for"
    assert {rows[i]["finish_reason"] for i in (1, 2, 6)} == {"length"}
    assert [rows[i]["error"]["code"] for i in (4, 5, 7)] == [
        "duplicate_id", "too_long", "unknown_field",
    ]  # fmt: skip
    found = json.loads(stats.read_text())
    assert found["rows"]["ok"] == 3
    assert found["tokens"]["completion"] == 9 + 12 + 127
    assert found["engine"]["programs"] == 2
    assert found["engine"]["late_compilations"] == 0
    assert "rows      3 ok, 3 failed" in ran.stderr.decode()
    assert "compiled  decode, 3 rows x 4 tokens" in ran.stderr.decode()

    # The other way round, every line gets the same answer.
    path.write_text("\n".join(line.strip("\ufeff\r") for line in reversed(lines)))
    back = serve(model, "-i", path, "-o", "-", "--progress", "none", *SIZES)
    again = {row["id"]: row for row in rows_of(back.stdout.decode())}
    assert again["drawn"]["tokens"] == rows[2]["tokens"]
    assert again["drawn"]["text"] == rows[2]["text"]
    assert len(set(rows[2]["tokens"])) > 3, "drawn, and not one token over and over"


def test_text_through_pipes(serve, model, rows_of):
    ran = serve(model, "--max-tokens", 5, "--ignore-eos", *SIZES, stdin=b"One\n\nTwo two\n")
    assert ran.returncode == 0, ran.stderr.decode()
    rows = rows_of(ran.stdout.decode())
    assert sorted((row["id"], row["usage"]["prompt_tokens"]) for row in rows) == [
        ("1", 3), ("3", 7),
    ]  # fmt: skip
    assert all(len(row["text"]) <= 5 for row in rows)


@pytest.fixture
def start(model, environment):
    """Start the command with pipes, and end it whatever the test does."""
    runs = []

    def start(*arguments, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxstate.serve", str(model), *map(str, arguments)]
        runs.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        with run:
            run.kill()


def test_a_row_comes_while_the_input_is_still_open(start):
    """Somebody who writes a line and waits for its row before writing the next gets it."""
    run = start("--max-tokens", 3, *SIZES, stdin=subprocess.PIPE)
    for prompt in ("one", "two"):
        run.stdin.write(prompt.encode() + b"\n")
        run.stdin.flush()
        assert "text" in json.loads(run.stdout.readline())
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, b""), err.decode()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_leaves_whole_rows(start, tmp_path, rows_of, signum, code):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = '{"prompt":"go","max_tokens":40,"temperature":1,"ignore_eos":true}\n'
    path.write_text(line * 200_000)
    run = start("-i", path, "-o", out, *SIZES)
    while not out.exists() or out.stat().st_size < 2000:
        assert run.poll() is None, run.stderr.read().decode()
        time.sleep(0.05)
    run.send_signal(signum)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code, err.decode()
    assert ("stopped by SIGTERM" in err.decode()) == (signum == signal.SIGTERM)
    assert "Traceback" not in err.decode()
    rows = rows_of(out)
    assert len(rows) > 5
    assert all(row["usage"]["completion_tokens"] == 40 for row in rows)


def test_a_reader_that_goes_away_ends_the_run(start, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"go","max_tokens":40,"ignore_eos":true}\n' * 200_000)
    run = start("-i", path, *SIZES)
    assert json.loads(run.stdout.readline())["usage"]["completion_tokens"] == 40
    run.stdout.close()
    err = run.stderr.read().decode()
    assert run.wait(timeout=60) == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_info_of_a_model(serve, model):
    ran = serve("info", model, "--rows", "5", "--max-len", "64")
    assert ran.returncode == 0, ran.stderr.decode()
    out = ran.stdout.decode()
    for text in (
        "Mamba2LM",
        "97 token ids",
        "mamba: recurrent, 3 layers",
        "5 in flight",
        "decode, 5",
        "for weights and states",
    ):
        assert text in out
    assert "mosaic declines" in out and out.count("needs an NVIDIA GPU") == 1
    # Three layers of a window of 3 x 128 and a state of 6 x 16 x 16 numbers, in float32.
    assert f"{3 * (3 * 128 + 6 * 16 * 16) * 4 / 1024:.1f} KiB of state" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder 'nowhere'"),
        (["tests"], "config.json"),
        (["MODEL", "--chunk-tokens", "100"], "chunk_tokens is 100; it must be a multiple of 64"),
    ],
)
def test_what_only_loading_can_find(serve, model, tmp_path, arguments, message):
    out = tmp_path / "out.jsonl"
    named = [str(model) if argument == "MODEL" else argument for argument in arguments]
    ran = serve(*named, "-o", out, stdin=b"hello\n")
    assert ran.returncode == 2
    assert message in ran.stderr.decode()
    assert "Traceback" not in ran.stderr.decode()
    assert not out.exists()


def test_a_platform_that_is_not_there_is_one_line(serve, model, environment, monkeypatch):
    monkeypatch.setitem(environment, "JAX_PLATFORMS", "nonsense")
    ran = serve("info", model)
    assert ran.returncode == 2
    assert ran.stdout == b""
    [message] = ran.stderr.decode().splitlines()
    assert "JAX cannot use the platform 'nonsense' on this machine: " in message


def test_a_platform_without_a_reason_is_one_line(monkeypatch):
    """JAX ends in a bare assertion where the CUDA plugin is not installed."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(JaxstateError, match=r"on this machine; unset JAX_PLATFORMS, or set"):
        serve_model.load("demo", dtype=None, report=print)


def test_help_is_quick_because_it_loads_nothing():
    code = (
        "import sys\nfrom jaxstate.serve.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'jax', 'flax', 'numpy', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    out = ran.stdout.decode()
    assert "examples:" in out
    assert "exit codes:" in out


def test_an_interrupted_run_keeps_its_states(start, tmp_path):
    path, out, store = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "store"
    line = {"prompt_ids": [5] * 100, "max_tokens": 9, "ignore_eos": True}
    path.write_text((json.dumps(line) + "\n") * 50_000)
    run = start("-i", path, "-o", out, *SIZES, "--prefix-store", store)
    while not out.exists() or out.stat().st_size < 2000:
        assert run.poll() is None, run.stderr.read().decode()
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143, err.decode()
    (file,) = store.iterdir()
    size = f"{file.stat().st_size / 1024:.1f} KiB"
    assert f"prefixes  1 state ({size}) written to {store}" in err.decode()
