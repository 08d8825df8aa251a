"""Layers against values worked by hand, and what a model says of itself."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from jaxstate.models import Mamba2Config, from_random
from jaxstate.models.layers import FEW_ROWS, Embedding, GatedRMSNorm, RMSNorm, matmul
from jaxstate.models.layers import split as split_float32
from jaxstate.models.mamba2 import Mamba2Mixer
from pallas_kernels.rows import RowIds

from .driver import ROWS, model_of, new_cache


def with_weight(layer, weight, dtype=jnp.float32):
    return jax.tree.map(lambda _: jnp.asarray(weight, dtype), layer)


def test_rms_norm_by_hand():
    norm = with_weight(RMSNorm("n", 2, 0.0), [2.0, 10.0])
    # mean square of (3, 4) is 12.5
    wanted = np.array([[6.0, 40.0]]) / np.sqrt(12.5)
    chex.assert_trees_all_close(norm(jnp.array([[3.0, 4.0]])), wanted.astype(np.float32), rtol=1e-6)


def test_rms_norm_sums_in_float32_and_keeps_the_dtype_of_its_scale():
    norm = with_weight(RMSNorm("n", 4096, 0.0), np.ones(4096), jnp.bfloat16)
    x = jnp.full((1, 4096), 3e4, jnp.bfloat16)  # their squares alone pass what float16 can hold
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    assert (y == 1).all()
    assert norm(x.astype(jnp.float32)).dtype == jnp.bfloat16


def test_gated_norm_gates_first_and_norms_each_group():
    norm = with_weight(GatedRMSNorm("n", 4, 2, 0.0), [1.0, 2.0, 3.0, 4.0])
    x, gate = jnp.array([[1.0, 2.0, 30.0, 40.0]]), jnp.array([[1.0, -1.0, 2.0, 0.5]])
    silu = [v / (1 + np.exp(-v)) for v in (1.0, -1.0, 2.0, 0.5)]
    g = np.array([1.0, 2.0, 30.0, 40.0]) * silu
    halves = [g[:2] / np.sqrt((g[:2] ** 2).mean()), g[2:] / np.sqrt((g[2:] ** 2).mean())]
    wanted = np.concatenate(halves) * [1.0, 2.0, 3.0, 4.0]
    chex.assert_trees_all_close(norm(x, gate), wanted[None].astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("token", [-1, 3, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_nan_and_nobodys_vector(token):
    table = with_weight(Embedding("e", 3, 2), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    rows = table(jnp.array([2, token, 0]))
    assert np.isnan(rows[1]).all()
    chex.assert_trees_all_equal(rows[0], jnp.array([5.0, 6.0]))
    chex.assert_trees_all_equal(rows[2], jnp.array([1.0, 2.0]))


def test_three_bfloat16_parts_hold_all_of_a_float32():
    x = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    x *= np.float32(2.0) ** np.random.default_rng(1).integers(-30, 30, x.shape).astype(np.float32)
    parts = jax.jit(split_float32)(x)
    assert parts.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(np.asarray(parts, np.float64).sum(0), x.astype(np.float64))


@pytest.mark.parametrize("rows", [1, 8, FEW_ROWS, FEW_ROWS + 1])
def test_a_bfloat16_matrix_loses_nothing_beside_float32(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((96, 256)), jnp.bfloat16)
    truth = x.astype(np.float64) @ np.asarray(weight, np.float64).T
    y = jax.jit(matmul, static_argnums=2)(x, weight, jnp.float32)
    assert y.dtype == jnp.float32
    # A cast of x to bfloat16 is wrong by 3e-2 here.
    chex.assert_trees_all_close(np.asarray(y, np.float64), truth, rtol=0, atol=3e-5)


def test_sections_of_the_fused_projection():
    # d_inner 8, one group, state 4, two heads: rows z 8, x 8, B 4, C 4, dt 2
    config = Mamba2Config(
        vocab_size=5, hidden_size=4, num_hidden_layers=1, num_heads=2, head_dim=4, state_size=4
    )
    mixer = from_random(config).blocks[0].mixer
    assert mixer.in_proj.weight.shape == (26, 4)
    mixer.in_proj.weight[...] = jnp.zeros((26, 4)).at[:, 0].set(jnp.arange(26.0))
    gate, xbc, dt = (pk.sliced(part) for part in mixer._project(jnp.eye(4)[:1]))
    inner, B, C = (pk.sliced(part) for part in mixer._sections(xbc))
    chex.assert_trees_all_equal(
        [v.ravel().tolist() for v in (gate, inner, B, C, dt)],
        [
            list(map(float, range(*ends)))
            for ends in ((0, 8), (8, 16), (16, 20), (20, 24), (24, 26))
        ],
    )
    chex.assert_shape([inner, B, C], [(1, 2, 4), (1, 1, 4), (1, 1, 4)])


def test_tracing_costs_one_block_and_not_one_per_layer(monkeypatch):
    calls = []
    inner = Mamba2Mixer.decode
    monkeypatch.setattr(Mamba2Mixer, "decode", lambda *a: (calls.append(1), inner(*a))[1])
    config = Mamba2Config(
        vocab_size=5, hidden_size=24, num_hidden_layers=7, num_heads=3, head_dim=16, state_size=4
    )
    model = from_random(config)
    rows = {"mamba": RowIds(jnp.zeros(ROWS, jnp.int32), jnp.zeros(ROWS, jnp.int32))}
    tokens = jnp.zeros(ROWS, jnp.int32)
    jax.jit(lambda m, c: m.decode(tokens, tokens, rows, c)).trace(model, new_cache(model))
    assert len(calls) == 1


def test_a_model_describes_itself():
    model = model_of("mamba2")
    # a layer: 3 columns of 96 + 2 * 16 channels, and 6 heads of 16 x 16, all float32
    assert model.state_bytes == 3 * 4 * (3 * 128 + 6 * 16 * 16) == 23040
    text = "mamba2: 3 layers of 48, vocabulary 97, 54,054 parameters in float32, 22.5 KiB of state a sequence"
    assert model.describe() == text
    assert repr(model) == str(model) == f"Mamba2LM({text})"
    assert model.parameters == 54054
    assert model_of("falcon_mamba").describe().startswith("falcon_mamba: ")
