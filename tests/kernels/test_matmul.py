"""Products of few rows and norms of rows: against float64, and lowered for CUDA."""

import re
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from jaxstate.models import Mamba2Config, MambaConfig, from_random
from jaxstate.models.layers import BATCH_ROWS, FEW_ROWS
from jaxstate.state import StateCache
from pallas_kernels import dispatch, mosaic
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic.config import (
    BatchMatmulConfig,
    MatmulConfig,
    batch_matmul_config,
    batch_matmul_fits,
    matmul_config,
    matmul_line,
)

INTERPRET = plgpu.InterpretGPUParams()
# The matrices of Mamba 2.8B and Mamba-2 2.7B.
MATRICES = ((10240, 2560), (10576, 2560), (192, 5120), (5120, 160), (2560, 5120), (50280, 2560))


class Product(NamedTuple):
    """A product; columns of the inputs' array before them, and more after, are NaN."""

    rows: int
    features: int
    inputs: int
    config: MatmulConfig | BatchMatmulConfig | None
    dtype: str = "bfloat16"
    residual: str | None = None
    first: int = 0


PRODUCTS = (
    Product(1, 80, 320, MatmulConfig(64, 8, 1, 3), dtype="float32"),
    Product(11, 136, 256, MatmulConfig(128, 16, 2, 2), residual="float32"),
    Product(20, 72, 160, MatmulConfig(64, 16, 1, 1, 5), first=16),
    Product(9, 64, 256, MatmulConfig(64, 16, 2, 1, 2), residual="bfloat16"),
    Product(100, 104, 256, BatchMatmulConfig(64, 40, 1, 3), dtype="float32"),
    Product(130, 72, 512, BatchMatmulConfig(128, 48, 2, 2), residual="float32"),
    Product(65, 64, 320, BatchMatmulConfig(128, 64, 1, 2), first=16),
    Product(66, 64, 128, None),
)


def make_product(case: Product, seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (case.rows, case.inputs), jnp.bfloat16)
    if case.first:
        around = (0, 0), (case.first, 8)
        wide = jnp.pad(x, around, constant_values=jnp.nan)
        x = pk.Columns(wide, case.first, case.inputs)
    weight = jax.random.normal(keys[1], (case.features, case.inputs), jnp.bfloat16)
    residual = None
    if case.residual:
        residual = jax.random.normal(keys[2], (case.rows, case.features), case.residual)
    return {"x": x, "weight": weight, "residual": residual}


def check_product(case: Product, operands, y):
    x, weight = (np.asarray(pk.sliced(operands[name]), np.float64) for name in ("x", "weight"))
    right, residual = x @ weight.T, operands["residual"]
    if residual is not None:
        right = right + np.asarray(residual, np.float64)
    chex.assert_shape(y, (case.rows, case.features))
    assert y.dtype == (case.residual or case.dtype)
    tolerance = 1e-6 if y.dtype == case.dtype == "float32" else 2.0**-8
    np.testing.assert_allclose(y, right, rtol=0, atol=tolerance * np.abs(right).max())


@pytest.mark.parametrize("case", PRODUCTS, ids=repr)
def test_a_kernel_equals_float64(case):
    operands = make_product(case)
    y = mosaic.rows_matmul(**operands, dtype=case.dtype, config=case.config, interpret=INTERPRET)
    check_product(case, operands, y)


@pytest.mark.parametrize("case", [PRODUCTS[1], PRODUCTS[5]], ids=repr)
def test_a_rows_bits_do_not_depend_on_other_rows(case):
    operands, own = make_product(case), case.rows // 2

    def row(x):
        y = mosaic.rows_matmul(
            **{**operands, "x": x}, dtype=case.dtype, config=case.config, interpret=INTERPRET
        )
        return np.asarray(y[own])

    alone = jnp.full_like(operands["x"], jnp.nan).at[own].set(operands["x"][own])
    np.testing.assert_array_equal(row(alone), row(operands["x"]))


@pytest.mark.parametrize("implementation", dispatch.PORTABLE)
@pytest.mark.parametrize("case", PRODUCTS, ids=repr)
def test_the_portable_products_equal_float64(case, implementation):
    operands = make_product(case)
    y = pk.rows_matmul(**operands, dtype=case.dtype, implementation=implementation)
    check_product(case, operands, y)


@pytest.mark.parametrize("implementation", dispatch.PORTABLE)
def test_a_product_in_another_dtype_than_its_operands_is_rounded_once(implementation):
    operands = make_product(Product(8, 80, 320, None))
    y = pk.rows_matmul(**operands, dtype="float16", implementation=implementation)
    right = np.asarray(operands["x"], np.float64) @ np.asarray(operands["weight"], np.float64).T
    np.testing.assert_allclose(np.asarray(y, np.float64), right, rtol=2.0**-11, atol=1e-5)


