"""Workers of a Ray dataset: every row has its answer or its error, the same wherever and however often it runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import jaxstate as js
from jaxstate.lm import DEMO
from jaxstate.models import Mamba2Config, from_random, save_model
from tests.long import long

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'jaxstate[ray]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxstate[ray]'")

from jaxstate.ray import ADDED, Worker  # noqa: E402  (which needs Ray)

ROOT = Path(__file__).parents[1]
SIZES = {"rows": 2, "max_len": 256, "chunk_tokens": 64, "decode_steps": 4}  # as in the snippet
GIVEN = {"id": "id", "row_sampling": ["temperature", "seed"],
         "sampling": {"max_tokens": 12, "ignore_eos": True}}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    config = Mamba2Config(
        vocab, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8
    )
    save_model(from_random(config, seed=3), folder)
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    return str(folder)


@pytest.fixture(scope="module")
def make(folder):
    return lambda **given: Worker(folder, sizes=js.Sizes(**SIZES), **given)


@pytest.fixture(scope="module")
def worker(make):
    return make(**GIVEN)


@pytest.fixture(scope="module")
def rows():
    """Greedy and sampled ones, one that cannot be served, and one that is too long."""
    words = "the old man said that he had never seen so many ships at sea".split()
    made = [
        {"id": f"r{i}", "prompt": " ".join(words[: 1 + i % 13]), "temperature": i % 2 / 1.5, "seed": i}
        for i in range(30)
    ]  # fmt: skip
    made[7]["prompt"], made[20]["prompt"] = "", "a ship " * 200
    return made


@pytest.fixture(scope="module")
def alone(worker, rows):
    """What each row gives in a batch of its own."""
    return {row["id"]: cells(worker(batch([row])))[0] for row in rows}


def batch(rows) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def cells(made) -> list[dict]:
    """Rows of what was made, without how many tokens were cached, which depends on company."""
    columns = {k: [x.as_py() if isinstance(x, pa.Scalar) else x for x in v] for k, v in made.items()}  # fmt: skip
    names = [name for name in ADDED if name != "cached_tokens"]
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(columns[n] for n in names), strict=True)
    ]


def test_a_row_gives_the_same_in_any_batch_and_what_the_engine_gives(worker, rows, alone, folder):
    assert cells(worker(batch(rows))) == list(alone.values())
    back = list(reversed(rows))
    assert cells(worker(batch(back))) == [alone[row["id"]] for row in back]
    with js.LM.load(folder, sizes=js.Sizes(**SIZES)) as lm:
        (whole,) = lm.generate([rows[4]["prompt"]], max_tokens=12, ignore_eos=True)
    assert alone["r4"]["tokens"] == list(whole.tokens) and alone["r4"]["text"] == whole.text
    assert alone["r4"]["finish_reason"] == "length" and alone["r4"]["error"] is None
    assert len({tuple(a["tokens"]) for a in alone.values()}) > 20


def test_a_row_that_fails_has_its_error_and_its_neighbours_their_text(worker, rows, alone):
    failed = {name: a for name, a in alone.items() if a["error"] is not None}
    assert {name: a["error_code"] for name, a in failed.items()} == {
        "r7": "empty_prompt",
        "r20": "too_long",
    }
    assert all(a["finish_reason"] == "error" and a["tokens"] == [] for a in failed.values())
    odd = batch([{**row, "prompt": row["prompt"]} for row in rows[:4]])
    odd["prompt"] = np.array([rows[0]["prompt"], None, 5, rows[3]["prompt"]], object)
    odd["temperature"] = np.array([0.0, 0.0, 0.0, -1.0])
    made = cells(worker(odd))
    assert [a["error_code"] for a in made] == [None, "wrong_type", "wrong_type", "unsupported_value"]  # fmt: skip
    assert "temperature is -1.0" in made[3]["error"] and made[0] == alone["r0"]


def test_columns_keep_their_types_whatever_comes(worker, rows):
    """A batch without errors, one of errors alone and an empty one; numpy and Arrow."""
    table = pa.Table.from_pylist(rows)
    whole = worker(table)
    assert whole.column_names == [*rows[0], *ADDED]
    assert whole.select(list(rows[0])).equals(table)
    for part in (rows[:2], [rows[7]]):
        made = worker(pa.Table.from_pylist(part))
        assert made.schema == whole.schema
        typed = worker(batch(part))
        assert [typed[name].type for name in ADDED] == [whole.schema.field(n).type for n in ADDED]
    assert worker(table.slice(0, 0)).schema == whole.schema
    assert cells(worker(batch(rows))) == cells({n: whole.column(n).to_pylist() for n in ADDED})


def test_tokens_null_cells_and_rows_without_an_id(make):
    worker = make(tokens="ids", id="name", prefix="out_", row_sampling={"max_tokens": "most", "seed": "seed"},
                  sampling={"max_tokens": 5, "temperature": 1.0, "ignore_eos": True})  # fmt: skip
    given = {
        "ids": [[5, 6], [5, 6], [5, 6], [5, 6], [5, 6], [7, 8, 9]],
        "name": [None, None, None, "a", "a", "a"],
        "most": [None, 3, None, None, None, None],
        "seed": [1, 1, 2, 1, 1, 1],
    }
    numpy = {k: np.array(v, object if k in ("ids", "name") else None) for k, v in given.items()}
    numpy["most"] = np.array([np.nan, 3, *[np.nan] * 4])  # as Ray gives whole numbers and nulls
    numpy["ids"] = np.array([np.array(x) for x in given["ids"]], object)
    made = worker(pa.table(given)).to_pydict()
    again = worker(numpy)
    assert made["out_error"] == [None] * 6
    assert made["out_tokens"] == [x.as_py() for x in again["out_tokens"]]
    first, short, other, named, twin, third = map(tuple, made["out_tokens"])
    # The same id for other prompts, and the same prompt twice, do no harm.
    assert len({first, other, named, third}) == 4 and twin == named
    assert len(first) == 5 and len(short) == 3


def test_what_is_wrong_with_columns_or_parameters_is_said_at_once(worker, make, folder, tmp_path):
    there = "the batch has the columns 'id', 'promt', 'temperature', 'seed'"
    row = {"id": "a", "promt": "b", "temperature": 0.0, "seed": 0}
    with pytest.raises(
        js.RequestError, match=f"no column 'prompt' for prompt; {there}; did you mean 'promt'"
    ):
        worker(batch([row]))  # fmt: skip
    row = {"id": "a", "prompt": 3, "temperature": 0.0, "seed": 0}
    with pytest.raises(
        js.RequestError,
        match=r"'prompt' for prompt holds values such as 3 \(int\), not texts; the b",
    ):
        worker(batch([row]))  # fmt: skip
    with pytest.raises(
        js.RequestError, match=r"names that are added: text; give another prefix than ''"
    ):
        worker({**batch([{**row, "prompt": "a"}]), "text": np.array(["x"])})  # fmt: skip
    with pytest.raises(js.JaxstateError, match="a batch is a list; leave out batch_format"):
        worker([row])
    for given, message in (
        ({"row_sampling": ["temprature"]}, "no parameter 'temprature'; did you mean 'temperature'"),
        ({"sampling": {"top": 1}}, "no parameter 'top'"),
        ({"sampling": {"top_p": 2}}, "top_p is 2"),
        ({"retries": -1}, "retries is -1"),
    ):
        with pytest.raises(js.RequestError, match=message):
            make(**given)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(folder) / name)
    with pytest.raises(js.CheckpointError, match=r"no tokenizer\.json"):
        Worker(str(tmp_path), sizes=js.Sizes(**SIZES))
    error = pickle.loads(pickle.dumps(js.RequestError("code", "message", "param")))
    assert (error.code, error.message, error.param) == ("code", "message", "param")
    error = js.CapacityError(request="r", group="g", need=2, capacity=1, unit="blocks", remedy="x")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def break_scores(worker, monkeypatch, times: dict[str, int]):
    """Has these requests' scores not finite so many times."""
    import dataclasses

    step = worker.lm.engine.step
    broken = js.RequestError("non_finite", "the scores are not finite")

    def breaking():
        events = []
        for event in step():
            if event.completion is not None and times.get(event.id, 0):
                times[event.id] -= 1
                bad = dataclasses.replace(event.completion, finish_reason="error", error=broken)
                event = dataclasses.replace(event, completion=bad)
            events.append(event)
        return events

    monkeypatch.setattr(worker.lm.engine, "step", breaking)


