"""Sequences as values: nothing done to one changes another, and all come to what plain numpy says."""

import dataclasses
import json
import pathlib
import random
import struct

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxstate as js
from jaxstate.engine import Engine
from jaxstate.models import Mamba2Config, from_random
from jaxstate.models.identify import identify
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand, scores_by_hand, state_by_hand

SIZES = js.Sizes(rows=4, max_len=96, chunk_tokens=64, decode_steps=4, checkpoints=0)


def make(model) -> js.LM:
    return js.LM(model, None, Engine(model, SIZES, poison=True))


@pytest.fixture(scope="module")
def lm() -> js.LM:
    return make(ToyLM())


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist())


def state_of(seqs: js.Sequences, i: int):
    """Every group's state of one sequence, and the sequence's tokens."""
    s = seqs.sequences[i]
    return {g: seqs.cache.read(g, [s.blocks[g][-1]]) for g in seqs.spec.names}, s.tokens


def assert_by_hand(seqs: js.Sequences) -> None:
    """State, scores and account of every sequence are those of its tokens."""
    seqs.pool.check()
    assert set(seqs.pool.held) == set(seqs.ids)
    for i, s in enumerate(seqs.sequences):
        state, tokens = state_of(seqs, i)
        want = state_by_hand(tokens)
        for group, leaves in state.items():
            for layer in range(2):
                here = jax.tree.map(lambda x, n=layer: np.asarray(x[n, 0]), leaves)
                chex.assert_trees_all_equal(here, want)
            held = sorted(seqs.pool.held[s.id][group])
            assert held == sorted(s.blocks[group])
            assert len(held) == seqs.spec.need(len(tokens))[group]
        np.testing.assert_array_equal(seqs.scores[i], scores_by_hand(tokens))


def bytes_of(seqs: js.Sequences):
    """Everything that the value holds, copied."""
    tables = jax.device_get(seqs.tables.ids)
    return jax.tree.map(
        np.array, (jax.device_get((seqs.cache, seqs.row_scores)), tables, seqs.pool)
    )


def assert_same(before, after) -> None:
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.tobytes() == b.tobytes()  # poison is NaN, which equals nothing


def test_greedy_decoding_is_what_each_prompt_gives_by_hand_and_in_the_engine(lm):
    prompts = [prompt_of(n) for n in (1, 4, 70)]  # the last is read in two steps, in company
    seqs = lm.prefill(prompts)
    assert (
        seqs.tokens == tuple(prompts) and seqs.lengths == (1, 4, 70) and seqs.ids == ("0", "1", "2")
    )
    assert_by_hand(seqs)
    after, out = lm.decode(seqs, 11)
    assert_by_hand(after)
    done = lm.generate(prompts, max_tokens=11)
    for prompt, tokens, completion in zip(prompts, out.tokens, done, strict=True):
        assert list(tokens) == continue_by_hand(prompt, 11)
        assert tokens == completion.tokens
    assert out.finish_reasons == ("length",) * 3 and after.lengths == (12, 15, 81)


def test_a_models_tokens_and_logprobs_have_the_engines_bits():
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = from_random(config, seed=3)
    lm = js.LM(model, None, Engine(model, SIZES, poison=True))
    prompts = [prompt_of(n) for n in (1, 6, 70, 9)]
    for sampling in ({}, {"temperature": 0.9, "top_k": 20, "seed": 5}):
        done = lm.generate(prompts, max_tokens=6, **sampling)
        seqs, out = lm.decode(lm.prefill(prompts), 6, **sampling)
        for completion, tokens, logprobs in zip(done, out.tokens, out.logprobs, strict=True):
            assert tokens == completion.tokens and logprobs == completion.logprobs
    assert "Mamba2LM" in repr(seqs) and "KiB" in repr(seqs)


def test_several_calls_give_what_one_gives(lm):
    seqs = lm.prefill([prompt_of(5), prompt_of(9), prompt_of(1)])
    _, whole = lm.decode(seqs, 9, temperature=1.0, seed=4)
    tokens = [(), (), ()]
    for steps in (1, 5, 3):
        seqs, out = lm.decode(seqs, steps, temperature=1.0, seed=4)
        tokens = [a + b for a, b in zip(tokens, out.tokens, strict=True)]
    assert tuple(tokens) == whole.tokens
    assert_by_hand(seqs)


