"""What the processes of a job agree on and leave behind, in this process, without a device."""

import itertools
import json
import os
import threading
import time

import pytest

import jaxstate.serve.model
from jaxstate.serve import parts, serve
from jaxstate.serve.cli import main
from jaxstate.serve.lines import LineReader
from jaxstate.serve.link import LinkError, LinkLost, OneProcess
from jaxstate.serve.share import Share, unit_of
from jaxstate.serve.team import Stopped, Team


@pytest.fixture
def reader(tmp_path):
    """A reader of so many lines; every fifth line of the file is blank."""
    opened = []

    def reader(count: int) -> LineReader:
        path = tmp_path / "lines"
        path.write_text("".join(f"{i}\n" + "\n" * (i % 4 == 3) for i in range(count)))
        opened.append(os.open(path, os.O_RDONLY))
        return LineReader(opened[-1])

    yield reader
    for fd in opened:
        os.close(fd)


def take(share: Share, most: int | None = None) -> list[int]:
    numbers = []
    while not share.ended and (most is None or len(numbers) < most):
        if (line := share.next()) is not None:
            numbers.append(line.number)
    return numbers


def test_processes_of_any_speed_divide_the_lines(reader):
    tickets = itertools.count()
    shares = [Share(reader(1000), (), 7, lambda: next(tickets), lambda line: None) for _ in "abc"]
    taken: list[list[int]] = [[], [], []]
    while not all(share.ended for share in shares):
        for share, mine, speed in zip(shares, taken, (1, 5, 30), strict=True):
            mine += take(share, speed)
    everyone = sorted(itertools.chain(*taken))
    assert everyone == [i + i // 4 + 1 for i in range(1000)]
    assert len(taken[0]) < len(taken[1]) < len(taken[2])
    assert {share.lines for share in shares} == {1000}


def test_lines_that_are_done_or_anothers_are_skipped_by_name(reader):
    skipped, tickets = [], iter([0, 2, 5])
    share = Share(
        reader(9), {2, 6}, 2, lambda: next(tickets), lambda line: skipped.append(line.number)
    )
    assert take(share) == [1, 7]  # the units are 1 2, 3 4, 6 7, 8 9, 11
    assert skipped == [2, 3, 4, 6, 8, 9, 11]


@pytest.mark.parametrize(
    ("lines", "processes", "unit"), [(1, 4, 1), (100, 4, 3), (10**6, 4, 16), (0, 1, 1)]
)
def test_units_leave_each_process_several(lines, processes, unit):
    assert unit_of(lines, processes) == unit


def row(line: int, **fields) -> bytes:
    return json.dumps({"id": f"r{line}", "line": line, **fields}).encode() + b"\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out.jsonl.parts"
    folder.mkdir()
    return folder


def test_parts_become_one_file_in_the_order_of_lines(folder, tmp_path, rows_of):
    late = row(3, text="c", usage={"cached_tokens": 64})
    (folder / "2-0000.jsonl").write_bytes(late + row(1, text="a") + b'{"line": 2, "te')
    (folder / "1-0001.jsonl").write_bytes(row(3, text="c", usage={}) + row(5, error={"code": "x"}))
    (folder / "1-0000.jsonl").write_bytes(b"\0\0\0\n" + row(2, text="b"))
    here = parts.Parts(folder)
    assert here.done() == {1, 2, 3, 5}
    out = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="5 lines have 4 rows"):
        here.merge(str(out), 5)
    assert not out.exists()
    assert here.merge(str(out), 4) == parts.Merged(4, 1, ())
    assert [r["line"] for r in rows_of(out)] == [1, 2, 3, 5]
    assert rows_of(out)[2]["usage"] == {}, "the earlier start's"
    assert not folder.exists()


def test_rows_are_removed_at_once_or_not_at_all(folder, monkeypatch):
    (folder / "1-0000.jsonl").write_bytes(row(1, text="a"))

    def unplugged(path, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.shutil, "rmtree", unplugged)
    with pytest.raises(KeyboardInterrupt):
        parts.Parts(folder).remove()
    assert not folder.exists() and parts.Parts(folder).done() == set()
    parts.Parts(folder).remove()  # nothing is there any more


def test_rows_of_nobody_knows_what_job_are_not_taken_for_this_ones(job, folder, tmp_path, rows_of):
    (folder / "20200101T000000-aaaaaa-0000.jsonl").write_bytes(row(2, text="x") + row(77, text="y"))
    assert job() == 1
    rows = rows_of(tmp_path / "out.jsonl")
    assert [row["line"] for row in rows] == list(range(1, 11)) and rows[1]["text"] == "1cba"


