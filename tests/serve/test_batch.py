"""The loop between lines, engine and rows."""

import itertools
import json
import os
import tracemalloc

import pytest

from jaxstate.request import SamplingParams
from jaxstate.serve import protocol
from jaxstate.serve.batch import Batch
from jaxstate.serve.lines import LineReader

RULES = protocol.Rules(SamplingParams(), False, lambda text: list(text.encode()), 256)


@pytest.fixture
def run(backwards, tmp_path):
    """Run lines through the loop; what it wrote, and the batch."""

    def run(lines, *, form=protocol.Plain, window=4, pause=lambda batch: None, **options):
        path = tmp_path / "input"
        path.write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
        fd = os.open(path, os.O_RDONLY)
        rows = []
        engine = backwards(**options)
        batch = Batch(
            engine, LineReader(fd), form(RULES).parse, lambda data: rows.append(json.loads(data)),
            window, lambda: pause(batch),
        )  # fmt: skip
        try:
            batch.run()
        finally:
            os.close(fd)
        return rows, batch

    return run


def line(**fields) -> str:
    return json.dumps(fields)


def test_every_line_has_one_row_whatever_it_holds(run):
    rows, batch = run(
        [
            line(id="a", prompt="abc"),
            "broken",
            line(id="long", prompt="x" * 50),
            "",
            line(id="a", prompt="twice"),
            line(id="bad", prompt="ab\0c"),
            line(prompt="é", max_tokens=1),
        ]
    )
    assert sorted((row["line"], row["id"]) for row in rows) == [
        (1, "a"), (2, "2"), (3, "long"), (5, "a"), (6, "bad"), (7, "7"),
    ]  # fmt: skip
    by_line = {row["line"]: row for row in rows}
    assert by_line[1]["text"] == "cba"
    assert by_line[1]["finish_reason"] == "stop"
    assert by_line[7]["finish_reason"] == "length"
    assert by_line[7]["usage"]["completion_tokens"] == 1
    codes = {number: row["error"]["code"] for number, row in by_line.items() if "error" in row}
    assert codes == {2: "bad_json", 3: "too_long", 5: "duplicate_id", 6: "non_finite"}
    assert "needs 51 tokens" in by_line[3]["error"]["message"]
    assert batch.counts.ok == 2
    assert dict(batch.counts.errors) == dict.fromkeys(codes.values(), 1)
    # Three of a, two of bad up to its ruin, one of line 7.
    assert batch.counts.completion_tokens == batch.counts.generated == 3 + 2 + 1
    assert batch.counts.prompt_tokens == 3 + 4 + 2


@pytest.mark.parametrize("lengths", sorted(set(itertools.permutations([1, 8, 3, 8]))))
def test_answers_stay_with_their_lines_in_whatever_order_they_end(run, lengths):
    prompts = {str(i): f"{i}" + "abcdefgh"[:n] for i, n in enumerate(lengths)}
    rows, _ = run([line(id=name, prompt=prompt) for name, prompt in prompts.items()])
    assert {row["id"]: row["text"] for row in rows} == {
        name: prompt[::-1] for name, prompt in prompts.items()
    }
    assert len(rows) == 4


def test_a_row_is_written_when_its_request_ends(run):
    seen = []
    rows, _ = run(
        [line(id="short", prompt="a"), line(id="long", prompt="b" * 30)],
        pause=lambda batch: seen.append((batch.engine.steps, batch.counts.rows)),
    )
    assert [row["id"] for row in rows] == ["short", "long"]
    assert (1, 1) in seen


def test_no_more_lines_are_taken_than_the_window_holds(run):
    _, batch = run([line(prompt="abc")] * 50, window=4, rows=2)
    assert batch.engine.most == 4
    assert batch.counts.ok == 50
    _, batch = run([line(prompt="abc")] * 50, window=9, rows=2)
    assert batch.engine.most == 9


def test_lines_that_fail_do_not_keep_the_engine_waiting(run):
    seen = []
    run(
        [line(id="good", prompt="abc"), *["broken"] * 100],
        pause=lambda batch: seen.append((batch.counts.ok, batch.counts.failed)),
    )
    assert any(ok == 1 and failed < 100 for ok, failed in seen)


def test_a_long_run_of_blank_lines_does_not_starve_what_runs(run):
    steps = []
    rows, _ = run(
        (line(prompt="abcdefghi") + "\n" * 4_000_000 + line(prompt="z") + "\n").encode(),
        pause=lambda batch: steps.append(batch.counts.rows),
    )
    assert [row["line"] for row in rows] == [1, 4_000_001]
    assert len(steps) > 4_000_000 / (4 << 16), "the loop had its turn between reads"
    assert steps.index(1) <= 11, "nine tokens, a step each"


def test_an_input_without_lines_gives_no_rows(run):
    rows, batch = run(b"\n \n")
    assert rows == []
    assert batch.engine.steps == 0


def test_memory_does_not_grow_with_the_file(backwards, tmp_path):
    brief = protocol.Rules(SamplingParams(max_tokens=1), False, RULES.encode, 256)

    def peak(count: int) -> int:
        path = tmp_path / "input"
        path.write_bytes(b"%0300d\n" % 7 * count)
        fd = os.open(path, os.O_RDONLY)
        batch = Batch(
            backwards(max_len=400), LineReader(fd), protocol.Text(brief).parse,
            lambda data: None, 4, lambda: None,
        )  # fmt: skip
        tracemalloc.start()
        batch.run()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        os.close(fd)
        assert batch.counts.ok == count
        return used

    peak(4_000)  # fills the interpreter's free lists, which keep thousands of tuples
    # Ten bytes a row would be within noise; a line or a row that is held takes three hundred.
    assert peak(4_000) - peak(1_000) < 10 * 3_000


def test_between_lines_answers_are_read_while_there_are_any(backwards):
    """Somebody who waits for a row before the next line finds what was said last read by then."""
    reads, writes = os.pipe()
    engine, rows, idle = backwards(), [], []

    def before_step():
        if not engine.waiting and not engine.running:
            idle.append(len(rows))
            engine.prefixes.unsettled = len(idle) % 3 != 0
            if not engine.prefixes.unsettled:
                os.write(writes, line(prompt="next").encode() + b"\n")
                if len(idle) == 6:
                    os.close(writes)

    def write(data: bytes) -> None:
        rows.append(json.loads(data))
        engine.prefixes.unsettled = len(rows) < 3

    engine.before_step = before_step
    os.write(writes, line(prompt="first").encode() + b"\n")
    batch = Batch(engine, LineReader(reads), protocol.Plain(RULES).parse, write, 4, lambda: None)
    batch.run()
    os.close(reads)
    assert [row["text"] for row in rows] == ["tsrif", "txen", "txen"]
    assert idle == [1, 1, 1, 2, 2, 2]
