"""Gradients: equal to the reference's, to finite differences, and finite where decays vanish."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_kernels as pk
from pallas_kernels.cases import POOLS, Case, make_operands
from pallas_kernels.xla import selective
from pallas_kernels.xla.conv import causal_conv_dense
from pallas_kernels.xla.ssd import ssd_dense

MAMBA2 = {"H": 4, "P": 4, "G": 2, "N": 3}
CASES = [
    Case("causal_conv", {"D": 6, "K": 4}, (5, 2, 9), 0, 1, options={"activation": "silu"}),
    Case("selective_scan", {"D": 6, "N": 3}, (5, 2, 9), 0, 1),
    Case("ssd", MAMBA2, (5, 2, 9), 0, 1, options={"chunk": 4, "dt_limit": (0.2, 1.5)}),
    Case("ssd_step", MAMBA2, (1,) * 3),
    Case("projected_conv_step", {"I": 3, "O": 8, "D": 6, "K": 4}, (1,) * 3, options={"first": 1}),
]


def loss_of(case, implementation):
    """A weighted sum of outputs and states, as a function of all float operands."""
    operands = make_operands(case)
    pools = {k: jnp.nan_to_num(operands[k], nan=0.5) for k in POOLS if k in operands}
    operands |= pools
    floats = {k: v for k, v in operands.items() if hasattr(v, "dtype") and v.dtype == jnp.float32}
    rest = {k: v for k, v in operands.items() if k not in floats}

    def loss(floats):
        results = getattr(pk, case.op)(**floats, **rest, implementation=implementation)
        rng = np.random.default_rng(1)
        return sum(jnp.sum(r * rng.normal(size=r.shape).astype(np.float32)) for r in results)

    return jax.jit(jax.grad(loss)), floats


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_gradients_equal_the_references(case):
    (ours, floats), (truth, _) = loss_of(case, "xla"), loss_of(case, "reference")
    a, b = ours(floats), truth(floats)
    assert set(a) == set(b) >= {k for k in POOLS if k in floats}
    for name in a:
        scale = np.abs(b[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(a[name], b[name], atol=5e-6 * scale, err_msg=name)


def dense_operands(seed=0, length=11):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, dt = normal(2, length, 4, 3), jax.nn.softplus(normal(2, length, 4))
    A, B, C = -jnp.exp(normal(4)), normal(2, length, 2, 5), normal(2, length, 2, 5)
    return x, dt, A, B, C, normal(2, 4, 3, 5)


def test_dense_ssd_gradients_equal_finite_differences():
    def f(x, dt, A, B, C, initial):
        y, final = ssd_dense(x, dt, A, B, C, initial=initial, chunk=4)
        return jnp.sin(y).sum() + jnp.cos(final).sum()

    check_grads(jax.jit(f), dense_operands(), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@functools.cache
def dense_gradients(matmul_dtype):
    def f(args, scale):
        x, dt, A, B, C, initial = args
        y, final = ssd_dense(
            x, scale * dt, A, B, C, initial=initial, chunk=4, matmul_dtype=matmul_dtype
        )
        return jnp.sum(y**2) + jnp.sum(final**2)

    return jax.jit(jax.grad(f))


@pytest.mark.parametrize("matmul_dtype", [None, jnp.bfloat16])
def test_br120_dense_ssd_gradients_are_finite_whatever_the_decay(matmul_dtype):
    for scale in (1e-6, 1.0, 50.0, 1e4):
        grads = dense_gradients(matmul_dtype)(dense_operands(), scale)
        assert all(bool(jnp.isfinite(g).all()) for g in grads)
        assert all(bool(jnp.any(g != 0)) for g in (grads[0], grads[3], grads[4]))


def test_low_precision_matmuls_change_gradients_little():
    low, full = (dense_gradients(dtype)(dense_operands(), 1.0) for dtype in (jnp.bfloat16, None))
    for a, b in zip(low, full, strict=True):
        assert a.dtype == b.dtype
        assert 0 < jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.02


def test_dense_convolution_gradients_equal_finite_differences():
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(2, 7, 3), (4, 3), (3,)]
    )

    def f(x, weight, bias):
        return jnp.sum(jnp.sin(causal_conv_dense(x, weight, bias, "silu")))

    check_grads(jax.jit(f), (x, weight, bias), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_mamba1_chunk_gradients_equal_those_of_tokens():
    """The variant for GPUs against the one for CPUs."""
    case = Case("selective_scan", {"D": 6, "N": 3}, (5, 70, 2), 0, 1)
    o = make_operands(case)
    rows = o["rows"]._replace(write_ids=jnp.asarray([1, 2, 3], jnp.int32))
    initial = jnp.asarray(np.random.default_rng(2).normal(size=(3, 3, 6)), jnp.float32)
    args = (o["x"], jax.nn.softplus(o["dt"]), o["A"].T, o["B"], o["C"], initial)

    def grads(scan):
        def f(*args):
            return sum(jnp.sum(jnp.sin(v)) for v in scan(*args, rows))

        return jax.jit(jax.grad(f, argnums=range(6)))(*args)

    for a, b in zip(grads(selective.scan_chunks), grads(selective.scan_tokens), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * np.abs(b).max())