def test_two_rows_that_differ_are_told(folder, tmp_path, rows_of):
    (folder / "1-0000.jsonl").write_bytes(row(1, text="a") + row(2, text="b"))
    (folder / "2-0000.jsonl").write_bytes(row(1, text="A") + row(2, text="b"))
    out = tmp_path / "out.jsonl"
    assert parts.Parts(folder).merge(str(out), 2).differ == (1,)
    assert [r["text"] for r in rows_of(out)] == ["a", "b"]


def test_a_process_writes_to_no_file_that_is_there(folder):
    parts.Part(folder, "1", 0).close()
    with pytest.raises(FileExistsError):
        parts.Part(folder, "1", 0)


class Seat:
    """One process's link to a store that several threads share."""

    devices = None

    def __init__(self, store: OneProcess, id: int, count: int):
        self.id, self.count, self._store, self.lost = id, count, store, False
        self.hold = threading.Lock()

    def ask(self, op: str, **arguments):
        with self.hold:
            if self.lost:
                raise LinkLost("it does not answer")
            return self._store.ask(op, **arguments)

    def leave(self, *, together: bool) -> None:
        pass


@pytest.fixture
def teams():
    """Three processes, each as a thread that goes on until it is stopped; the seats, and what ended them."""
    store, ended = OneProcess(), {}
    seats = [Seat(store, id, 3) for id in range(3)]

    def live(seat: Seat) -> None:
        try:
            with Team(seat, 1.0, lambda why: None) as team:
                ended[seat.id] = None
                while True:
                    team.check()
                    time.sleep(0.01)
        except Stopped as stopped:
            ended[seat.id] = str(stopped)

    threads = [threading.Thread(target=live, args=(seat,)) for seat in seats]
    for thread in threads:
        thread.start()
    while len(ended) < 3:
        time.sleep(0.01)
    yield seats, ended
    for seat in seats:
        seat.lost = True
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_that_is_silent_is_named_and_learns_of_it(teams, silent):
    seats, ended = teams
    time.sleep(2)
    assert set(ended.values()) == {None}, "all are well"
    begin = time.monotonic()
    with seats[silent].hold:
        while ended[1 - silent] is None or ended[2] is None:
            assert time.monotonic() - begin < 10
            time.sleep(0.01)
        assert ended[1 - silent].startswith(f"process {silent} (")
        assert "has not been heard of" in ended[1 - silent]
        assert ended[2] == ended[1 - silent], "and by all"
    while ended[silent] is None:
        assert time.monotonic() - begin < 20
        time.sleep(0.01)


@pytest.mark.parametrize("watch", [True, False])
def test_whoever_leaves_has_told_the_others_why(monkeypatch, watch):
    """Process 0 finds 1 gone and leaves before its watch could tell; with it the store goes."""
    store = OneProcess()
    if not watch:
        monkeypatch.setattr(Team, "_watch", lambda self: None)
    with pytest.raises(Stopped), Team(Seat(store, 0, 1), 5.0, print) as team:
        team._stop("process 1 (there, pid 7) has not been heard of for 9 s")
        team.check()
    assert list(store.ask("dir", key="stop/").values()) == [
        "process 1 (there, pid 7) has not been heard of for 9 s"
    ]


def test_other_numbers_of_processes_are_refused_by_all():
    store, told = OneProcess(), {}

    def live(id: int, count: int) -> None:
        try:
            with Team(Seat(store, id, count), 5.0, print):
                pass
        except (LinkError, Stopped) as error:
            told[id] = str(error)

    threads = [threading.Thread(target=live, args=seat) for seat in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(told) == {0, 1}
    assert all(
        "was started as one of" in words and "the same --processes" in words
        for words in told.values()
    )


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (LinkLost("ABORTED: 1 unexpectedly tried to connect with a different incarnation"),
         "process 1 was started a second time"),
        (LinkLost("exit status -9", ours=True), "the process beside it is gone (exit status -9)"),
        (LinkLost("UNAVAILABLE: no"), "is gone: UNAVAILABLE: no"),
    ],
)  # fmt: skip
def test_why_the_store_does_not_answer_is_told_apart(lost, words):
    assert words in Team(Seat(OneProcess(), 0, 2), 5.0, print)._told_of(lost)


def test_without_the_store_process_0_is_gone(teams):
    seats, ended = teams
    seats[1].lost = True
    while None in ended.values():
        time.sleep(0.01)
    assert ended[1].startswith("process 0 (")
    assert ended[1].endswith("is gone: it does not answer")
    assert ended[0].startswith("process 1 (")


