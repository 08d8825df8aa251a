"""Folders that load, folders that are refused, and what the refusal says."""

import json
import re

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxstate.errors import CheckpointError
from jaxstate.models import from_random, load, load_model, save_model

from .driver import FIXTURES, VARIANTS, golden, model_of, new_cache, prefill


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def assert_same_bits(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


# --- what loads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_loading_and_saving_gives_every_bit_back(variant, tmp_path):
    save_model(model_of(variant), tmp_path / "out")
    original = load_file(FIXTURES / variant / "model.safetensors")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), original)
    again = load_model(tmp_path / "out")
    assert again.config == model_of(variant).config
    chex.assert_trees_all_equal(again, model_of(variant))


def test_bfloat16_round_trip(bfloat16_folder, tmp_path):
    model = load_model(bfloat16_folder, "bfloat16")
    save_model(model, tmp_path / "out")
    assert_same_bits(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(bfloat16_folder / "model.safetensors"),
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_are_the_files_numbers():
    mamba, mamba2 = (load_file(FIXTURES / v / "model.safetensors") for v in ("mamba", "mamba2"))
    block = model_of("mamba").blocks[1].mixer
    name = "backbone.layers.1.mixer."
    assert (mamba[name + "A_log"] < 0).any()  # a second logarithm of these would be NaN
    chex.assert_trees_all_equal(np.asarray(block.A_log[...]), mamba[name + "A_log"])
    chex.assert_trees_all_equal(np.asarray(block.dt_bias[...]), mamba[name + "dt_proj.bias"])
    chex.assert_trees_all_equal(
        np.asarray(block.in_proj.weight[...]), mamba[name + "in_proj.weight"]
    )
    chex.assert_trees_all_equal(
        np.asarray(block.conv1d.weight[...]), mamba[name + "conv1d.weight"][:, 0].T
    )
    block = model_of("mamba2").blocks[2].mixer
    name = "backbone.layers.2.mixer."
    for ours in ("A_log", "D", "dt_bias"):
        chex.assert_trees_all_equal(np.asarray(getattr(block, ours)[...]), mamba2[name + ours])


def test_parameters_do_not_share_memory_with_the_file(folder):
    made = folder()
    path = made.write()
    model = load_model(path)
    size = (path / "model.safetensors").stat().st_size
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    chex.assert_trees_all_equal(model, model_of("mamba2"))


def test_sharded_equals_single(folder):
    made = folder()
    made.write_shards()
    chex.assert_trees_all_equal(load_model(made.path), model_of("mamba2"))


def test_the_index_decides_and_stray_files_are_left_alone(folder):
    made = folder()
    where = made.write_shards()
    name = "backbone.norm_f.weight"
    other = next(file for file in where.values() if file != where[name])
    wrong = load_file(made.path / other) | {name: made.weights[name] + 1}
    save_file(wrong, made.path / other)
    save_file({k: v * 0 for k, v in made.weights.items()}, made.path / "model.safetensors")
    save_file({"stray": np.ones(3, np.float32)}, made.path / "extra.safetensors")
    chex.assert_trees_all_equal(load_model(made.path), model_of("mamba2"))


def test_tied_and_untied_heads():
    assert model_of("mamba").head is None
    untied = model_of("mamba_untied_bias")
    weights = load_file(FIXTURES / "mamba_untied_bias" / "model.safetensors")
    chex.assert_trees_all_equal(np.asarray(untied.head.weight[...]), weights["lm_head.weight"])


def test_a_tied_head_may_lie_in_the_file_twice_if_it_is_the_same(folder):
    made = folder()
    made.weights["lm_head.weight"] = made.weights["backbone.embeddings.weight"].copy()
    chex.assert_trees_all_equal(load_model(made.write()), model_of("mamba2"))
    made.weights["lm_head.weight"][5, 3] += 1
    refused(made.write(), "lm_head.weight differs from backbone.embeddings.weight", "ties")


@pytest.mark.parametrize("written", ['{"__float__": "Infinity"}', "Infinity"])
def test_infinite_limits_as_they_are_written(folder, written):
    made = folder()
    path = made.write()
    text = json.dumps({**made.config, "time_step_limit": [0.0, "INF"]})
    (path / "config.json").write_text(text.replace('"INF"', written))
    assert load_model(path).config.time_step_limit == (0.0, float("inf"))


def test_end_tokens(folder):
    assert model_of("mamba_untied_bias").config.eos_token_ids == (3, 5)
    made = folder()
    path = made.write()
    assert load_model(path).config.eos_token_ids == (3,)
    (path / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert load_model(path).config.eos_token_ids == (4, 3)
    (path / "generation_config.json").write_text("{}")
    made.config["eos_token_id"] = None
    assert load_model(made.write()).config.eos_token_ids == ()


def test_a_million_layers_are_refused_before_they_are_described(folder, monkeypatch):
    made = folder()
    made.config["num_hidden_layers"] = 10**6
    monkeypatch.setattr(load, "_blueprint", lambda *_: pytest.fail("described"))
    refused(made.write(), "num_hidden_layers 1000000", f"{len(made.weights)} tensors")


def test_intermediate_size_wins_over_expand():
    config = json.loads((FIXTURES / "falcon_mamba" / "config.json").read_text())
    assert config["expand"] * config["hidden_size"] != config["intermediate_size"] == 96
    assert model_of("falcon_mamba").config.intermediate_size == 96


# --- the first layout ---------------------------------------------------------------------------


def first_layout(made, layer, **options):
    """Turns a folder into the first layout: its config's words, its embedding's name, a head beside the tied one."""
    c = made.config
    ssm = {
        "layer": layer,
        "d_state": c["state_size"],
        "d_conv": c["conv_kernel"],
        "expand": c["expand"],
        **options,
    }
    made.config = {
        "d_model": c["hidden_size"], "n_layer": c["num_hidden_layers"], "vocab_size": c["vocab_size"],
        "ssm_cfg": ssm, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 1, "tie_embeddings": c["tie_word_embeddings"],
        "attn_layer_idx": [], "attn_cfg": {}, "d_intermediate": 0,
    }  # fmt: skip
    made.weights["backbone.embedding.weight"] = made.weights.pop("backbone.embeddings.weight")
    if made.config["tie_embeddings"]:
        made.weights["lm_head.weight"] = made.weights["backbone.embedding.weight"].copy()
    return made


@pytest.mark.parametrize(
    ("variant", "layer", "options"),
    [
        ("mamba", "Mamba1", {"dt_rank": "auto"}),
        ("mamba2", "Mamba2", {"headdim": 16, "chunk_size": 256}),
        ("mamba2_groups", "Mamba2", {"headdim": 16, "ngroups": 2}),
        (
            "mamba2_limit",
            "Mamba2",
            {"headdim": 16, "dt_limit": [0.3, 0.8], "bias": True, "conv_bias": False},
        ),
    ],
)
def test_first_layout_equals_the_published_one(folder, variant, layer, options):
    model = load_model(first_layout(folder(variant), layer, **options).write())
    chex.assert_trees_all_equal(jax.tree.leaves(model), jax.tree.leaves(model_of(variant)))
    config = model_of(variant).config
    assert model.config.to_json() | {"eos_token_id": 3} == config.to_json()


def test_first_layout_without_a_layer_is_mamba1_and_pads_its_vocabulary(folder):
    made = first_layout(folder("mamba"), "Mamba1")
    del made.config["ssm_cfg"]["layer"]
    made.config["pad_vocab_size_multiple"] = 8
    for name in ("backbone.embedding.weight", "lm_head.weight"):
        made.weights[name] = np.pad(made.weights[name], ((0, 7), (0, 0)))
    model = load_model(made.write())
    assert model.config.vocab_size == 104
    numbers = golden("mamba")
    (logits,), _ = prefill(model, new_cache(model), [(0, 1, numbers["prompt_2"])])
    chex.assert_trees_all_close(logits[:, :97], numbers["logits_2"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"d_intermediate": 64}, "d_intermediate"),
        ({"rms_norm": False}, "rms_norm"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer is 'Mamba3'"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "ssm_cfg.norm_before_gate"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "ssm_cfg.D_has_hdim"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "ssm_cfg.d_ssm"),
        ({"ssm_cfg": {"twist": 2}}, "ssm_cfg.twist"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 0}}, "ssm_cfg.headdim is 0"),
        ({"ssm_cfg": {"expand": "two"}}, "ssm_cfg.expand is 'two'"),
        ({"ssm_cfg": [16]}, "ssm_cfg is [16]"),
        ({"d_model": None}, "d_model is None"),
    ],
)
def test_first_layout_options_that_change_the_computation_are_refused(folder, change, word):
    made = first_layout(folder("mamba"), "Mamba1")
    made.config |= change
    refused(made.write(), word)


