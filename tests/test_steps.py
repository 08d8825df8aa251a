"""The benchmarks of whole steps and prompts, on tiny models: they check, measure and write what they found."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import prompts, steps, trace
from tests.long import long


@long
def test_the_small_run_checks_measures_and_writes(tmp_path, monkeypatch, capsys):
    output = tmp_path / "steps.json"
    arguments = ["--small", "--models", "mamba2", "--engine", "2", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", ["steps", *arguments])
    assert steps.main() == 0
    report = json.loads(output.read_text())
    decode, engine = report["results"]
    assert (decode["kind"], decode["rows"], engine["kind"]) == ("decode", 2, "engine")
    assert decode["donated"] and decode["pool_copies"] == 0
    assert 0 < decode["floor_ms"] and 0 < decode["ms"] and engine["tokens_per_s"] > 0
    assert engine["late_compilations"] == 0
    assert "ssd_step: it needs an NVIDIA GPU" in engine["kernels"]
    assert "NOT TIMED" not in capsys.readouterr().out


@long
def test_prompts_are_checked_measured_and_written(tmp_path, monkeypatch):
    output = tmp_path / "prompts.json"
    arguments = ["--small", "--models", "mamba", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", ["prompts", *arguments])
    assert prompts.main() == 0
    one, many = json.loads(output.read_text())["results"]
    assert (one["rows"], many["rows"]) == (1, 8)
    assert 0 < one["floor_ms"] and 0 < one["ms"]
    monkeypatch.setattr(prompts, "check_scores", lambda config, tokens: "everything")
    assert prompts.main() == 1
    assert all("everything" in r["error"] for r in json.loads(output.read_text())["results"])


def test_what_is_wrong_gets_no_time(monkeypatch, capsys):
    monkeypatch.setattr(steps, "check_scores", lambda settings, name: "everything")
    monkeypatch.setattr(sys, "argv", ["steps", "--small", "--models", "mamba"])
    assert steps.main() == 1
    assert "mamba: NOT TIMED: everything" in capsys.readouterr().out


@pytest.mark.parametrize(("donate", "copies"), [((0,), 0), ((), 1)])
def test_the_search_for_copies_finds_one(donate, copies):
    def write(pool):
        return pool.at[1, 2].set(0)

    program = jax.jit(write, donate_argnums=donate).lower(jnp.ones((3, 70, 5))).compile()
    assert steps.pool_copies(program.as_text(), 3, 70) == copies


def test_a_trace_adds_up_and_finds_pauses():
    # Two kernels overlap by 1 us, the third starts 4 us after the second has ended.
    events = [(0, 3000, "a"), (2000, 3000, "b"), (9000, 1000, "a")]
    found = trace.summary(events, [("command_buffer::update", 2500.0)])
    assert (found.span_us, found.busy_us, found.launches) == (10.0, 6.0, 3)
    assert found.kernels == [("a", 2, 4.0), ("b", 1, 3.0)]
    assert found.gaps == [("b", "a", 1, 4.0)]
    assert found.host == [("command_buffer::update", 1, 2.5)]
    assert "idle 4 us (40%)" in found.lines()[0]
