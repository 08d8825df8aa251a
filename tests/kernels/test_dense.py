"""The dense forms for training agree with the packed ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.xla.conv import causal_conv_dense
from pallas_kernels.xla.ssd import ssd_dense
from tests.kernels import loops

BATCH, LENGTH, SIZES = 2, 75, {"H": 4, "P": 3, "G": 2, "N": 5}


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def operands():
    rng, s = np.random.default_rng(0), SIZES
    x, raw = normal(rng, BATCH, LENGTH, s["H"], s["P"]), normal(rng, BATCH, LENGTH, s["H"])
    B, C = (normal(rng, BATCH, LENGTH, s["G"], s["N"]) for _ in "BC")
    return x, raw, -np.exp(normal(rng, s["H"])), B, C, normal(rng, BATCH, s["H"], s["P"], s["N"])


def packed_rows():
    none = np.zeros((BATCH, 0), int)
    return np.arange(BATCH + 1) * LENGTH, np.arange(1, BATCH + 1), np.arange(3, 5), none, none


def truth(x, raw, A, B, C, initial):
    pool = np.concatenate([np.full_like(initial[:1], np.nan), initial, initial])[None]
    flat = [v.reshape(-1, *v.shape[2:]) for v in (x, raw)]
    flat += [A] + [v.reshape(-1, *v.shape[2:]) for v in (B, C)]
    y, states = loops.ssd(*flat, None, None, pool, 0, packed_rows())
    return y.reshape(x.shape), states[0, 3:5]


@pytest.mark.parametrize("chunk", [1, 25, 64])
def test_dense_ssd_equals_the_loops(chunk):
    """75 chunks of one token are chained by a scan, few chunks by a matmul."""
    x, raw, A, B, C, initial = operands()
    dt = jax.nn.softplus(raw)
    dense = jax.jit(ssd_dense, static_argnames="chunk")
    y, final = dense(x, dt, A, B, C, initial=initial, chunk=chunk)
    wanted_y, wanted = truth(x, raw, A, B, C, initial)
    np.testing.assert_allclose(y, wanted_y, atol=2e-6 * np.abs(wanted_y).max())
    np.testing.assert_allclose(final, wanted, atol=2e-6 * np.abs(wanted).max())


def test_dense_ssd_keeps_the_dtype_of_its_input_and_float32_states():
    x, raw, A, B, C, initial = operands()
    x, B, C = (jnp.asarray(v, jnp.bfloat16) for v in (x, B, C))
    y, final = ssd_dense(x, jax.nn.softplus(raw), A, B, C, matmul_dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    wanted, _ = truth(*(np.asarray(v, np.float32) for v in (x, raw, A, B, C, 0 * initial)))
    error = np.linalg.norm(np.asarray(y, np.float32) - wanted) / np.linalg.norm(wanted)
    assert error < 0.01


@pytest.mark.parametrize("activation", [None, "silu"])
def test_dense_convolution_equals_the_loops(activation):
    rng = np.random.default_rng(1)
    x, weight, bias = normal(rng, BATCH, LENGTH, 6), normal(rng, 4, 6), normal(rng, 6)
    offsets, _, writes, *none = packed_rows()
    pool = np.full((1, 6, 3, 6), np.nan, np.float32)
    rows = (offsets, [0] * BATCH, writes, *none)
    wanted, _ = loops.causal_conv(x.reshape(-1, 6), weight, bias, pool, 0, rows, activation)
    y = jax.jit(causal_conv_dense, static_argnums=3)(x, weight, bias, activation)
    np.testing.assert_allclose(y, wanted.reshape(x.shape), atol=2e-6 * np.abs(wanted).max())
