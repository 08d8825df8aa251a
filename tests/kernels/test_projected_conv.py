"""The projection with one token of the convolution in it, without a GPU: interpreted, and lowered for CUDA."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels import dispatch, mosaic
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic.config import (
    MatmulConfig,
    matmul_config,
    norms_within,
    projected_conv_config,
)
from tests.kernels.test_cases import check

INTERPRET = plgpu.InterpretGPUParams()
BF16 = {"dtype": "bfloat16", "state_dtype": "bfloat16"}


def case_of(rows: int, first: int, sizes: tuple[int, int, int, int], **more) -> Case:
    sizes_ = dict(zip("IODK", sizes, strict=True))
    return Case(
        "projected_conv_step", sizes_, (1,) * rows, **BF16, **more, options={"first": first}
    )


# Several turns before and after windows are asked for; rows past the last; split inputs; rows in two tiles.
CALLS = (
    (case_of(6, 64, (1280, 264, 128, 4)), MatmulConfig(64, 8, 1, 3)),
    (case_of(11, 128, (256, 384, 128, 3), absent=("conv_bias",)), MatmulConfig(64, 16, 2, 2)),
    (case_of(37, 0, (128, 192, 128, 2)), MatmulConfig(64, 32, 1, 1, 2)),
)
each_call = pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", ""))


def fused(operands, chosen, **options):
    options = {"activation": "silu", "config": chosen, "interpret": INTERPRET, **options}
    return mosaic.projected_conv_step(**{**operands, **options})


def apart(operands, chosen, interpret: object = INTERPRET):
    """The same in two launches."""
    operands = dict(operands)
    x, weight, first = (operands.pop(name) for name in ("x", "weight", "first"))
    y = mosaic.rows_matmul(x=x, weight=weight, dtype=x.dtype, config=chosen, interpret=interpret)
    conv = {"weight": operands.pop("conv_weight"), "bias": operands.pop("conv_bias")}
    columns = pk.Columns(y, first, conv["weight"].shape[1])
    inner, windows = mosaic.conv_step(
        x=columns, **conv, **operands, activation="silu", interpret=interpret
    )
    return y.at[:, first : first + columns.size].set(inner), windows


def bits(result):
    return [np.asarray(value).view(np.uint16) for value in result]


@each_call
def test_the_kernel_has_the_bits_of_product_and_convolution(case, chosen):
    operands = make_operands(case)
    chex.assert_trees_all_equal(bits(fused(operands, chosen)), bits(apart(operands, chosen)))


@each_call
def test_the_kernel_equals_the_loops(case, chosen):
    operands = make_operands(case)
    check(case, operands, fused(operands, chosen, activation=None))


def test_ids_outside_the_pool_touch_nobody():
    case, chosen = CALLS[0]
    operands = make_operands(case)
    windows = operands["windows"]
    blocks, channels = windows.shape[1], slice(64, 192)
    # Row 0 reads past the end, row 1 before the start; rows 2 and 4 write there.
    read, write = (np.array(operands[name]) for name in ("read_ids", "write_ids"))
    read[:2], write[:2] = (blocks, -1), np.setdiff1d(np.arange(1, blocks), [*read, *write])[:2]
    write[[2, 4]] = blocks + 1, -2
    operands |= {"read_ids": jnp.asarray(read), "write_ids": jnp.asarray(write)}
    y, after = fused(operands, chosen)
    assert np.isnan(y[:2, channels]).all() and np.isfinite(np.delete(y, channels, 1)).all()
    assert np.isfinite(y[[2, 4, 5], channels]).all() and not np.asarray(y[3, channels]).any()
    rest = np.setdiff1d(np.arange(blocks), write)
    assert np.asarray(after[-1, rest]).tobytes() == np.asarray(windows[-1, rest]).tobytes()
    assert np.asarray(after[:-1]).tobytes() == np.asarray(windows[:-1]).tobytes()


def test_a_rows_bits_do_not_depend_on_other_rows():
    case, chosen = CALLS[0]
    operands, own = make_operands(case), 1
    y, after = fused(operands, chosen)
    alone = jnp.full_like(operands["x"], jnp.nan).at[own].set(operands["x"][own])
    z, other = fused({**operands, "x": alone}, chosen)
    block = int(operands["write_ids"][own])
    chex.assert_trees_all_equal(bits((y[own], after[-1, block])), bits((z[own], other[-1, block])))


def test_the_kernel_differentiates_like_its_xla_twin():
    case, chosen = CALLS[1]
    operands = make_operands(case)
    windows = jax.random.normal(jax.random.key(0), operands["windows"].shape, jnp.bfloat16)

    def gradients(module, **own):
        def loss(x, windows):
            results = module.projected_conv_step(**{**operands, "x": x, "windows": windows}, **own)
            return sum(jnp.sum(jnp.sin(value.astype(jnp.float32))) for value in results)

        return jax.grad(loss, argnums=(0, 1))(operands["x"], windows)

    ours = gradients(mosaic, config=chosen, interpret=INTERPRET)
    theirs = gradients(dispatch.IMPLEMENTATIONS["xla"])
    # The cotangents come from outputs that are rounded apart.
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda v: v.astype(jnp.float32), both) for both in (ours, theirs)),
        rtol=0.05,
        atol=0.5,
    )


@pytest.mark.parametrize("rows", [3, 11])
def test_a_norm_has_the_bits_of_a_launch_before(rows):
    operands, chosen = make_operands(case_of(rows, 64, (512, 128, 64, 3))), CALLS[0][1]
    assert norms_within(3, 512, chosen) and not norms_within(8, 2560, chosen)
    x = 3 * jax.random.normal(jax.random.key(0), (rows, 512))
    scale = jnp.linspace(-1, 2, 512, dtype="bfloat16")
    if rows > 8:
        chosen = MatmulConfig(64, 16, 1, 3)
        assert not norms_within(rows, 512, chosen)
    before = mosaic.rms_norm(x=x, weight=scale, eps=0.1, interpret=INTERPRET)
    ours = fused({**operands, "x": x, "norm_weight": scale, "eps": 0.1}, chosen)
    chex.assert_trees_all_equal(bits(ours), bits(fused({**operands, "x": before}, chosen)))
    wide = pk.Columns(jnp.pad(x, ((0, 0), (8, 16)), constant_values=jnp.nan), 8, 512)
    columns = fused({**operands, "x": wide, "norm_weight": scale, "eps": 0.1}, chosen)
    chex.assert_trees_all_equal(bits(columns), bits(ours))


@pytest.mark.parametrize("implementation", dispatch.PORTABLE)
def test_norm_product_and_convolution_are_those_of_three_ops(implementation):
    operands = make_operands(case_of(5, 4, (24, 33, 16, 3)))
    first, run = operands.pop("first"), {"implementation": implementation}
    scale = jnp.linspace(-1, 2, 24, dtype="bfloat16")
    x = pk.rms_norm(operands["x"], scale, eps=0.1, **run)
    y = pk.rows_matmul(x, operands["weight"], dtype=x.dtype, **run)
    names = {"weight": "conv_weight", "bias": "conv_bias"}
    conv = {name: operands[of] for name, of in names.items()}
    rest = {name: operands[name] for name in ("windows", "layer", "read_ids", "write_ids")}
    inner, windows = pk.conv_step(pk.Columns(y, first, 16), **conv, **rest, **run)
    right = y.at[:, first : first + 16].set(inner), windows
    ours = pk.projected_conv_step(**operands, norm_weight=scale, first=first, eps=0.1, **run)
    chex.assert_trees_all_close(*(jax.tree.map(np.float32, v) for v in (ours, right)), rtol=2.0**-7)


# Lowering --------------------------------------------------------------------------------------


def shapes_of(rows: int, first: int, sizes: tuple[int, int, int, int], blocks: int = 9):
    inputs, features, channels, taps = sizes

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    ids = shape(rows, dtype=jnp.int32)
    return {
        "x": shape(rows, inputs), "weight": shape(features, inputs),
        "conv_weight": shape(taps, channels), "conv_bias": shape(channels),
        "windows": shape(3, blocks, taps - 1, channels), "layer": shape(dtype=jnp.int32),
        "read_ids": ids, "write_ids": ids, "first": first,
    }  # fmt: skip


def lowered(shapes, layers: int = 1, **options) -> str:
    """The text of a call for each layer, lowered for an NVIDIA GPU."""
    shapes = dict(shapes)
    options["first"] = shapes.pop("first")
    step = jax.jit(lambda operands: mosaic.projected_conv_step(**operands, **options))

    def steps(windows, operands):
        outputs = []
        for layer in range(layers):
            y, windows = step({**operands, "windows": windows, "layer": jnp.int32(layer)})
            outputs.append(y)
        return outputs, windows

    windows = shapes.pop("windows")
    traced = jax.jit(steps, donate_argnums=0).trace(windows, shapes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


# In_proj of Mamba 2.8B and Mamba-2 2.7B, of Mamba 130M, whose inputs are split, and of a head-parallel share.
MATRICES = (
    (0, (2560, 10240, 5120, 4)),
    (5120, (2560, 10576, 5376, 4)),
    (0, (768, 3072, 1536, 4)),
    (640, (2560, 1546 + 6, 896, 4)),
)


@pytest.mark.parametrize("rows", [1, 8, 20, 64])
@pytest.mark.parametrize("matrix", MATRICES, ids=repr)
def test_the_chosen_configuration_lowers_for_cuda_and_leaves_room_for_two_programs(matrix, rows):
    first, sizes = matrix
    shapes = shapes_of(rows, first, sizes)
    assert support.shape_reason("projected_conv_step", shapes) is None
    assert lowered(shapes, activation="silu").count("custom_call @mosaic_gpu_v2") == 1
    if rows == 1:  # normed within where a program has all inputs of its rows
        shapes["norm_weight"] = jax.ShapeDtypeStruct((sizes[0],), jnp.bfloat16)
        text = lowered(shapes | {"x": shapes["x"].update(dtype=jnp.float32)}, activation="silu")
        assert text.count("custom_call @mosaic_gpu_v2") == (1 if sizes[1] > 10000 else 2)
    chosen = projected_conv_config(rows, *shapes["weight"].shape, sizes[3])
    alone = matmul_config(rows, *shapes["weight"].shape)
    assert chosen == dataclasses.replace(alone, stages=chosen.stages)

    def pieces(config):
        return 2 * config.stages * config.chunk * 64 * (config.features + config.rows)

    windows = 2 * chosen.rows * chosen.features * (sizes[3] - 1) // chosen.split
    most = 112 if pieces(alone) <= 112 * 1024 else 226
    assert pieces(chosen) + windows <= most * 1024


@each_call
def test_every_configuration_lowers_for_cuda_in_place_and_once_for_all_layers(case, chosen):
    sizes = tuple(case.sizes[name] for name in "IODK")
    shapes = shapes_of(len(case.lengths), case.options["first"], sizes)
    text = lowered(shapes, layers=3, config=chosen)
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert "output_operand_alias" in call and text.count("tf.aliasing_output") == 1


def test_reasons_name_what_does_not_fit():
    def reason(rows=8, first=64, sizes=(64, 256, 128, 4), **dtypes):
        shapes = shapes_of(rows, first, sizes)
        for name, dtype in dtypes.items():
            shapes[name] = shapes[name].update(dtype=jnp.dtype(dtype))
        return str(support.shape_reason("projected_conv_step", shapes))

    assert reason() == "None"
    assert "64 features are all convolved or none, got 128 channels from 32 on" in reason(first=32)
    assert "got 96 channels from 64 on" in reason(sizes=(64, 256, 96, 4))
    assert "1 to 64 rows, got 65" in reason(rows=65)
    assert "windows of 2 to 8 taps, got 1" in reason(sizes=(64, 256, 128, 1))
    assert "dtype of x, bfloat16, and these are float32" in reason(windows="float32")
    assert "operands are bfloat16" in reason(x="float32", windows="float32")