def test_what_may_pass_is_tried_again_so_many_times(worker, rows, alone, monkeypatch):
    times = {"r1": 1, "r2": 2, "r3": 3}
    break_scores(worker, monkeypatch, times)
    made = cells(worker(batch(rows)))
    assert times == {"r1": 0, "r2": 0, "r3": 0}
    failed = made.pop(3)
    assert (failed["finish_reason"], failed["error_code"]) == ("error", "non_finite")
    assert made == [a for name, a in alone.items() if name != "r3"]


def fail_devices(worker, monkeypatch, at: list[int]):
    """Has a step fail as a device's does, in each of the engines that follow each other."""
    load = worker._load

    def failing():
        lm = load() if worker.lm._open is None else worker.lm
        step, left = lm.engine.step, at.pop(0) if at else -1

        def count():
            nonlocal left
            left -= 1
            if left == 0:
                raise JaxRuntimeError("INTERNAL: the device is gone\nat a place")
            return step()

        monkeypatch.setattr(lm.engine, "step", count)
        return lm

    monkeypatch.setattr(worker, "_load", failing)
    failing()


def test_a_device_that_fails_costs_no_row_unless_it_stays_broken(make, rows, alone, monkeypatch):
    few = rows[:8]
    worker = make(**GIVEN)
    # The engine that is loaded anew makes its one token in three steps at most, then fails among the rows.
    fail_devices(worker, monkeypatch, [6, 9, -1])
    assert cells(worker(batch(few))) == [alone[row["id"]] for row in few]
    fail_devices(worker, monkeypatch, [4, 5, 5])
    made = cells(worker(batch(few)))
    lost = [a for a in made if a["error_code"] == "device_failed"]
    assert lost and lost[0]["error"].endswith("while the row ran: INTERNAL: the device is gone")
    assert [a for a in made if a not in lost] == [
        alone[row["id"]] for row, a in zip(few, made, strict=True) if a not in lost
    ]
    fail_devices(worker, monkeypatch, [4, 1])
    with pytest.raises(JaxRuntimeError, match="the device is gone"):
        worker(batch(few))


