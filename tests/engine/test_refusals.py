"""What a caller may hand over, and what is refused with a name instead of going wrong later."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.compilation import use_persistent_cache
from jaxstate.errors import CapacityError, CheckpointError, JaxstateError, RequestError, SpecError
from jaxstate.models import parse_config
from jaxstate.request import Request, SamplingParams
from jaxstate.sizing import Sizes
from tests.engine.conftest import assert_clean
from tests.toy import continue_by_hand


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
