"""README is true: its commands run, its code runs, and its examples are read as it says."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxstate.request import CACHE_MISSES, Completion, SamplingParams
from jaxstate.serve import protocol
from jaxstate.serve.flags import batch_parser
from jaxstate.serve.lines import Line

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


COMMANDS = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
ELSEWHERE = {
    "make test": "this is what it runs",
    "make demo EXTRAS=cuda12": "installs more, then runs what make demo does",
    "source .venv/bin/activate": "the tests run in an environment already",
    ".venv/bin/pip install -e '.[notebooks]'": "installs more",
    ".venv/bin/jupyter lab notebooks": "opens a browser; tests/test_notebooks.py runs what it shows",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Run a command in a folder like a checkout's, with this Python as `python`, nothing installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "examples", "jaxstate", "pallas_kernels", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"  # not a link: that would lose the environment it lies in
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAXSTATE_")} | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    def shell(command: str) -> str:
        # The one set-up is that of the tests; what it would install is checked apart.
        if command.startswith("make "):
            command += f" run_stamp= python={sys.executable}"
        ran = subprocess.run(
            ["bash", "-c", f"set -eo pipefail; {command}"], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr.decode()
        return ran.stdout.decode()

    return shell


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_commands_of_the_readme_run(shell, command):
    out = shell(command)
    assert out or "-o results.jsonl" in command


def test_every_command_is_tried_or_accounted_for():
    assert set(ELSEWHERE) < set(COMMANDS)
    named = re.findall(r"EXTRAS=(\w+)|\.\[(\w+)\]", " ".join(COMMANDS))
    assert {"".join(pair) for pair in named} == {"cuda12", "notebooks"}
    assert {"cuda12", "notebooks"} < set(PROJECT["optional-dependencies"])
    assert any(
        need.startswith("jupyterlab") for need in PROJECT["optional-dependencies"]["notebooks"]
    )


def test_code_of_the_readme_runs(shell):
    code = "\n".join(blocks("python"))
    shown = shell(f"python -c {shlex.quote(code)}")
    assert "length" in shown or "stop" in shown
    assert re.search(r"^\d+ bytes of state", shown, flags=re.M)


def test_lines_of_the_readme_are_read_as_it_says():
    example, rows = blocks("json")
    rules = protocol.Rules(SamplingParams(), False, lambda text: [1], 10)
    job = protocol.Plain(rules).parse(Line(1, example.strip().encode()))
    assert isinstance(job, protocol.Job)
    good, bad = map(json.loads, rows.strip().splitlines())
    refused = protocol.Plain(rules).parse(Line(2, b'{"prompt": "a", "temprature": 1}'))
    assert isinstance(refused, protocol.Refusal)
    assert protocol.error_row(refused.line, refused.id, refused.error) == bad
    done = Completion(
        id=job.request.id, prompt_tokens=5, tokens=(1,) * 8, logprobs=(-1.0,) * 8, text=" she had been a member of a",
        finish_reason="length", cache_miss="too_short",
    )  # fmt: skip
    assert protocol.result_row(job, done) == good
    assert good["usage"]["cache_miss"] in CACHE_MISSES


def test_commands_for_several_processes_are_read():
    """Those of docs/scaling.md; the one for a single machine is run by serve/test_processes.py."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    shown = re.findall(r"python -m jaxstate\.serve (.*?)(?: &.*)?$", text, flags=re.M)
    assert len(shown) >= 4
    for words in map(shlex.split, shown):
        options = batch_parser().parse_args([w.replace("$i", "0") for w in words if w != "..."])
        assert options.processes


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_exit_codes_of_the_readme_are_those_of_the_help():
    codes = [0, 1, 2, 3, 4, 130, 141, 143]
    told = re.search(r"The exit code is (.*?)\.\n", README, flags=re.S)
    assert told
    assert sorted(map(int, re.findall(r"\d+", told[1]))) == codes
    helped = re.search(r"exit codes: (.*?)\.\n", batch_parser().format_help(), flags=re.S)
    assert helped
    assert sorted(map(int, re.findall(r"\d+", helped[1]))) == codes


def test_files_that_the_readme_writes_are_not_for_git():
    written = {name for command in COMMANDS for name in re.findall(r"-o (\S+)", command)}
    assert written
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{name}" for name in written} <= set(ignored)


def test_words_of_contributing_are_those_of_the_architecture():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    words = re.search(r"its words \(([^)]+)\)", contributing)
    assert words
    told = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| (\w+) \| .+ \| .*\|$", told, flags=re.M)
    assert set(re.split(r",\s+", words[1])) == set(explained) - {"word"}
