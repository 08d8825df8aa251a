"""States from run to run, with a real engine: rows are the same bits, and nothing bad is taken or left."""

import json

import pytest

from jaxstate.engine import Engine
from jaxstate.errors import SnapshotError
from jaxstate.prefixes import Prefixes
from jaxstate.serve.cli import main
from jaxstate.serve.flags import batch_parser
from jaxstate.serve.store import Store

SIZES = (
    "--rows", "3", "--max-len", "256", "--chunk-tokens", "64", "--decode-steps", "4", "--checkpoints", "6",
)  # fmt: skip


@pytest.fixture
def run(checkpoint, tmp_path, rows_of, capfd, monkeypatch):
    """Runs four prompts that begin alike; exit code, rows by id, tokens taken from states, and what was said."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path.parent / "cache"))
    stem = [*range(1, 90), *[3] * 60]
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(4):
            line = {"id": f"r{i}", "prompt_ids": [*stem, 7, i], "temperature": i % 2}
            file.write(json.dumps(line | {"max_tokens": 9}) + "\n")

    def run(*options, model=checkpoint):
        out = tmp_path / "out.jsonl"
        asked = (
            str(model),
            "-i",
            path,
            "-o",
            out,
            "--overwrite",
            "--logprobs",
            "--ignore-eos",
            *SIZES,
            *options,
        )
        code = main([str(word) for word in asked])
        rows = sorted(rows_of(out), key=lambda row: row["id"]) if out.exists() else []
        out.unlink(missing_ok=True)
        cached = sum(row["usage"]["cached_tokens"] for row in rows)
        rows = [{k: v for k, v in row.items() if k != "usage"} for row in rows]
        return code, rows, cached, capfd.readouterr().err

    return run


def test_states_that_one_run_keeps_are_the_next_ones(run, tmp_path):
    store, stats = tmp_path / "deep" / "store", tmp_path / "stats"
    kept = ("--prefix-store", store, "--stats", stats)
    code, alone, cached, _ = run()
    assert (code, cached, len(alone)) == (0, 3 * 128, 4)
    code, rows, cached, said = run(*kept)
    assert (code, cached) == (0, 3 * 128) and rows == alone
    assert f"prefixes  0 states (0 B) read from {store}" in said
    assert json.loads(stats.read_text())["prefix_store"] == {"loaded": 0, "saved": 1}
    code, rows, cached, said = run(*kept)
    assert (code, cached) == (0, 4 * 128) and rows == alone
    assert json.loads(stats.read_text())["prefix_store"] == {"loaded": 1, "saved": 1}
    assert json.loads(stats.read_text())["engine"]["late_compilations"] == 0
    (file,) = store.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    code, rows, cached, said = run(*kept)
    assert (code, cached) == (0, 3 * 128) and rows == alone
    assert f"warning   {file} cannot be read" in said
    # What another model left is refused before anything is done.
    code, rows, _, said = run(*kept, model="demo")
    assert code == 2 and rows == []
    assert "is not of this model: its layout is" in said
    assert list(store.iterdir()) == [file]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpoints", "0"), "prefix reuse is off"),
        (("--prefix-store", "FILE/in"), "cannot make the prefix store"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_the_first_row(run, tmp_path, options, message):
    (tmp_path / "FILE").write_text("")
    options = [word.replace("FILE", str(tmp_path / "FILE")) for word in options]
    code, rows, _, said = run("--prefix-store", tmp_path / "store", *options)
    assert code == 2 and rows == [] and message in said


def test_states_are_kept_after_an_interruption_and_not_after_a_fault_of_ours(
    run, tmp_path, monkeypatch
):
    store = tmp_path / "store"
    step, steps = Engine.step, []

    def breaks(engine):
        steps.append(1)
        if len(steps) == 9:
            raise error
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaks)
    error = AssertionError("a fault")
    code, _, _, said = run("--prefix-store", store)
    assert code == 4 and "written to" not in said and list(store.iterdir()) == []
    steps.clear()
    error = BrokenPipeError()
    code, _, _, said = run("--prefix-store", store)
    assert code == 141 and "1 state (" in said and len(list(store.iterdir())) == 1


def test_what_cannot_be_written_is_said_and_the_rows_stay(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SnapshotError("the prefix store x cannot be written: No space left on device")

    monkeypatch.setattr(Prefixes, "save", full)
    code, rows, _, said = run("--prefix-store", tmp_path / "store")
    assert code == 0 and len(rows) == 4
    assert (
        "prefixes are not kept for the next run: the prefix store x cannot be written: No space"
        in said
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234", 1234),
        ("2KiB", 2048),
        ("500MiB", 500 * 2**20),
        ("8GiB", 2**33),
        ("3TiB", 3 * 2**40),
    ],
)
def test_sizes_have_units(text, value):
    assert (
        batch_parser().parse_args(["m", "--prefix-store-bytes", text]).prefix_store_bytes == value
    )


@pytest.mark.parametrize("text", ["-1", "0", "8 gigs", "1.5GiB", "GiB", "5XB"])
def test_sizes_that_cannot_be_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        batch_parser().parse_args(["m", "--prefix-store-bytes", text])
    assert "is not a size such as 500000 or 500MiB" in capsys.readouterr().err


def test_a_store_without_a_name_is_not_the_current_folder(capsys):
    with pytest.raises(SystemExit):
        batch_parser().parse_args(["m", "--prefix-store", ""])
    assert "the folder's name is empty" in capsys.readouterr().err


def test_a_store_that_cannot_be_is_refused_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstate.serve.cli._load", lambda *_: pytest.fail("loaded"))
    file = tmp_path / "file"
    file.write_text("x")
    for options, message in (
        (("--prefix-store", file), "is a file; name a folder"),
        (("--prefix-store", file / "x"), "cannot make the prefix store"),
        (("--prefix-store-bytes", "5MiB"), "and none is named"),
        (("--prefix-store", tmp_path / "s", "--checkpoints", "0"), "prefix reuse is off"),
    ):
        code, _, _, said = run(*options)
        assert code == 2 and message in said


def test_the_bound_reaches_the_engine(tmp_path):
    class Keeps:
        def load(self, folder):
            raise AssertionError

        def save(self, folder, *, most_bytes):
            assert (folder, most_bytes) == (str(tmp_path), 77)
            raise OSError("gone")

    said = []

    class Said:
        say = said.append

    Store(str(tmp_path), 77, Keeps(), Said()).save()  # pyright: ignore[reportArgumentType]
    assert said == ["warning   prefixes are not kept for the next run: gone"]
