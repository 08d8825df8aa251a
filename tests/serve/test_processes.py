"""Several processes as one job, each a process of this machine: what kills them, and what is left to go on with."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ("--rows", "3", "--max-len", "128", "--chunk-tokens", "64", "--decode-steps", "4")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """300 lines, some of them blank, broken, or with an id that stands there twice, far apart."""
    chance, path = random.Random(5), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = []
    for i in range(300):
        text = "".join(chance.choices("abcdefgh ", k=chance.randint(1, 60)))
        name = f"r{i}" if i % 40 else "r7"
        lines.append(
            json.dumps(
                {"id": name, "prompt": text, "max_tokens": 64, "temperature": i % 2, "seed": i,
                 "ignore_eos": True, "logprobs": True}
            )
        )  # fmt: skip
        lines += ["", '{"prompt": "broken'][: i % 60 // 20] if i % 20 == 0 else []
    path.write_text("\n".join(lines))
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


class Job:
    """The processes of one start."""

    def __init__(self, count: int, command: list[str], environment: dict[str, str], folder: Path):
        self.folder, self.before = folder, set(folder.glob("*"))
        where = ["--coordinator", f"localhost:{free_port()}", "--processes", str(count)]
        self.runs = [
            subprocess.Popen(
                [*command, *where, "--process-id", str(id)], env=environment, text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
            for id in range(count)
        ]  # fmt: skip

    def end(self, *ids: int) -> list[tuple[int, str]]:
        """Wait for these processes: their exit codes and what they said."""
        ended = [(self.runs[id].communicate(timeout=60)[1], self.runs[id].returncode) for id in ids]
        return [(code, said) for said, code in ended]

    def name(self, id: int) -> str:
        return f"process {id} ({socket.gethostname()}, pid {self.runs[id].pid})"


@pytest.fixture
def start(checkpoint, prompts, environment, tmp_path):
    """Start the processes of a job, and end them whatever the test does."""
    jobs = []

    folder = tmp_path / "out.jsonl.parts"

    def start(count: int, *flags) -> Job:
        command = [sys.executable, "-m", "jaxstate.serve", checkpoint, "-i", prompts, *SIZES]
        command += ["-o", tmp_path / "out.jsonl", *flags]
        jobs.append(Job(count, [str(word) for word in command], environment, folder))
        return jobs[-1]

    yield start
    for run in (run for job in jobs for run in job.runs):
        with run:
            run.kill()


@pytest.fixture(scope="module")
def alone(checkpoint, prompts, environment, tmp_path_factory):
    """The rows of a single process."""
    out = tmp_path_factory.mktemp("alone") / "out.jsonl"
    command = [sys.executable, "-m", "jaxstate.serve", checkpoint, "-i", prompts, "-o", out, *SIZES]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert ran.returncode == 1, ran.stderr.decode()
    return out


def compare(rows_of, alone: Path, out: Path) -> None:
    """The output has the rows of a single process, bit for bit, each once and in the order of lines."""
    before, after = rows_of(alone), rows_of(out)
    lines = [row["line"] for row in after]
    assert lines == sorted(row["line"] for row in before)
    for row in before + after:  # what was reused of other prompts depends on the company
        row.get("usage", {}).pop("cached_tokens", None)
        row.get("usage", {}).pop("cache_miss", None)
    assert after == sorted(before, key=lambda row: row["line"])


def wait_for_rows(job: Job, id: int) -> None:
    """Until this process of this start has written a row."""
    mine: list[Path] = []
    while not any(path.stat().st_size for path in mine):
        assert job.runs[id].poll() is None, job.end(id)
        time.sleep(0.02)
        mine = [p for p in job.folder.glob(f"*-{id:04}.jsonl") if p not in job.before]


def member(process: subprocess.Popen) -> int:
    """The process that has joined in place of this one."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def test_two_processes_give_the_rows_of_one(
    checkpoint, prompts, environment, alone, tmp_path, rows_of
):
    """The command of docs/scaling.md, with a smaller model."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^\$ (for i in .*)$", text, flags=re.M)
    out, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    words = ["-m", "jaxstate.serve", checkpoint, "-i", prompts, "-o", out, "--stats", stats, *SIZES]
    command = command.replace(
        "python -m jaxstate.serve demo -i examples/prompts.jsonl -o two.jsonl",
        shlex.join(map(str, [sys.executable, *words])),
    ).replace("localhost:8476", f"localhost:{free_port()}")
    ran = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    said = ran.stderr
    assert str(prompts) in said, said
    assert "process 1:" not in said, "the second has nothing to say"
    compare(rows_of, alone, out)
    assert not Path(f"{out}.parts").exists()
    told = json.loads(stats.read_text())
    each = [process["rows"] for process in told["processes"]["each"]]
    assert sum(each) == told["rows"]["ok"] + told["rows"]["failed"] == len(rows_of(out))
    assert min(each) > 20, "both had lines"
    assert told["rows"]["errors"]["duplicate_id"] == 8
    assert told["engine"]["late_compilations"] == 0


@pytest.mark.timeout(600)  # on a machine that is busy
def test_whoever_is_killed_is_named_and_no_row_is_lost_or_doubled(start, alone, tmp_path, rows_of):
    """Four processes lose a worker, then process 0; two find one that stands still; one does the rest."""
    out = tmp_path / "out.jsonl"

    job = start(4)
    folder = job.folder
    wait_for_rows(job, 2)
    begin = time.monotonic()
    job.runs[2].kill()
    for code, said in job.end(0, 1, 3):
        assert code == 3, said
        assert f"{job.name(2)} is gone" in said
        assert "Traceback" not in said
    assert time.monotonic() - begin < 30
    kept = {row["line"] for path in folder.glob("*.jsonl") for row in rows_of(path)}
    assert 0 < len(kept) < len(rows_of(alone))
    assert not out.exists()

    job = start(4)
    wait_for_rows(job, 0)
    begin, beside = time.monotonic(), member(job.runs[0])
    os.kill(beside, signal.SIGKILL)  # with its host, both are gone at once
    job.runs[0].kill()
    for code, said in job.end(1, 2, 3):
        assert code == 3, said
        assert f"{job.name(0)} is gone" in said
        assert "Traceback" not in said
    assert time.monotonic() - begin < 30

    still = start(2, "--heartbeat-timeout", "6")
    wait_for_rows(still, 1)
    begin = time.monotonic()
    still.runs[1].send_signal(signal.SIGSTOP)
    [(code, said)] = still.end(0)
    assert code == 3, said
    assert f"{still.name(1)} has not been heard of for" in said
    assert "start the job again" in said
    assert time.monotonic() - begin < 30

    job = start(1)
    still.runs[1].send_signal(signal.SIGCONT)
    [(code, said)] = still.end(1)
    assert code == 3
    assert f"{still.name(1)} has not been heard of" in said or f"{still.name(0)} is gone" in said
    [(code, said)] = job.end(0)
    assert code == 1, said
    assert "kept from before" in said
    compare(rows_of, alone, out)
    assert not folder.exists()


def test_whoever_does_not_come_is_named(start):
    job = start(3, "--join-timeout", "3")
    job.runs[1].kill()
    for code, said in job.end(0, 2):
        assert code == 2
        assert "process 1 of 3 did not come up within 3 s" in said


def test_who_stops_tells_the_others(start):
    job = start(2)
    wait_for_rows(job, 1)
    job.runs[0].send_signal(signal.SIGTERM)
    (first, _), (second, said) = job.end(0, 1)
    assert (first, second) == (143, 3)
    assert f"{job.name(0)} stopped: SIGTERM" in said
