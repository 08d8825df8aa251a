"""States that outlive the process: what is read back gives the same bits, and what is not whole is not taken for it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import threading
import time

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxstate import scheduler
from jaxstate.engine import Engine
from jaxstate.errors import SnapshotError, SpecError
from jaxstate.prefix import block_keys
from jaxstate.request import Request, SamplingParams
from tests.engine.conftest import REUSING
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand, state_by_hand


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([7, seed]).integers(0, VOCAB, length).tolist())


@pytest.fixture
def start(reusing):
    """Makes an engine in which nothing has happened, as another process would."""

    def start(model: ToyLM | None = None, **sizes) -> Engine:
        if not sizes and (model is None or (type(model) is ToyLM and model.config == ToyConfig())):
            return reusing(model)
        return Engine(model or ToyLM(), dataclasses.replace(REUSING, **sizes))

    return start


def ask(engine: Engine, prompt, name: str = "a", most: int = 6, salt: str = ""):
    request = Request(name, prompt, SamplingParams(max_tokens=most, ignore_eos=True), salt)
    (done,) = engine.completions([request])
    assert list(done.tokens) == continue_by_hand(prompt, most), name
    return done


@pytest.fixture
def folder(start, tmp_path):
    """A store with the states of three prompts, the first of which was used."""
    engine = start()
    for seed in (0, 0, 1, 2):
        ask(engine, text(200 + 64 * seed, seed))
    assert engine.prefixes.save(tmp_path / "store").states == 3
    return tmp_path / "store"


def path_of(folder, seed: int):
    tokens = text(200 + 64 * seed, seed)
    return folder / f"{block_keys(tokens)[(len(tokens) - 1) // 64 - 1].hex()}.safetensors"


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_later_engine_starts_from_what_an_earlier_one_kept(start, folder):
    later = start()
    alone = ask(start(), text(200))
    told = later.prefixes.load(folder)
    assert (told.states, told.no_room, told.problems) == (3, 0, ())
    assert "3 states" in str(told)
    done = ask(later, text(200))
    assert (alone.cached_tokens, done.cached_tokens, done.cache_miss) == (0, 192, None)
    assert done.tokens == alone.tokens and done.logprobs == alone.logprobs
    assert ask(later, text(264, 1)).cached_tokens == 256
    assert later.stats.prompt_tokens == 8 + 8 and later.stats.late_compilations == 0
    # A prompt of another branch knows from the names how much it shares.
    other = ask(later, (*text(200)[:140], *text(60, seed=9)))
    assert (other.cached_tokens, other.cache_miss) == (0, "not_kept")
    pool, index = later.schedule.pool, later.schedule.index
    pool.check()
    assert pool.free_count("whole") + len(index) == later.spec.blocks("whole") - 1


def test_every_leaf_comes_back_and_no_other_block_is_touched(start, folder):
    later = start()
    ask(later, text(150, seed=5))
    before = {g: [np.asarray(x) for x in leaves(later, g)] for g in later.spec.names}
    known = {b for node in later.schedule.index.nodes.values() for b in node.blocks.items()}
    later.prefixes.load(folder)
    node = later.schedule.index.nodes[block_keys(text(200))[2]]
    assert node.position == 192 and later.schedule.pool.sealed["whole"][node.blocks["whole"]]
    written = {b for n in later.schedule.index.nodes.values() for b in n.blocks.items()} - known
    for group in later.spec.names:
        mine = [block for name, block in written if name == group]
        for old, new in zip(before[group], leaves(later, group), strict=True):
            same = np.delete(np.asarray(new), mine, axis=1)
            assert same.tobytes() == np.delete(old, mine, axis=1).tobytes()
    (h,), aux = state_by_hand(text(200)[:192])
    state = later.state.cache.read("whole", [node.blocks["whole"]])
    for layer in range(2):
        assert state[0][layer, 0] == h and state[1]["count"][layer, 0] == aux["count"] == 192
        assert (state[1]["last"][layer, 0] == aux["last"]).all()


def leaves(engine: Engine, group: str):
    h, aux = engine.state.cache.groups[group]
    return [h, aux["count"], aux["last"]]


def test_salts_stay_apart_and_are_not_written(start, tmp_path):
    engine = start()
    ask(engine, text(200), salt="open sesame")
    engine.prefixes.save(tmp_path)
    (content,) = contents(tmp_path).values()
    assert b"sesame" not in content
    later = start()
    assert later.prefixes.load(tmp_path).states == 1
    assert ask(later, text(200)).cached_tokens == 0
    assert ask(later, text(200), salt="open sesame").cached_tokens == 192


def test_br55_a_store_of_another_model_layout_or_dtype_is_refused(start, folder):
    other = ToyLM()
    other.weight[...] += 1
    for model, message in (
        (other, "another config or other weights"),
        (ToyLM(ToyConfig(layers=1)), "its layout is"),
        (Renamed(), "its model is ToyLM, this one's is Renamed"),
    ):
        engine = start(model)
        before = engine.schedule
        for act in (engine.prefixes.load, engine.prefixes.save):
            with pytest.raises(SnapshotError, match=message):
                act(folder)
        assert engine.schedule is before
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        start().prefixes.load(folder / "nothing")
    with pytest.raises(SpecError, match="checkpoints is 0"):
        start(checkpoints=0).prefixes.load(folder)


class Renamed(ToyLM):
    pass


def test_states_of_other_circumstances_are_passed_over_and_replaced(start, folder, monkeypatch):
    """Other sizes or versions may round differently, and a hit must not change a text."""
    told = start(chunk_tokens=64).prefixes.load(folder)
    assert told.states == 0 and len(told.problems) == 1
    assert (
        "3 of the states" in told.problems[0] and "chunk_tokens 128 (here 64)" in told.problems[0]
    )
    assert start(rows=2).prefixes.load(folder).states == 0
    assert start(checkpoints=3).prefixes.load(folder).states == 3  # how many are kept is no matter
    monkeypatch.setattr("jaxstate.prefix_store.versions", lambda: {"jaxstate": "9", "jax": "8"})
    newer = start()
    assert "jaxstate" in newer.prefixes.load(folder).problems[0]
    ask(newer, text(200))
    newer.prefixes.save(folder)
    again = start().prefixes.load(folder)
    assert again.states == 1 and "2 of the states" in again.problems[0]


def test_states_from_a_cpu_with_other_instructions_are_passed_over(start, folder, monkeypatch):
    """XLA compiles for the instructions that it finds, and sums in another order with others."""
    monkeypatch.setattr("jaxstate.prefix_store.instructions", lambda: "riscv64 0123")
    told = start().prefixes.load(folder)
    assert told.states == 0 and "instructions" in told.problems[0]
    assert "here 'riscv64 0123'" in told.problems[0]


def test_two_that_save_at_once_leave_whole_files_of_both(start, folder, monkeypatch):
    """Both are in the midst of writing the same three states when the first of them is done."""
    engines = [start(), Engine(ToyLM(), REUSING)]
    for engine, seed in zip(engines, (5, 6), strict=True):
        engine.prefixes.load(folder)
        ask(engine, text(264, seed))
    both, replace = threading.Barrier(2), os.replace

    def together(source, target):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=5)
        replace(source, target)

    monkeypatch.setattr(os, "replace", together)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        saved = list(threads.map(lambda e: e.prefixes.save(folder), engines))
    assert [s.states for s in saved] == [4, 4] and not any(s.problems for s in saved)
    assert [n for n in os.listdir(folder) if n.endswith(".part")] == []
    told = start().prefixes.load(folder)
    assert (told.states, told.problems) == (5, ())


def damaged(content: bytes, how: str) -> bytes:
    if how == "empty":
        return b""
    if how == "cut":
        return content[: len(content) * 2 // 3]
    if how == "a byte of the state":
        return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    if how == "a letter of the model":
        return content.replace(b"ToyLM", b"ToyLN", 1)
    if how == "another worth":
        at = content.index(b"worth") + len(b'worth\\":')
        return content[:at] + b"9" + content[at + 1 :]
    if how == "another format":
        return content.replace(b'\\"format\\":1,', b'\\"format\\":7,', 1)
    if how == "a letter of the chain":
        return re.sub(rb'(chain\\?":\[\\?")[0-9a-f]', rb"\1r", content, count=1)
    assert how == "not ours"
    return b"these are no tensors at all"


HOW = (
    "empty", "cut", "a byte of the state", "a letter of the model", "another worth", "another format",
    "a letter of the chain", "not ours",
)  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_a_file_that_is_not_whole_is_named_and_the_others_are_read(start, folder, how):
    bad = path_of(folder, 1)
    before = bad.read_bytes()
    bad.write_bytes(damaged(before, how))
    assert bad.read_bytes() != before
    later = start()
    told = later.prefixes.load(folder)
    assert told.states == 2 and len(told.problems) == 1
    assert str(bad) in told.problems[0] and "passed over" in told.problems[0]
    assert ask(later, text(264, 1)).cached_tokens == 0
    assert ask(later, text(200)).cached_tokens == 192
    later.schedule.pool.check()
    # What was computed anew takes its place.
    later.prefixes.save(folder)
    assert start().prefixes.load(folder).states == 3


def test_a_file_under_another_ones_name_or_with_other_arrays_is_passed_over(start, folder):
    path_of(folder, 1).write_bytes(path_of(folder, 2).read_bytes())
    with safe_open(path_of(folder, 0), framework="np") as file:
        header = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    arrays["whole/0"] = arrays["whole/0"][:1]
    rewrite(path_of(folder, 0), header, arrays)
    told = start().prefixes.load(folder)
    assert told.states == 1
    assert "another prefix than its name says" in told.problems[0]
    assert "has no whole/0" in told.problems[1]


def test_a_pipe_with_a_states_name_is_not_waited_for(start, folder):
    path_of(folder, 1).unlink()
    os.mkfifo(path_of(folder, 1))
    told = start().prefixes.load(folder)
    assert told.states == 2 and "not a regular file" in told.problems[0]


def rewrite(path, metadata, arrays):
    """Writes the file anew with the checksum that it should have."""
    from jaxstate.prefix_store import _Header
    from jaxstate.state.tensor_file import KEY, _checksum

    header = msgspec.json.decode(metadata[KEY], type=_Header)
    header = msgspec.structs.replace(header, checksum=_checksum(header, arrays))
    save_file(arrays, path, metadata={KEY: msgspec.json.encode(header).decode()})


def test_pulling_the_plug_leaves_files_that_are_whole_or_not_there(start, folder, monkeypatch):
    engine, before = start(), contents(folder)
    engine.prefixes.load(folder)
    for seed in (3, 4):
        ask(engine, text(200, seed))
    replace, done = os.replace, []

    def unplugged(source, target):
        if done:
            # Half of the file is written; nothing after that happens.
            with open(source, "r+b") as file:
                file.truncate(os.path.getsize(source) // 2)
            os.link(source, f"{source[: source.rindex('.part')]}1.part")
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", lambda a, b: unplugged(str(a), str(b)))
    with pytest.raises(KeyboardInterrupt):
        engine.prefixes.save(folder)
    monkeypatch.undo()
    after = contents(folder)
    assert set(after) - set(before) and len(done) == 1
    (left,) = (name for name in after if name.endswith(".part"))
    told = start().prefixes.load(folder)
    assert told.states == len(after) - 1 >= 3 and told.problems == ()
    # What was never finished is removed once it is surely nobody's.
    engine.prefixes.save(folder)
    assert left in contents(folder)
    long_ago = time.time() - 3600
    os.utime(folder / left, (long_ago, long_ago))
    engine.prefixes.save(folder)
    assert left not in contents(folder) and len(contents(folder)) == 5


def test_the_size_is_bounded_and_the_most_valuable_stay(start, folder, tmp_path):
    each = max(len(content) for content in contents(folder).values())
    bound = 2 * each + 20_000
    engine = start()
    engine.prefixes.load(folder)
    worth = {key: node.priority for key, node in engine.schedule.index.nodes.items()}
    told = engine.prefixes.save(tmp_path / "small", most_bytes=bound)
    assert 0 < told.states < 3 and told.no_room == 3 - told.states
    kept = {bytes.fromhex(name.split(".")[0]) for name in contents(tmp_path / "small")}
    assert kept == set(sorted(worth, key=worth.__getitem__)[-told.states :])
    assert sum(map(len, contents(tmp_path / "small").values())) == told.nbytes <= bound
    # Another run's states go when this one's want their room, the oldest first.
    other = start()
    for seed in (5, 6, 7):
        ask(other, text(300, seed))
    other.prefixes.save(folder)
    assert len(contents(folder)) == 6
    other.prefixes.save(folder, most_bytes=bound)
    assert sum(map(len, contents(folder).values())) <= bound
    assert other.prefixes.save(folder, most_bytes=10).states == 0 and contents(folder) == {}


def crowd(engine: Engine, free: int) -> Engine:
    """Leaves so many blocks of each group, as a smaller pool would."""
    pool = engine.schedule.pool
    pool, _ = pool.allocate("ballast", {g: pool.free_count(g) - free for g in ("whole",)})
    engine.schedule = dataclasses.replace(engine.schedule, pool=pool)
    return engine


def test_only_free_blocks_are_taken(start, folder):
    engine = crowd(start(), free=5)
    for i in range(3):
        engine.submit(Request(f"r{i}", text(40, 20 + i), SamplingParams(max_tokens=90)))
    engine.step()
    assert len(engine.schedule.running) == 3
    held = dict(engine.schedule.pool.held)
    told = engine.prefixes.load(folder)
    assert (told.states, told.no_room) == (2, 1)
    assert engine.prefixes.load(folder).no_room == 1
    assert held.items() <= dict(engine.schedule.pool.held).items()
    done = {e.id: e.completion for e in engine.run() if e.completion}
    for i in range(3):
        assert list(done[f"r{i}"].tokens) == continue_by_hand(text(40, 20 + i), 90)
    engine.schedule.pool.check()


def test_no_request_waits_because_of_states_that_were_read_back(start, folder):
    engines = [crowd(start(), free=4) for _ in range(2)]
    assert engines[0].prefixes.load(folder).states == 3
    for engine in engines:
        for i in range(5):
            engine.submit(Request(f"r{i}", text(120, 30 + i), SamplingParams(max_tokens=9)))
    steps = 0
    while not engines[1].idle:
        steps += 1
        full, empty = (list(engine.step()) for engine in engines)
        assert [(e.id, e.tokens) for e in full] == [(e.id, e.tokens) for e in empty]
    assert engines[0].idle and steps > 4 and engines[0].schedule.evicted > 0


def test_reading_back_twice_or_between_steps_changes_nothing(start, folder):
    engine = start()
    engine.submit(Request("a", text(200), SamplingParams(max_tokens=30)))
    engine.step()
    assert engine.prefixes.load(folder).states == 3
    assert engine.prefixes.load(folder).states == 0
    (done,) = (e.completion for e in engine.run() if e.completion)
    assert list(done.tokens) == continue_by_hand(text(200), 30)
    assert engine.stats.late_compilations == 0
    engine.schedule.pool.check()
    engine.schedule = scheduler.forget_prefixes(engine.schedule)
    # Let go of, it may come again once its blocks are free.
    assert engine.prefixes.load(folder).states == 0
    list(engine.run())
    assert engine.prefixes.load(folder).states == 3


def test_what_is_valued_stays_valued(start, folder):
    """Uses and age come along, so that what nobody asks for goes first in the next run too."""
    later = start()
    later.prefixes.load(folder)
    index = later.schedule.index
    used = index.nodes[block_keys(text(200))[2]]
    assert used.uses == 1 and used.cost == 192
    worths = [index.nodes[path_key(folder, s)].priority for s in (0, 1, 2)]
    assert worths == [384, 256, 320]
    aged = dataclasses.replace(index, clock=200.0)
    later.schedule = dataclasses.replace(later.schedule, index=aged)
    later.prefixes.save(folder)
    latest = start()
    latest.prefixes.load(folder)
    assert [latest.schedule.index.nodes[path_key(folder, s)].priority for s in (0, 1, 2)] == [
        184, 56, 120,
    ]  # fmt: skip


def path_key(folder, seed: int) -> bytes:
    return bytes.fromhex(path_of(folder, seed).name.split(".")[0])


def test_a_state_that_is_not_finite_is_not_kept(start, tmp_path):
    engine = start()
    ask(engine, text(200))
    (node,) = engine.schedule.index.nodes.values()
    engine._state = engine.state.replace(
        cache=engine.state.cache.poison({"paged": [node.blocks["paged"]]})
    )
    told = engine.prefixes.save(tmp_path)
    assert told.states == 0 and "not finite" in told.problems[0] and contents(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(start, tmp_path):
    engine = start()
    ask(engine, text(200))
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="file cannot be written"):
        engine.prefixes.save(tmp_path / "file")


def test_a_folder_with_a_states_name_costs_only_that_state(start, folder):
    engine = start()
    engine.prefixes.load(folder)
    path_of(folder, 1).unlink()
    path_of(folder, 1).mkdir()
    stored = engine.prefixes.save(folder)
    assert stored.states == 2
    assert stored.problems == (
        f"{path_of(folder, 1)} is a folder; the state of that name is not kept",
    )
    assert start().prefixes.load(folder).states == 2
