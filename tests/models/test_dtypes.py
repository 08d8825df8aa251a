"""What is kept in which dtype, and that nothing widens on the way."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.models import load_model
from pallas_kernels.rows import RowIds

from .driver import FIXTURES, ROWS, golden, model_of, new_cache, prefill

BOTH = ("mamba", "mamba2")
FLOAT32_LEAVES = {"A_log", "D", "dt_bias"}


def named_leaves(model):
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        yield [getattr(key, "name", getattr(key, "idx", None)) for key in path], leaf


def lowered_step(model):
    rows = RowIds(*2 * [jnp.zeros(ROWS, jnp.int32)])
    tokens = jnp.zeros(ROWS, jnp.int32)

    def step(model, cache):
        hidden, cache = model.decode(tokens, tokens, {"mamba": rows}, cache)
        return model.logits(hidden), cache

    return jax.jit(step).lower(model, new_cache(model)).as_text()


@pytest.mark.parametrize("variant", BOTH)
def test_recurrence_parameters_stay_float32(variant):
    for path, leaf in named_leaves(model_of(variant, "bfloat16")):
        wanted = jnp.float32 if FLOAT32_LEAVES & set(path) else jnp.bfloat16
        assert leaf.dtype == wanted, path


def test_dtype_none_is_float32_on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("the file's own dtype is kept on other devices")
    assert load_model(FIXTURES / "mamba2").dtype == jnp.float32


def test_dtype_none_is_the_files_own_on_a_gpu(monkeypatch, bfloat16_folder):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load_model(bfloat16_folder).dtype == jnp.bfloat16


def test_a_float32_model_keeps_bfloat16_matrices_as_they_are_and_computes_as_if_widened(
    bfloat16_folder,
):
    model = load_model(bfloat16_folder, "float32")
    matrices = {"in_proj", "out_proj", "embeddings", "head"}
    for path, leaf in named_leaves(model):
        assert leaf.dtype == (jnp.bfloat16 if matrices & set(path) else jnp.float32), path
    assert "in float32 (matrices in bfloat16)" in model.describe()
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    tokens = np.arange(1, 70)
    (ours,), (theirs,) = (prefill(m, new_cache(m), [(0, 1, tokens)])[0] for m in (model, wide))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    ours, theirs = (decode_logits(m) for m in (model, wide))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def decode_logits(model):
    rows = RowIds(*2 * [jnp.arange(1, ROWS + 1, dtype=jnp.int32)])
    tokens = jnp.arange(ROWS, dtype=jnp.int32)

    @jax.jit
    def step(model, cache):
        hidden, cache = model.decode(tokens, tokens, {"mamba": rows}, cache)
        hidden, cache = model.decode(tokens + 5, tokens, {"mamba": rows}, cache)
        return model.logits(hidden)

    return step(model, new_cache(model))


@pytest.mark.parametrize("variant", BOTH)
def test_state_is_float32_and_window_is_the_models(variant):
    (group,) = model_of(variant, "bfloat16").groups()
    assert group.leaves["ssm"].dtype == jnp.float32
    assert group.leaves["conv"].dtype == jnp.bfloat16
    (narrow,) = load_model(FIXTURES / variant, state_dtype=jnp.bfloat16).groups()
    assert narrow.leaves["ssm"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", BOTH)
def test_every_block_gives_back_the_dtype_it_got(variant, dtype, residual):
    model = model_of(variant, dtype)
    pools = new_cache(model).groups["mamba"]
    x = jax.ShapeDtypeStruct((ROWS, model.config.hidden_size), jnp.dtype(residual))
    rows = RowIds(*2 * [jax.ShapeDtypeStruct((ROWS,), jnp.int32)])
    block = model.blocks[0]
    own = block.mixer.constants()
    out, new = jax.eval_shape(lambda x, p, r: block.decode(x, p, 0, r, own), x, pools, rows)
    assert out.dtype == x.dtype
    assert jax.tree.map(lambda a: a.dtype, new) == jax.tree.map(lambda a: a.dtype, pools)
    normed = x.update(dtype=jnp.dtype(dtype))
    mixer = block.mixer
    mixed, _ = jax.eval_shape(lambda x, p, r: mixer.decode(x, p, 0, r, own), normed, pools, rows)
    assert mixed.dtype == normed.dtype


@pytest.mark.parametrize("variant", ["mamba", "mamba_untied_bias", "mamba2", "mamba2_groups"])
def test_no_weight_is_widened_for_its_matmul(variant):
    model = model_of(variant, "bfloat16")
    text = lowered_step(model)
    shapes = {
        leaf.shape
        for _, leaf in named_leaves(model)
        if leaf.ndim == 2 and leaf.dtype != jnp.float32
    }
    dots = re.findall(r"stablehlo\.dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
    weights = [right for _, right in dots if tuple(map(int, right.split("x")[:-1])) in shapes]
    assert len(weights) >= 3
    assert all(right.endswith("bf16") for right in weights)


@pytest.mark.parametrize("variant", ["mamba", "mamba_untied_bias", "mamba2"])
def test_float32_matmuls_are_not_rounded_on_the_way(variant):
    # A GPU would otherwise round their operands to 10 bits.
    dots = [line for line in lowered_step(model_of(variant)).splitlines() if "dot_general" in line]
    assert len(dots) >= 3
    assert all("HIGHEST" in line for line in dots)


@pytest.mark.parametrize("variant", ["mamba", "falcon_mamba", "mamba2_groups", "mamba2_limit"])
def test_bfloat16_chooses_like_float32(variant):
    model, numbers = model_of(variant, "bfloat16"), golden(variant)
    (logits,), _ = prefill(model, new_cache(model), [(0, 1, numbers["prompt_0"])])
    wanted = numbers["logits_0"]
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x, axis=-1)) for x in (wanted, logits))
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    assert divergence.mean() < 5e-3
    top = np.sort(wanted, axis=-1)
    clear = top[:, -1] - top[:, -2] > 0.2
    assert clear.sum() > 50
    assert (logits.argmax(-1) == wanted.argmax(-1))[clear].mean() > 0.97


@pytest.mark.parametrize("dtype", ["int8", "float64", "nonsense"])
def test_other_dtypes_are_refused(dtype):
    from jaxstate.errors import CheckpointError

    with pytest.raises(CheckpointError, match=f"{dtype}.*use float32, bfloat16 or float16"):
        load_model(FIXTURES / "mamba2", dtype)