def test_forks_differ_draw_as_in_the_engine_and_leave_their_parent_alone(lm):
    parent = lm.prefill([prompt_of(6)])
    before = bytes_of(parent)
    forks = parent.fork(4)
    assert forks.cache is parent.cache and forks.ids == ("0/0", "0/1", "0/2", "0/3")
    children, out = lm.decode(forks, 7, temperature=1.0, seed=3)
    assert len(set(out.tokens)) == 4
    done = lm.generate([prompt_of(6)], n=4, max_tokens=7, temperature=1.0, seed=3)
    assert list(out.tokens) == [completion.tokens for completion in done]
    assert_by_hand(children)
    # The full block of the prompt is shared, the one that was not full is not, and nobody holds it any more.
    assert len({s.blocks["paged"][0] for s in children.sequences}) == 1
    assert len({b for s in children.sequences for b in s.blocks["paged"][1:]}) == 4 * 3
    assert children.pool.sealed["paged"].sum() == 1 and children.pool.sealed["whole"].sum() == 0
    assert_same(before, bytes_of(parent))
    assert_by_hand(parent)


def test_an_older_value_is_the_way_back(lm):
    old = lm.prefill([prompt_of(n) for n in (7, 8, 9)])
    before = bytes_of(old)
    first, out = lm.decode(old, 6)
    lm.decode(first, 5, temperature=1.0)
    again, same = lm.decode(old, 6)
    assert same == out and again.tokens == first.tokens
    assert_same(bytes_of(again), bytes_of(first))
    assert_same(before, bytes_of(old))


def test_choosing_and_dropping(lm):
    seqs = lm.prefill([prompt_of(n) for n in (3, 5, 7)])
    assert seqs[1].ids == ("1",) and seqs[-1].ids == ("2",) and seqs[1:].ids == ("1", "2")
    assert seqs[[2, 0]].ids == ("2", "0") and seqs.drop(1).ids == ("0", "2")
    assert [one.ids for one in seqs] == [("0",), ("1",), ("2",)]
    chosen, out = lm.decode(seqs[[2, 0, 1]], 5)
    assert [list(t) for t in out.tokens] == [continue_by_hand(prompt_of(n), 5) for n in (7, 3, 5)]
    assert_by_hand(chosen)
    free = seqs.drop(0).pool.free_count("whole") - seqs.pool.free_count("whole")
    assert free == 1
    with pytest.raises(IndexError, match="there is no sequence 3; there are 3"):
        seqs[3]
    with pytest.raises(js.RequestError, match="each once"):
        seqs[[1, 1]]
    with pytest.raises(js.RequestError, match="at least one"):
        seqs[0].drop(0)
    with pytest.raises(js.RequestError, match="n is 0"):
        seqs.fork(0)


def test_an_end_token_is_told_and_not_read(lm):
    """Forks of which some stop at once keep the state that they share, while the others go on in their own."""
    forks = lm.prefill([prompt_of(6)]).fork(4)
    _, out = lm.decode(forks, 1, temperature=4.0, seed=3)
    end = out.tokens[0][0]
    stopped = [tokens[0] == end for tokens in out.tokens]
    assert any(stopped) and not all(stopped)
    seqs, out = lm.decode(forks, 6, temperature=4.0, seed=3, stop_ids=(end,))
    assert_by_hand(seqs)
    for s, tokens, reason, at_once in zip(
        seqs.sequences, out.tokens, out.finish_reasons, stopped, strict=True
    ):
        assert (tokens == (end,)) == at_once == s.forked
        assert reason == ("stop" if end in tokens else "length")
        assert s.tokens == prompt_of(6) + tuple(t for t in tokens if t != end)
    seqs, out = lm.decode(seqs, 6)
    assert_by_hand(seqs)
    assert not any(s.forked for s in seqs.sequences)


def test_forced_tokens_are_read_and_scored(lm):
    seqs, out = lm.decode(
        lm.prefill([prompt_of(5), prompt_of(2), prompt_of(3)]), 6, forced=[[1, 2, 3, 4, 5, 6], [7]]
    )
    assert out.tokens[0] == (1, 2, 3, 4, 5, 6)
    assert list(out.tokens[1]) == [7, *continue_by_hand((*prompt_of(2), 7), 5)]
    assert_by_hand(seqs)
    text = prompt_of(5)
    for token, logprob in zip(out.tokens[0], out.logprobs[0], strict=True):
        scores = scores_by_hand(text)
        np.testing.assert_allclose(logprob, scores[token] - np.log(np.exp(scores).sum()), atol=1e-5)
        text = (*text, token)
    np.testing.assert_allclose(out.sum_logprob[0], sum(out.logprobs[0]))