# --- refusals: the folder -----------------------------------------------------------------------


def test_no_folder_no_config_no_weights(folder, tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a folder", "nothing is downloaded")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no config.json")
    path = folder().write()
    (path / "model.safetensors").rename(path / "weights.safetensors")
    refused(path, "neither model.safetensors nor", "weights.safetensors")


def test_a_pickle_is_not_opened(folder):
    path = folder().write()
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(path, "pytorch_model.bin", "can run code", "weights_only=True", "save_file")


def test_missing_shards_are_all_named_before_any_parameter_exists(folder, monkeypatch):
    made = folder()
    where = made.write_shards(4)
    files = sorted(set(where.values()))
    for name in (files[1], files[3]):
        (made.path / name).unlink()

    def fail(*_):
        raise AssertionError("a parameter was made")

    monkeypatch.setattr("jaxstate.models.tensors.Tensor.kept", fail)
    refused(made.path, "lacks 2 of the 4 files", files[1], files[3])


def test_an_index_that_names_what_is_not_there(folder):
    made = folder()
    where = made.write_shards()
    name, file = "backbone.norm_f.weight", "model-00001-of-00003.safetensors"
    other = next(f for f in where.values() if f != where[name])
    made.write_index(where | {name: other, "ghost": file})
    refused(
        made.path, "named by the index but not in their files (2)", f"{name} ({other})", "ghost"
    )
    made.write_index(where | {name: "../elsewhere.safetensors"})
    refused(made.path, "outside its folder", "../elsewhere.safetensors")
    for nothing in ({}, [], {name: 3}):
        made.write_index(nothing)
        refused(made.path, "no weight_map")