def test_a_batch_that_fails_leaves_nothing_to_the_next(worker, rows, alone, monkeypatch):
    few, step = rows[:4], worker.lm.engine.step

    def breaks():
        step()
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(worker.lm.engine, "step", breaks)
    with pytest.raises(KeyError, match="a mistake of ours"):
        worker(batch(few))
    monkeypatch.undo()
    assert cells(worker(batch(few))) == [alone[row["id"]] for row in few]


def test_without_ray_the_module_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import jaxstate.ray"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "jaxstate.ray needs ray, not installed here: pip install 'jaxstate[ray]'" in ran.stderr


def snippet() -> str:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    return shown


@long
def test_no_row_is_lost_or_doubled_when_a_worker_is_killed(folder, rows, alone, tmp_path):
    """Two workers of a local cluster, one killed in the middle of a batch; then what the documentation shows."""
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "given.json").write_text(json.dumps({"model": folder, "sizes": SIZES, **GIVEN}))
    # A smaller model than the one that it names, whose programs there are already.
    (tmp_path / "shown.py").write_text(snippet().replace('"demo"', repr(folder)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    paths = [tmp_path / n for n in ("rows.json", "given.json", "mark", "shown.py", "out.json")]
    ran = subprocess.run(
        [sys.executable, ROOT / "tests" / "ray_cluster.py", *paths], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    out = json.loads((tmp_path / "out.json").read_text())
    made = out["rows"]
    assert (tmp_path / "mark").exists(), "no worker was killed"
    assert sorted(row["id"] for row in made) == sorted(row["id"] for row in rows)
    assert len({row["pid"] for row in made}) >= 2
    for row in made:
        assert {k: row[k] for k in alone[row["id"]]} == alone[row["id"]]
        assert row["prompt"] == next(r["prompt"] for r in rows if r["id"] == row["id"])
    shown = out["shown"]
    given = [json.loads(x)["id"] for x in (ROOT / "examples" / "prompts.jsonl").read_text().splitlines()]  # fmt: skip
    assert sorted(row["id"] for row in shown) == sorted(given)
    assert all(row["text"] and row["error"] is None for row in shown)
