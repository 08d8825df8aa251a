"""What a caller may hand over, and what is refused with a name instead of going wrong later."""

import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.compilation import use_persistent_cache
from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, CheckpointError, JaxstateError, RequestError, SpecError
from jaxstate.models import parse_config
from jaxstate.prefix import block_keys, holder_of
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from jaxstate.state import GroupSpec
from tests.engine.conftest import SIZES, assert_clean, by_hand, prompt_of, request, run_all
from tests.toy import VOCAB, ToyConfig, ToyLM, continue_by_hand


def test_numbers_of_numpy_and_jax_are_numbers():
    given = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=jnp.int32(2),
        stop_ids=np.array([1, 2]),
    )
    assert given == SamplingParams(max_tokens=3, temperature=0.5, top_k=2, stop_ids=(1, 2))
    assert Request("a", np.array([1, 2])) == Request("a", jnp.array([1, 2])) == Request("a", (1, 2))
    assert Sizes(rows=np.int64(3)) == Sizes(rows=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 10**400}, {"max_tokens": 2**31}, {"temperature": True}, {"top_k": 1.5},
        {"stop_ids": 3}, {"seed": None},
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.param == next(iter(wrong))


def test_sampling_that_is_no_sampling_is_refused_when_the_request_is_made():
    with pytest.raises(RequestError, match="SamplingParams"):
        Request("a", (1,), {"max_tokens": 3})
    with pytest.raises(RequestError, match="token ids"):
        Request("a", 3)


@pytest.mark.parametrize(
    "size", [{"decode_steps": 10**9}, {"rows": 10**6}, {"chunk_tokens": 2**30}], ids=repr
)
def test_sizes_that_no_program_could_have_are_refused(size):
    with pytest.raises(SpecError, match="whole number from"):
        Sizes(**size)


@pytest.mark.parametrize("temperature", [1e-45, 1.5e-38, 2e-38, 1e-20, 9e-7])
def test_a_temperature_next_to_nothing_is_greedy(engine, temperature):
    """Scores over a tiny temperature overflow, and the first infinity is not the likeliest token."""
    sampling = SamplingParams(max_tokens=8, temperature=temperature, seed=3)
    (done,) = engine.completions([Request("a", (5, 6, 7), sampling)])
    assert list(done.tokens) == continue_by_hand((5, 6, 7), 8)


def test_a_second_thread_in_a_step_is_told_so(engine):
    refused = []

    def intrude():
        try:
            engine.step()
        except JaxstateError as error:
            refused.append(str(error))

    engine.step()
    with engine._stepping:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(refused) == 1 and "one thread" in refused[0]
    engine.step()


def test_a_run_with_a_request_that_is_refused_leaves_nothing_running(engine):
    requests = [
        Request("good", (1, 2), SamplingParams(max_tokens=50)),
        Request("bad", (1,) * 10_000),
    ]
    with pytest.raises(CapacityError):
        list(engine.run(requests))
    assert list(engine.run()) == []
    assert_clean(engine)


def test_a_run_closed_early_leaves_nothing_running(engine):
    events = engine.run([Request("long", (1, 2), SamplingParams(max_tokens=100))])
    next(events)
    events.close()
    assert [e for e in engine.run() if e.id == "long"] == []
    assert_clean(engine)


def test_without_a_place_for_the_cache_it_goes_on_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with pytest.warns(UserWarning, match="not kept"):
        assert use_persistent_cache() is None