@pytest.mark.parametrize("size", [4, 100, 20_000])
def test_a_file_cut_short(folder, size):
    path = folder().write()
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:size])
    refused(path, "not a whole safetensors file", "fetch it again")


def test_unreadable_json(folder):
    path = folder().write()
    (path / "config.json").write_text('{"model_type": "mamba2"')
    refused(path, "config.json cannot be read as JSON")
    (path / "config.json").write_text("[]")
    refused(path, "is not a JSON object")


# --- refusals: the tensors ----------------------------------------------------------------------


def test_missing_and_surplus_tensors_are_named_and_counted(folder):
    made = folder()
    gone = [name for name in made.weights if name.endswith(("A_log", "D", "dt_bias"))]
    for name in gone:
        del made.weights[name]
    made.weights["backbone.layers.3.norm.weight"] = np.ones(48, np.float32)
    message = refused(made.write(), "missing (9)", "and 4 more", "not part of this model (1)")
    assert "backbone.layers.3.norm.weight" in message
    assert len(re.findall(r"mixer\.(?:A_log|D|dt_bias)", message)) == 5


def test_an_untied_head_must_be_there(folder):
    made = folder("mamba2_groups")
    del made.weights["lm_head.weight"]
    refused(made.write(), "missing (1): lm_head.weight")


@pytest.mark.parametrize("rows", [231, 229])
def test_a_fused_projection_of_another_size(folder, rows):
    made = folder()
    name = "backbone.layers.1.mixer.in_proj.weight"
    # z 96, x 96, B 16, C 16, dt 6
    assert made.weights[name].shape == (2 * 96 + 2 * 16 + 6, 48)
    made.weights[name] = np.zeros((rows, 48), np.float32)
    refused(made.write(), "of another shape (1)", f"{name} is [{rows}, 48], needed [230, 48]")


def test_a_transposed_matrix_is_another_shape(folder):
    made = folder()
    name = "backbone.layers.0.mixer.out_proj.weight"
    made.weights[name] = made.weights[name].T.copy()
    refused(made.write(), f"{name} is [96, 48], needed [48, 96]")


def test_whole_numbers_and_doubles_are_not_weights(folder):
    made = folder()
    a, b = "backbone.norm_f.weight", "backbone.layers.0.mixer.out_proj.weight"
    made.weights[a] = made.weights[a].astype(np.float64)
    made.weights[b] = made.weights[b].astype(np.int8)
    refused(made.write(), "of a dtype other than F32, BF16, F16 (2)", f"{a} is F64", f"{b} is I8")