@pytest.mark.parametrize(("rows", "features", "inputs"), [(129, 14784, 2560), (256, 7168, 14336)])
def test_the_widest_matrices_of_many_rows_lower_for_cuda(rows, features, inputs):
    wide = shapes_of(rows, features, inputs, residual=True)
    assert support.shape_reason("rows_matmul", wide) is None
    call = jax.jit(lambda operands: mosaic.rows_matmul(**operands, dtype="bfloat16"))
    assert "mosaic_gpu" in call.trace(wide).lower(lowering_platforms=("cuda",)).as_text()


def make_norm(dtype: str, rows: int = 3, size: int = 384):
    keys = jax.random.split(jax.random.key(1))
    x = 3 * jax.random.normal(keys[0], (rows, size), dtype)
    return {"x": x, "weight": jax.random.normal(keys[1], (size,), jnp.bfloat16)}


def check_norm(operands, y):
    x, weight = (np.asarray(operands[name], np.float64) for name in ("x", "weight"))
    right = x / np.sqrt((x * x).mean(1, keepdims=True) + 0.1) * weight
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), right, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_equal_float64(dtype):
    operands = make_norm(dtype)
    check_norm(operands, mosaic.rms_norm(**operands, eps=0.1, interpret=INTERPRET))
    for implementation in dispatch.PORTABLE:
        check_norm(operands, pk.rms_norm(**operands, eps=0.1, implementation=implementation))


# Choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", [*MATRICES, (8, 32), (512, 64), (96, 4096)])
def test_a_matrix_is_split_the_same_way_for_any_number_of_rows(matrix):
    features, inputs = matrix
    splits = set()
    for rows in range(1, FEW_ROWS + 1):
        chosen, line = matmul_config(rows, features, inputs), matmul_line(inputs)
        assert inputs % (chosen.split * chosen.chunk * line) == 0
        assert chosen.features % 64 == chosen.rows % 8 == 0 and chosen.split <= 8
        # Two programs share a multiprocessor's 227 KB, unless each can have its own.
        tiles = -(-features // chosen.features) * -(-rows // chosen.rows)
        pieces = 2 * chosen.stages * chosen.chunk * line * (chosen.features + chosen.rows)
        assert pieces <= 113 * 1024 or tiles * chosen.split <= 132
        assert pieces + 8 * chosen.features * chosen.rows <= 227 * 1024
        splits.add(chosen.split)
    assert len(splits) == 1


@pytest.mark.parametrize("rows", [65, 128, 200, 256])
@pytest.mark.parametrize("matrix", MATRICES[:-1])
def test_products_of_many_rows_have_a_multiprocessor_for_each_program(matrix, rows):
    features, inputs = matrix
    if inputs % 64:
        return
    for residual in None, jnp.float32:
        check_places(rows, features, inputs, residual)


def check_places(rows, features, inputs, residual):
    chosen = batch_matmul_config(rows, features, inputs, residual)
    assert batch_matmul_fits(chosen, residual)
    tiles = -(-features // chosen.features) * -(-rows // chosen.rows)
    assert tiles * chosen.split <= 132
    assert inputs % (64 * chosen.split) == 0 == chosen.features % (8 * chosen.split)
    pieces = 128 * chosen.stages * (chosen.features + chosen.rows)
    own = chosen.features // chosen.split
    after = own * chosen.rows * (2 if chosen.split == 1 else 2 + 4 * chosen.split)
    kept = own * chosen.rows * (0 if residual is None else 4)
    assert max(pieces, after) + kept < 227 * 1024


def shapes_of(rows: int, features: int, inputs: int, residual: bool):
    bf16 = jnp.bfloat16
    kept = jax.ShapeDtypeStruct((rows, features), jnp.float32) if residual else None
    return {
        "x": jax.ShapeDtypeStruct((rows, inputs), bf16),
        "weight": jax.ShapeDtypeStruct((features, inputs), bf16),
        "residual": kept,
    }


@pytest.mark.parametrize("rows", [1, 8, 12, 20, 64, 128, 256])
@pytest.mark.parametrize("matrix", MATRICES, ids=repr)
def test_the_chosen_configuration_lowers_for_cuda(matrix, rows):
    shapes = shapes_of(rows, *matrix, residual=matrix[0] < matrix[1])
    reason = support.shape_reason("rows_matmul", shapes)
    if rows > FEW_ROWS and matrix in ((5120, 160), (50280, 2560)):
        assert f"of more than {FEW_ROWS} rows" in str(reason)  # XLA's product runs
        return
    assert reason is None
    call = jax.jit(lambda operands: mosaic.rows_matmul(**operands, dtype="float32"))
    text = call.trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("case", PRODUCTS, ids=repr)
def test_every_configuration_lowers_for_cuda(case):
    call = jax.jit(
        lambda operands: mosaic.rows_matmul(**operands, dtype=case.dtype, config=case.config)
    )
    text = call.trace(make_product(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu_v2" in text


SMALL = (
    MambaConfig(
        vocab_size=128, hidden_size=128, num_hidden_layers=3, intermediate_size=256,
        time_step_rank=64, state_size=16,
    ),
    Mamba2Config(
        vocab_size=128, hidden_size=128, num_hidden_layers=3, num_heads=8, head_dim=32,
        state_size=64,
    ),
)  # fmt: skip


@pytest.mark.parametrize("config", SMALL, ids=lambda config: config.model_type)
def test_a_models_decode_is_kernels_alone_lowered_once_for_all_layers(config, monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    monkeypatch.setattr(dispatch, "_chosen", {})
    model = jax.eval_shape(lambda: from_random(config, 0, jnp.bfloat16))
    (group,) = model.groups()

    def lowered(rows: int) -> str:
        leaves = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((3, rows + 1, *leaf.shape), leaf.dtype), group.leaves
        )
        ids = jax.ShapeDtypeStruct((rows,), jnp.int32)

        def step(model, cache, ids):
            hidden, cache = model.decode(ids, ids, {group.name: pk.RowIds(ids, ids)}, cache)
            return model.logits(hidden), cache

        # A preference of its own, so that nobody finds what was traced here.
        with pk.prefer("mosaic", "xla"):
            traced = jax.jit(step).trace(model, StateCache({group.name: leaves}), ids)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    few, more, many = lowered(8), lowered(FEW_ROWS + 1), lowered(BATCH_ROWS + 1)
    # Mamba: a layer's norm, three products, one with the convolution, state, last norm, head. Mamba-2: a norm more,
    # a product less. Of more rows the convolution and Mamba's step sizes are launches of their own, and one norm is
    # lowered for all places.
    for text, launches in (few, 7), (more, 8 if config.model_type == "mamba" else 7):
        assert len(re.findall("custom_call @mosaic_gpu_v2", text)) == launches, text
        assert "dot_general" not in text
    assert "dot_general" in many


def test_reasons_name_what_does_not_fit():
    def reason(rows=8, features=64, inputs=64, **dtypes):
        shapes = shapes_of(rows, features, inputs, residual=False)
        for name, dtype in dtypes.items():
            shapes[name] = shapes[name].update(dtype=jnp.dtype(dtype))
        return str(support.shape_reason("rows_matmul", {**shapes, "dtype": jnp.dtype("float32")}))

    assert reason() == "None"
    assert reason(rows=256) == "None" and "1 to 256 rows, got 257" in reason(rows=257)
    assert reason(inputs=96) == "None" and "got 96 and 64" in reason(rows=65, inputs=96)
    assert reason(features=50280) == "None" and "got 64 and 50280" in reason(65, 50280)
    assert "got 48 and 64" in reason(inputs=48) and "got 64 and 60" in reason(features=60)
    assert "operands are bfloat16, and these are float32 and bfloat16" in reason(x="float32")
    for rows, features, inputs in (
        (256, 8192, 16384),
        (256, 16384, 2560),
        (129, 14792, 2560),
        (65, 29576, 2560),
    ):
        wide = shapes_of(rows, features, inputs, residual=True)
        assert f"got {inputs} and {features}" in str(support.shape_reason("rows_matmul", wide))
    odd = shapes_of(8, 64, 64, residual=False)
    odd["x"] = pk.Columns(odd["x"].update(shape=(8, 100)), 16, 64)
    assert "multiple of 8 columns, and theirs has 100" in str(
        support.shape_reason("rows_matmul", {**odd, "dtype": jnp.dtype("float32")})
    )
    norm = {"x": SimpleNamespace(shape=(8, 96)), "weight": None, "eps": 0.0}
    assert "multiple of 128" in str(support.shape_reason("rms_norm", norm))
    norm["x"] = SimpleNamespace(shape=(257, 128))
    assert "1 to 256 rows, got 257" in str(support.shape_reason("rms_norm", norm))


def test_operands_that_do_not_fit_are_refused():
    x, weight = jnp.ones((2, 32)), jnp.ones((8, 32))
    with pytest.raises(
        ValueError, match=r"weight must have shape \[O, I\] = \[8, 32\], got \[8, 31\]"
    ):
        pk.rows_matmul(x, weight[:, 1:], dtype=x.dtype)
    with pytest.raises(ValueError, match=r"residual must have shape \[R, O\] = \[2, 8\]"):
        pk.rows_matmul(x, weight, x, dtype=x.dtype)
    with pytest.raises(TypeError, match="x must hold floating numbers"):
        pk.rows_matmul(x.astype(int), weight, dtype=x.dtype)
    with pytest.raises(ValueError, match=r"weight must have shape \[D\] = \[32\]"):
        pk.rms_norm(x, weight[0, 1:], eps=0.0)


def test_the_kernels_differentiate_like_their_xla_twins():
    case = PRODUCTS[1]
    operands = make_product(case)

    def gradients(module, **own):
        def loss(operands):
            y = module.rows_matmul(**operands, dtype=case.dtype, **own)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(operands)

    ours = gradients(mosaic, config=case.config, interpret=INTERPRET)
    theirs = gradients(dispatch.IMPLEMENTATIONS["xla"])
    # The cotangents come from outputs that are rounded apart.
    chex.assert_trees_all_close(
        jax.tree.map(lambda v: v.astype(jnp.float32), ours),
        jax.tree.map(lambda v: v.astype(jnp.float32), theirs),
        rtol=0.05,
        atol=0.5,
    )