def test_the_cache_folder_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    folder = use_persistent_cache()
    jax.config.update("jax_compilation_cache_dir", before)
    assert folder == tmp_path / "cache" / "jaxstate" / "xla"
    assert os.stat(folder).st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer_norm_epsilon": 10**400}, {"time_step_limit": [0, 10**400]}, {"time_step_limit": [0, None]},
        {"eos_token_id": 3_000_000_000},
    ],
    ids=repr,
)  # fmt: skip
def test_a_config_with_numbers_that_cannot_be_is_refused_by_name(wrong):
    config = {
        "model_type": "mamba2", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 1,
        "head_dim": 64, "state_size": 16, "n_groups": 1, **wrong,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        parse_config(config, "config.json")


# What is refused, with nothing changed.


def refused(engine, r, kind, **fields):
    before = (engine.schedule, engine.stats.requests, dict(engine._progress), engine.backlog)
    with pytest.raises(kind) as caught:
        engine.submit(r)
    for name, value in fields.items():
        assert getattr(caught.value, name) == value
    assert before == (engine.schedule, engine.stats.requests, dict(engine._progress), engine.backlog)  # fmt: skip
    return str(caught.value)


def test_br94_an_id_in_use_is_refused_and_may_be_used_again_later(engine):
    engine.submit(request("a", prompt_of(9), 3))
    message = refused(engine, request("a", prompt_of(4), 3), RequestError, code="duplicate_id", param="id")  # fmt: skip
    assert "'a'" in message
    engine.step()
    refused(engine, request("a", prompt_of(4), 3), RequestError, code="duplicate_id")
    list(engine.run())
    again = request("a", prompt_of(4), 3)
    assert run_all(engine, [again])["a"].tokens == by_hand(again)


def test_inv08_br27_br95_a_prompt_without_room_is_refused_and_the_others_go_on(engine):
    good = [request("x", prompt_of(3), 4), request("z", prompt_of(4), 4)]
    engine.submit(good[0])
    for length in (256, 257, 5000):
        fields = {"request": "y", "need": length + 1, "capacity": 256, "unit": "tokens in a row"}
        message = refused(engine, request("y", prompt_of(length), 1), CapacityError, **fields)
        assert f"raise max_len from 256 to at least {length + 1}" in message
    done = run_all(engine, good[1:])
    assert set(done) == {"x", "z"} and all(done[r.id].tokens == by_hand(r) for r in good)


def test_br97_tokens_outside_the_vocabulary_and_empty_prompts_are_refused(engine):
    message = refused(engine, request("a", (1, VOCAB, 2)), RequestError, param="prompt")
    assert "token 13 is outside the vocabulary of 13" in message
    with pytest.raises(RequestError) as caught:
        request("a", ())
    assert caught.value.code == "empty_prompt"
    for bad in (-1, None, 1.0, "1", True, 2**31):
        with pytest.raises(RequestError, match="none negative"):
            request("a", (1, bad))


def test_stop_texts_without_a_tokenizer_are_refused(engine):
    refused(engine, request("a", (1, 2), stop=("x",)), RequestError, param="stop")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.0), ("temperature", -0.1),
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"), ("top_k", -1),
        ("top_k", 1.5), ("top_p", 0), ("top_p", 1.01), ("min_p", 1), ("min_p", -0.1), ("seed", -1),
        ("seed", 2**32), ("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop_ids", [-1]),
        ("stop_ids", ["1"]), ("stop_ids", list(range(9))), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused_where_it_is_made(param, value):
    with pytest.raises(RequestError, match=param) as caught:
        request("a", (1,), **{"max_tokens": 3, param: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_value", param)


def test_models_that_the_engine_cannot_run_are_refused():
    class Attention(ToyLM):
        def groups(self):
            leaves = super().groups()[0].leaves
            return (GroupSpec("kv", "attention", 1, leaves, block_size=4),)

    with pytest.raises(SpecError, match="group 'kv' is attention"):
        Engine(Attention(), SIZES)
    with pytest.raises(SpecError, match="9 end tokens; the engine compares at most 8"):
        Engine(ToyLM(ToyConfig(eos_token_ids=tuple(range(9)))), SIZES)
    with pytest.raises(
        SpecError, match=r"a pool of 10 blocks .* needs 64; raise blocks to at least 65"
    ):
        Engine(ToyLM(ToyConfig(paged_blocks=10)), SIZES)
    for sizes in ({"rows": 0}, {"max_len": 1.5}, {"chunk_tokens": 100}, {"decode_steps": True}):
        with pytest.raises(SpecError, match=next(iter(sizes))):
            Sizes(**sizes)


def test_an_id_as_the_engine_gives_itself_is_refused_and_the_others_go_on(engine):
    good, own = request("a", prompt_of(100), 4), holder_of(block_keys(prompt_of(100))[0])
    engine.submit(good)
    for name in ("\x00", f"{own} 1", f"{own} pin"):
        message = refused(engine, request(name, prompt_of(9), 3), RequestError, param="id")
        assert "as only the engine's own do" in message
    assert run_all(engine, [])["a"].tokens == by_hand(good)


def test_any_text_is_a_salt_even_one_that_is_no_valid_unicode(reusing):
    engine = reusing()
    for salt in ("\ud800", "\udc80", "ß", ""):
        for cached in (0, 64):
            (done,) = engine.completions(
                [dataclasses.replace(request("a", (1,) * 70, 3), cache_salt=salt)]
            )
            assert (done.cached_tokens, done.tokens) == (
                cached,
                by_hand(request("a", (1,) * 70, 3)),
            )


def test_what_goes_wrong_in_submitting_loses_no_request(engine, monkeypatch):
    good = request("a", prompt_of(9), 4)
    engine.submit(good)
    with monkeypatch.context() as patch:
        patch.setattr("jaxstate.scheduler.submit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert run_all(engine, [])["a"].tokens == by_hand(good)