def test_the_embedding_under_both_names(folder):
    made = folder()
    made.weights["backbone.embedding.weight"] = made.weights["backbone.embeddings.weight"]
    refused(made.write(), "backbone.embeddings.weight is there twice")


# --- refusals: the config -----------------------------------------------------------------------


def test_an_unknown_family_names_those_supported(folder):
    made = folder()
    made.config["model_type"] = "rwkv7"
    refused(made.write(), "model_type is 'rwkv7'", "falcon_mamba, mamba, mamba2")


@pytest.mark.parametrize("model_type", [None, ["mamba"]])
def test_a_family_that_is_not_a_name(folder, model_type):
    made = folder()
    made.config["model_type"] = model_type
    refused(made.write(), "supported: falcon_mamba, mamba, mamba2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
        ({"rms_norm": False}, ["rms_norm is False"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"num_heads": 7}, ["expand * hidden_size is 96 but num_heads * head_dim is 112"]),
        ({"n_groups": 4}, ["num_heads 6 is not a multiple of n_groups 4"]),
        ({"time_step_limit": [0.8, 0.3]}, ["time_step_limit is [0.8, 0.3]"]),
        ({"time_step_limit": [0.1]}, ["time_step_limit is [0.1]"]),
        ({"state_size": 0}, ["state_size is 0", "at least 1"]),
        ({"conv_kernel": 1}, ["conv_kernel is 1", "at least 2"]),
        ({"hidden_size": "48"}, ["hidden_size is '48'"]),
        ({"use_bias": 1}, ["use_bias is 1", "true or false"]),
        ({"eos_token_id": -1}, ["eos_token_id is -1"]),
        ({"layer_norm_epsilon": None}, ["layer_norm_epsilon is None"]),
        ({"num_heads": True, "vocab_size": 0}, ["num_heads is True", "vocab_size is 0"]),
    ],
    ids=str,
)
def test_fields_that_are_wrong_or_not_supported(folder, change, words):
    made = folder()
    made.config |= change
    refused(made.write(), "config.json", *words)


def test_fields_that_are_missing(folder):
    made = folder()
    del made.config["state_size"], made.config["num_heads"]
    refused(made.write(), "state_size is missing", "num_heads is missing")


def test_a_folder_with_a_model_is_not_written_over(folder):
    path = folder().write()
    with pytest.raises(CheckpointError, match=r"already has config\.json and model"):
        save_model(model_of("mamba2"), path)


# --- random models ------------------------------------------------------------------------------


def test_random_models_depend_on_the_seed_alone(tmp_path):
    config = model_of("mamba2_groups").config
    first, again, other = (from_random(config, seed, "bfloat16") for seed in (1, 1, 2))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(
        first.blocks[0].mixer.in_proj.weight[...], other.blocks[0].mixer.in_proj.weight[...]
    )
    assert not np.array_equal(
        first.blocks[0].mixer.in_proj.weight[...], first.blocks[1].mixer.in_proj.weight[...]
    )
    assert first.blocks[0].mixer.A_log[...].dtype == np.float32
    save_model(first, tmp_path / "random")
    chex.assert_trees_all_equal(load_model(tmp_path / "random", "bfloat16"), first)


def test_random_recurrences_start_where_the_papers_say():
    mamba = from_random(model_of("mamba").config).blocks[0].mixer
    chex.assert_trees_all_close(
        np.exp(mamba.A_log[...]),
        np.broadcast_to(np.arange(1, 9, dtype=np.float32), (96, 8)),
        rtol=1e-6,
    )
    for mixer in (mamba, from_random(model_of("mamba2").config).blocks[0].mixer):
        step = np.log1p(np.exp(np.asarray(mixer.dt_bias[...], np.float64)))
        assert (step >= 0.99e-3).all() and (step <= 0.101).all() and step.std() > 0
        assert (np.asarray(mixer.D[...]) == 1).all()
    decay = np.exp(from_random(model_of("mamba2").config).blocks[0].mixer.A_log[...])
    assert decay.min() >= 1 and decay.max() <= 16 and decay.std() > 0
