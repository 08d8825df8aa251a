"""The command line when something goes wrong: closed ends, signals, a full disk, a fault of the engine."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxstate.serve.model
from jaxstate.errors import PlanError
from jaxstate.lm import LM
from jaxstate.serve import lines
from tests.serve.conftest import run


def shell(script: str, *arguments) -> subprocess.CompletedProcess:
    """Run the command line with `$RUN` in a shell, with an engine that needs no device."""
    code = (
        "import sys, jaxstate.serve.model\n"
        "from tests.serve.conftest import FakeModel\n"
        "from jaxstate.serve.cli import main\n"
        "jaxstate.serve.model.load = lambda *_, **__: FakeModel()\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    root = Path(__file__).parents[2]
    return subprocess.run(
        ["sh", "-c", script, "sh", *map(str, arguments)], cwd=root, capture_output=True, timeout=60,
        check=False, env=os.environ | {"PYTHONPATH": str(root), "PY": sys.executable, "CODE": code},
    )  # fmt: skip


def test_a_closed_standard_error_is_no_fault(prompts, results, rows_of):
    ran = shell('"$PY" -c "$CODE" m -i "$1" 2>&-', prompts)
    assert ran.returncode == 0
    assert len(rows_of(ran.stdout.decode())) == 9, "and no messages among the rows"
    ran = shell('"$PY" -c "$CODE" m -i nowhere 2>&-')
    assert (ran.returncode, ran.stdout) == (2, b"")


def test_a_closed_standard_output_leaves_no_stale_bytes_in_the_output(prompts, results, rows_of):
    results.write_text("stale\n" * 1000)
    ran = shell('"$PY" -c "$CODE" m -i "$1" -o "$2" --overwrite >&- <&-', prompts, results)
    assert ran.returncode == 0, ran.stderr.decode()
    assert len(rows_of(results)) == 9


@pytest.mark.parametrize(
    ("command", "what"),
    [('m -i "$1" >&-', "output"), ("m <&-", "input"), ("info m >&-", "output")],
)
def test_rows_for_a_closed_descriptor_are_refused_not_lost(prompts, command, what):
    ran = shell(f'"$PY" -c "$CODE" {command}', prompts)
    assert ran.returncode == 2
    assert f"standard {what} is closed" in ran.stderr.decode()


def test_a_signal_is_heard_while_an_input_gives_no_line(model, monkeypatch, capfd):
    reads = []

    def read(fd, size):
        reads.append(size)
        if len(reads) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(reads) < 20, "went on reading"
        return b"\0" * size

    monkeypatch.setattr(lines.os, "read", read)
    assert run("m", "-i", os.devnull) == 143
    assert "stopped by SIGTERM" in capfd.readouterr().err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_between_steps(
    model, prompts, results, rows_of, tmp_path, capfd, signum, code
):
    def signal_once():
        if model.engine.steps == 3:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    model.engine.before_step = signal_once
    assert run("m", "-i", prompts, "-o", results, "--stats", tmp_path / "stats") == code
    # The step in which it came is the last.
    assert model.engine.steps == 4
    assert 0 < len(rows_of(results)) < 9
    assert json.loads((tmp_path / "stats").read_text())["finished"] is False
    assert signal.getsignal(signum) == before
    err = capfd.readouterr().err
    assert "stopping; once more" in err
    assert "stopped before the end of the input" in err
    assert f"stopped by {signal.Signals(signum).name}" in err


def test_a_signal_while_loading_stops_at_once(monkeypatch, prompts, results, capfd):
    def load(name, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on loading")

    monkeypatch.setattr(jaxstate.serve.model, "load", load)
    assert run("m", "-i", prompts, "-o", results) == 143
    assert "stopped by SIGTERM" in capfd.readouterr().err
    assert not results.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_disk_that_is_full(model, prompts, capfd):
    assert run("m", "-i", prompts, "-o", "/dev/full") == 4
    err = capfd.readouterr().err
    assert "No space left" in err
    assert "0 ok" in err, "a row that was not written is no row"


@pytest.mark.parametrize("fault", [PlanError("one owner", "block 3 is mine"), KeyError("oops")])
def test_a_fault_of_the_engine_is_shown_whole(model, prompts, results, rows_of, capfd, fault):
    def broken():
        if model.engine.steps == 2:
            raise fault

    model.engine.before_step = broken
    assert run("m", "-i", prompts, "-o", results) == 4
    err = capfd.readouterr().err
    assert "cannot go on" in err
    assert "Traceback" in err
    assert str(fault) in err
    assert len(rows_of(results)) == 2


def test_what_one_may_not_read_is_a_wrong_command_line(model, prompts, results, monkeypatch, capfd):
    """Root may read and write anything, so that the system is made to refuse."""
    may_open, may_access = os.open, os.access

    def opened(path, *rest, **options):
        if os.fspath(path) == str(prompts):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return may_open(path, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        assert run("m", "-i", prompts, "-o", results) == 2
    assert f"cannot read the input {prompts}: Permission denied" in capfd.readouterr().err
    store = results.parent / "store"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != store and may_access(path, mode))
        assert run("m", "-i", prompts, "-o", results, "--prefix-store", store) == 2
    assert f"{store} may not be read and written by this user" in capfd.readouterr().err
    assert model.asked == []


def test_a_model_that_one_may_not_read_is_a_wrong_command_line(
    prompts, results, monkeypatch, capfd
):
    def load(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "m/model.safetensors")

    monkeypatch.setattr(LM, "load", load)
    assert run("demo", "-i", prompts, "-o", results) == 2
    assert "cannot read m/model.safetensors: Permission denied" in capfd.readouterr().err
    assert not results.exists()