def test_who_waits_for_others_can_be_interrupted():
    def interrupt():
        raise InterruptedError("Ctrl-C")

    store = OneProcess()
    with pytest.raises(InterruptedError), Team(Seat(store, 0, 1), 5.0, print) as team:
        team.count, team.pause = 2, interrupt
        team.gather("done", None)
    [told] = store.ask("dir", key="stop/").values()
    assert told == f"{team.me} stopped: Ctrl-C"


@pytest.fixture
def model(fake_model, monkeypatch):
    model = fake_model()
    monkeypatch.setattr(jaxstate.serve.model, "load", lambda name, **options: model)
    return model


@pytest.fixture
def job(model, tmp_path):
    """Run a job of one process; the exit code."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"abc{i}"}) + "\n" for i in range(9)) + "oops\n")

    def job(*flags, processes=("--processes", "1")) -> int:
        names = ("-i", str(path), "-o", str(tmp_path / "out.jsonl"))
        return main(["m", *names, *processes, *map(str, flags)])

    return job


@pytest.fixture
def broken_off(job, model, backwards, folder, capfd):
    """A job that ended after some rows."""

    def give_way():
        if model.engine.steps > 12:
            raise OSError("the disk is full")

    model.engine.before_step = give_way
    assert job() == 4
    kept = len(parts.Parts(folder).done())
    assert 0 < kept < 10
    assert f"kept      {kept} rows in {folder}" in capfd.readouterr().err
    model.engine = backwards()
    return folder


def test_a_job_of_one_goes_on_where_it_was(
    job, broken_off, model, backwards, tmp_path, rows_of, capfd
):
    kept = len(parts.Parts(broken_off).done())
    out = tmp_path / "out.jsonl"
    assert not out.exists()
    assert job(processes=()) == 2, "a run alone does not pass over them"
    assert "has rows of a job" in capfd.readouterr().err
    assert job("--stats", tmp_path / "stats.json") == 1
    rows = rows_of(out)
    assert [row["line"] for row in rows] == list(range(1, 11))
    assert [row["text"] for row in rows[:9]] == [f"{i}cba" for i in range(9)]
    assert json.loads((tmp_path / "stats.json").read_text())["processes"]["kept"] == kept
    assert model.engine.steps <= 4 * (10 - kept), "what has a row is not run again"
    assert not broken_off.exists()
    assert job() == 2, "the output has something in it"
    model.engine = backwards()
    assert job("--overwrite") == 1
    assert rows_of(out) == rows


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("", ["--max-tokens", 3], "max_tokens was 128 and is 3"),
        ("weights", [], "model was 'Backwards 1' and is 'Backwards 2'"),
        ("input", [], "the input had other lines"),
    ],
)
def test_rows_of_another_job_are_not_gone_on_with(
    job, broken_off, model, tmp_path, capfd, change, flags, message
):
    if change == "weights":
        model.fingerprint = "2"
    if change == "input":
        (tmp_path / "in.jsonl").write_text('{"prompt": "zyx"}\n')
    assert job(*flags) == 2
    assert message in capfd.readouterr().err
    assert broken_off.exists()
    assert job(*flags, "--overwrite") in (0, 1)
    assert not broken_off.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "0"], "0 is below 1"),
        (["--processes", "many"], "'many' is not a whole number"),
        (["--processes", "2", "--process-id", "2"], "with --processes 2 it is 0 to 1"),
        (["--processes", "2", "--coordinator", "here"], "'here' is not HOST:PORT"),
        (["--process-id", "0"], "--process-id is about one of several --processes"),
        (["--processes", "1", "-o", "-"], "the output of a job needs a name"),
        (["--processes", "1", "-i", "-"], "name a file with -i"),
        (["--processes", "1", "--heartbeat-timeout", "0"], "0 is not between 1 and a million"),
    ],
)
def test_a_wrong_job_is_found_before_anybody_is_waited_for(job, capfd, flags, message):
    try:
        code = job(*flags, processes=())
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capfd.readouterr().err


def test_from_python_as_from_the_command_line(model, tmp_path, rows_of):
    path, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    path.write_text("abc\nde\n")
    flags = {"max_tokens": 2, "processes": 1, "overwrite": True, "ignore_eos": False}
    assert serve("m", input=path, output=out, **flags) == 0
    assert [row["text"] for row in rows_of(out)] == ["cb", "ed"]