def test_what_has_no_room_or_no_meaning_is_refused_before_anything_runs(lm):
    with pytest.raises(js.CapacityError) as refused:
        lm.prefill([prompt_of(3), prompt_of(97)])
    assert (refused.value.request, refused.value.need, refused.value.capacity) == ("1", 97, 96)
    seqs = lm.prefill([prompt_of(3), prompt_of(90), prompt_of(4)])
    with pytest.raises(js.CapacityError, match=r"request '1'.*needs 97 tokens.*room for 96"):
        lm.decode(seqs, 7)
    with pytest.raises(js.CapacityError):
        lm.decode(seqs, 2**31 - 1)
    full, out = lm.decode(seqs, 6)
    assert list(out.tokens[1]) == continue_by_hand(prompt_of(90), 6)
    assert_by_hand(full)
    for wrong, message in (
        (lambda: lm.decode(seqs, 0), "steps is 0"),
        (lambda: lm.decode(seqs, 1, max_tokens=3), "takes steps"),
        (lambda: lm.decode(seqs, 1, temprature=3), "did you mean 'temperature'"),
        (lambda: lm.decode(seqs, 1, stop=("a",)), "stop_ids"),
        (lambda: lm.decode(seqs, 1, forced=[[1, 2]]), "forced has"),
        (lambda: lm.decode(seqs, 1, forced=[[VOCAB]]), "outside the vocabulary of 13"),
        (lambda: lm.prefill([[VOCAB]]), "outside the vocabulary of 13"),
        (lambda: lm.prefill([[]]), "no tokens"),
        (lambda: lm.prefill([]), "no prompts"),
        (lambda: make(ToyLM(breaks_at=5)).decode(seqs, 1), "another model's"),
    ):
        with pytest.raises(js.RequestError, match=message):
            wrong()


def test_scores_that_are_not_finite_end_the_one_sequence(lm):
    broken = make(ToyLM(breaks_at=9))
    broken._runner._sizes = lm._runner._sizes  # the programs take the weights as arguments
    seqs, out = broken.decode(broken.prefill([prompt_of(6), prompt_of(2), prompt_of(9)]), 5)
    assert out.finish_reasons == ("error", "length", "error")
    assert [len(tokens) for tokens in out.tokens] == [3, 5, 0]
    assert list(out.tokens[1]) == continue_by_hand(prompt_of(2), 5)
    assert seqs.lengths == (9, 7, 9)


def test_nothing_is_read_of_memory_that_is_nobodys(lm):
    seqs, _ = lm.decode(lm.prefill([prompt_of(6)]).fork(4)[[0, 2, 3]], 3, temperature=1.0)
    assert_by_hand(seqs)
    after, _ = lm.decode(seqs, 1)
    for group in seqs.spec.names:
        free = np.flatnonzero(after.pool.refs[group] == 0)
        held = np.unique([b for s in after.sequences for b in s.blocks[group]])
        values = np.asarray(jax.tree.leaves(after.cache.groups[group])[0])
        # The source that the forks had left is poisoned by the plan after.
        assert np.isnan(values[:, free]).all() and not np.isnan(values[:, held]).any()


@pytest.mark.parametrize("seed", range(4))
def test_any_history_comes_to_what_its_tokens_give_by_hand(lm, seed, tmp_path):
    rng = random.Random(seed)
    seqs = lm.prefill([prompt_of(rng.randrange(1, 12), seed=seed + i) for i in range(3)])
    seen = []  # one, three or four sequences at a time, which takes two sets of programs
    for step in range(12):
        kind = rng.choice(["fork", "choose", "decode", "decode", "snapshot", "rewind"])
        if kind == "fork":
            seqs = seqs.fork(rng.choice([1, 3, 4]) if len(seqs) == 1 else 1)
        elif kind == "choose":
            seqs = seqs[rng.sample(range(len(seqs)), rng.choice([1, min(3, len(seqs))]))]
        elif kind == "decode":
            stop = rng.sample(range(VOCAB), 3)
            seqs, _ = lm.decode(
                seqs, rng.randrange(1, 7), temperature=1.0, seed=step, stop_ids=stop
            )
        elif kind == "snapshot":
            seqs.snapshot().save(tmp_path / "s")
            seqs = lm.restore(js.Snapshot.load(tmp_path / "s"))
        elif kind == "rewind" and seen:
            seqs, tokens = rng.choice(seen)
            assert seqs.tokens == tokens
        assert_by_hand(seqs)
        seen.append((seqs, seqs.tokens))


# Snapshots


@pytest.fixture(scope="module")
def taken(lm):
    """Forks, of which the last two have not gone on, and a sequence of another length."""
    seqs = lm.prefill([prompt_of(n) for n in (6, 9, 3)])
    return lm.decode(seqs, 2)[0].drop(2).fork(2)


