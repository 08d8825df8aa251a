"""Products of few rows and norms of rows on an NVIDIA GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import mosaic
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import support
from tests.kernels.test_matmul import (
    MATRICES,
    PRODUCTS,
    Product,
    check_norm,
    check_product,
    make_norm,
    make_product,
)
from tests.kernels.test_projected_conv import MATRICES as CONVOLVED
from tests.kernels.test_projected_conv import apart, bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    reason = support.device_reason()
    if reason is not None:
        pytest.skip(f"the kernels decline: {reason}")


@pytest.mark.parametrize("case", PRODUCTS, ids=repr)
def test_a_kernel_equals_float64(case):
    operands = make_product(case)
    y = mosaic.rows_matmul(**operands, dtype=case.dtype, config=case.config)
    check_product(case, operands, y)


@pytest.mark.parametrize("rows", [1, 8, 20, 64, 100, 200, 256])
@pytest.mark.parametrize("matrix", MATRICES[:-1], ids=repr)
def test_rows_have_the_same_bits_in_any_company(matrix, rows):
    kernel = rows <= 64 or matrix[1] % 64 == 0  # else XLA's product runs
    case = Product(rows, matrix[0], matrix[1], None, residual="float32")
    operands = make_product(case)
    call = jax.jit(lambda x: pk.rows_matmul(**{**operands, "x": x}, dtype=case.dtype))
    assert ("mosaic_gpu" in call.lower(operands["x"]).as_text()) == kernel
    y, own = call(operands["x"]), rows // 2
    check_product(case, operands, y)
    alone = jnp.full_like(operands["x"], jnp.nan).at[own].set(operands["x"][own])
    np.testing.assert_array_equal(np.asarray(call(alone)[own]), np.asarray(y[own]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_equal_float64(dtype):
    operands = make_norm(dtype, rows=64, size=2560)
    check_norm(operands, pk.rms_norm(**operands, eps=0.1, implementation="mosaic"))


@pytest.mark.parametrize("rows", [1, 8, 20, 64])
@pytest.mark.parametrize("matrix", CONVOLVED, ids=repr)
def test_a_projection_with_a_convolution_has_the_bits_of_both(matrix, rows):
    (first, sizes), half = matrix, {"dtype": "bfloat16", "state_dtype": "bfloat16"}
    sizes = dict(zip("IODK", sizes, strict=True))
    case = Case("projected_conv_step", sizes, (1,) * rows, **half, options={"first": first})
    operands = make_operands(case)
    arrays = {name: value for name, value in operands.items() if name != "first"}
    options = {"first": first, "eps": 0.1, "activation": "silu"}
    call = jax.jit(lambda arrays: pk.projected_conv_step(**arrays, **options))
    assert call.lower(arrays).as_text().count("mosaic_gpu_v2") == 1
    together = call(arrays)
    for ours, theirs in zip(bits(together), bits(apart(operands, None, None)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # And with the norm before them, which is part of the launch for few rows.
    scale = jnp.linspace(-1, 2, sizes["I"], dtype="bfloat16")
    x = 3 * jax.random.normal(jax.random.key(0), arrays["x"].shape)
    operands["x"] = pk.rms_norm(x, scale, eps=0.1, implementation="mosaic")
    together = call(arrays | {"x": x, "norm_weight": scale})
    for ours, theirs in zip(bits(together), bits(apart(operands, None, None)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