def test_a_snapshot_gives_every_bit_back(lm, taken, tmp_path):
    taken.snapshot().save(tmp_path / "s.safetensors")
    snapshot = js.Snapshot.load(tmp_path / "s.safetensors")
    restored = lm.restore(snapshot)
    assert restored.tokens == taken.tokens and restored.ids == taken.ids
    for i in range(4):
        chex.assert_trees_all_equal(state_of(restored, i)[0], state_of(taken, i)[0])
    np.testing.assert_array_equal(restored.scores, taken.scores)
    assert_by_hand(restored)
    # Forks share in the file what they share in the cache.
    assert {
        n: a.shape[1] for n, a in snapshot.arrays.items() if n.startswith("whole")
    } == dict.fromkeys(["whole/0", "whole/1.count", "whole/1.last"], 2)
    theirs, ours = (lm.decode(s, 5, temperature=1.0, seed=2) for s in (restored, taken))
    assert theirs[1] == ours[1]
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]
    assert "4 of ToyLM" in repr(snapshot) and str(snapshot.nbytes) in repr(snapshot)


def test_a_snapshot_is_restored_by_its_own_model_only(lm, taken):
    snapshot = taken.snapshot()
    for model, message in (
        (ToyLM(breaks_at=50), "fingerprint"),
        (ToyLM(ToyConfig(eos_token_ids=(3,))), "fingerprint"),
        (ToyLM(ToyConfig(layers=3)), "layout is .*2 layers.*, this model's is .*3 layers"),
        (ToyLM(ToyConfig(paged_block=8)), "layout"),
    ):
        with pytest.raises(js.SnapshotError, match=message):
            snapshot.check(identify(model), model.groups())
    here, groups = lm._runner.identity, lm.model.groups()
    snapshot.check(here, groups)
    with pytest.raises(js.SnapshotError, match="dtype is float32, this one's is bfloat16"):
        snapshot.check(dataclasses.replace(here, dtype="bfloat16"), groups)
    leaves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), groups[0].leaves)
    with pytest.raises(js.SnapshotError, match="layout"):
        snapshot.check(here, (dataclasses.replace(groups[0], leaves=leaves), groups[1]))
    with pytest.raises(js.SnapshotError, match="model is ToyLM, this one's is Other"):
        snapshot.check(dataclasses.replace(here, model="Other"), groups)
    other = dataclasses.replace(snapshot, identity=dataclasses.replace(here, fingerprint="0" * 32))
    with pytest.raises(js.SnapshotError, match="another config or other weights"):
        lm.restore(other)


def rewritten(content: bytes, change) -> bytes:
    """The file with a changed header; what follows it is left alone."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["jaxstate"])
    change(inner)
    header["__metadata__"]["jaxstate"] = json.dumps(inner)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def test_what_is_not_a_whole_snapshot_is_refused(taken, tmp_path):
    path = tmp_path / "s"
    taken.snapshot().save(path)
    content, bad = path.read_bytes(), tmp_path / "bad"

    def refused(message: str, given: bytes | None = None) -> None:
        if given is not None:
            bad.write_bytes(given)
        with pytest.raises(js.SnapshotError, match=message):
            js.Snapshot.load(bad)

    refused("cannot be read")  # there is no such file
    for length in (0, 5, 8, 200, len(content) // 2, len(content) - 1):
        refused("cannot be read", content[:length])
    refused("cannot be read", b"once upon a time " * 50)
    flipped = bytearray(content)
    flipped[-3] ^= 1
    refused("damaged", bytes(flipped))
    refused("format 2.*reads format 1", rewritten(content, lambda h: h.update(format=2)))
    refused("not a snapshot's", rewritten(content, lambda h: h.pop("layout")))
    refused("not a snapshot's", rewritten(content, lambda h: h.update(surprise=1)))
    refused("damaged", rewritten(content, lambda h: h["sequences"][0]["tokens"].append(3)))
    save_file({"x": np.zeros(3)}, bad)
    refused("not a snapshot of jaxstate")
    assert len(js.Snapshot.load(path)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (1,)},
        {"tokens": ()},
        {"row": 2},
        {"blocks": {"whole": (9,), "paged": (1, 2)}},
        {"blocks": {"whole": (0,), "paged": (1, 2)}},
        {"blocks": {"paged": (1, 2)}},
        {"id": "1/1"},
    ],
)
def test_a_file_that_contradicts_itself_is_refused(taken, tmp_path: pathlib.Path, change):
    snapshot = taken.snapshot()
    first = dataclasses.replace(snapshot.sequences[0], **change)
    wrong = dataclasses.replace(snapshot, sequences=(first, *snapshot.sequences[1:]))
    wrong.save(tmp_path / "s")
    with pytest.raises(js.SnapshotError, match="does not hold together"):
        js.Snapshot.load(tmp_path / "s")


def test_reprs_say_what_is_there_and_how_large(taken):
    text = repr(taken)
    assert "4 of ToyLM" in text and "0/0: 8 tokens" in text and "starts from there" in text
    assert "of state in a cache of" in text
    assert "row 3" in repr(taken.tables)
