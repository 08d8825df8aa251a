"""The Mosaic convolution of packed rows without a GPU: interpreted, and lowered for CUDA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import Columns, Rows, mosaic
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic.config import CausalConvConfig, causal_conv_config
from pallas_kernels.mosaic.packed_conv import NULL, tile_table
from tests.kernels.test_cases import check

INTERPRET = plgpu.InterpretGPUParams()
SIZES = {"D": 128, "K": 4}
SILU = {"activation": "silu"}
CALLS = (
    # Row 0 starts fresh and is shorter than its window, 1 continues in place and is empty, 2 forks, 3 is null, 4 starts
    # fresh, 5 continues in place, shorter than its window; then the padding, all NaN.
    (
        Case("causal_conv", SIZES, (1, 0, 18, 5, 16, 2), 6, 3, options=SILU),
        CausalConvConfig(1, 8, 8),
    ),
    (
        Case(
            "causal_conv",
            {"D": 256, "K": 2},
            (2, 1, 19),
            0,
            0,
            "bfloat16",
            "bfloat16",
            absent=("bias",),
        ),
        CausalConvConfig(2, 16, 4),
    ),
)


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_the_convolution_equals_the_loops(case, chosen):
    operands = make_operands(case)
    check(case, operands, mosaic.causal_conv(**operands, config=chosen, interpret=INTERPRET))


def test_columns_are_read_where_they_stand_and_strays_touch_nobody():
    """Row 0 reads past the pool, row 1 before it, rows 2 and 3 write there, where 3 has a stray checkpoint too."""
    case = Case("causal_conv", SIZES, (5, 9, 3, 4), 0, 1)
    operands = make_operands(case)
    rows, before = operands["rows"], np.asarray(operands["windows"])
    blocks = before.shape[1]
    rows = rows._replace(
        read_ids=jnp.asarray([blocks, -1, 0, 0], jnp.int32),
        write_ids=jnp.asarray([1, 2, blocks, -3], jnp.int32),
        checkpoint_ids=jnp.asarray([[0], [3], [4], [-1]], jnp.int32),
        checkpoint_positions=jnp.asarray([[1], [9], [3], [2]], jnp.int32),
    )
    x = operands["x"]
    noise = jnp.full((x.shape[0], 8), jnp.nan)
    wide = Columns(jnp.concatenate([noise, x, noise], axis=1), 8, x.shape[1])
    y, after = mosaic.causal_conv(
        **{**operands, "x": wide, "rows": rows},
        config=CausalConvConfig(1, 8, 8),
        interpret=INTERPRET,
    )
    y, after, x = np.asarray(y), np.asarray(after), np.asarray(x)
    seen = np.zeros(len(x), bool)
    seen[[0, 1, 2, 5, 6, 7]] = True  # the tokens whose taps reach into a window that is not there
    assert np.isnan(y[seen]).all() and np.isfinite(y[~seen]).all()
    np.testing.assert_array_equal(after[-1, 1], x[2:5])
    np.testing.assert_array_equal(after[-1, 2], x[11:14])
    np.testing.assert_array_equal(after[-1, 3], x[11:14])
    np.testing.assert_array_equal(after[-1, 4], x[14:17])
    rest = np.setdiff1d(np.arange(blocks), [1, 2, 3, 4])
    assert after[-1, rest].tobytes() == before[-1, rest].tobytes()
    assert after[:-1].tobytes() == before[:-1].tobytes()


def test_every_token_is_in_one_tile_of_its_own_row():
    rng = np.random.default_rng(0)
    table = jax.jit(tile_table, static_argnums=(1, 2))
    for _ in range(50):
        lengths = rng.integers(0, 40, 5) * rng.integers(0, 2, 5)
        offsets = rng.integers(0, 9) + np.concatenate([[0], np.cumsum(lengths)])
        writes = rng.integers(0, 3, 5)
        ids, none = jnp.asarray(writes, jnp.int32), jnp.zeros((5, 0), jnp.int32)
        rows = Rows(jnp.asarray(offsets, jnp.int32), ids, ids, none, none)
        owner = np.full(256, NULL - 1)
        for row, start, size in np.asarray(table(rows, 256, 8)):
            assert 0 <= size <= 8 and (owner[start : start + size] == NULL - 1).all()
            owner[start : start + size] = row
            if row != NULL and size:
                assert (start - offsets[row]) % 8 == 0
        expected = np.full(256, NULL)
        for row, write in enumerate(writes):
            if write:
                expected[offsets[row] : offsets[row + 1]] = row
        np.testing.assert_array_equal(owner, expected)


# Lowering --------------------------------------------------------------------------------------


def abstract(tokens, rows, checkpoints=0, channels=5376, dtype="bfloat16", taps=4):
    """Shapes of a call's operands, without their memory; its inputs are columns of a wider array."""
    of = jax.ShapeDtypeStruct
    ids = [(rows + 1,), (rows,), (rows,), (rows, checkpoints), (rows, checkpoints)]
    return {
        "x": Columns(of((tokens, channels + 5200), dtype), 5120, channels),  # pyright: ignore
        "weight": of((taps, channels), dtype),
        "bias": of((channels,), dtype),
        "windows": of((3, 20, taps - 1, channels), dtype),
        "layer": of((), jnp.int32),
        "rows": Rows(*(of(shape, jnp.int32) for shape in ids)),  # pyright: ignore
    }


def lower(operands, layers=1, **options) -> str:
    """The text of `layers` calls, one after the other, lowered for an NVIDIA GPU."""
    conv = jax.jit(lambda operands: mosaic.causal_conv(**operands, activation="silu", **options))

    def convs(pool, operands):
        outputs = []
        for layer in range(layers):
            y, pool = conv({**operands, "windows": pool, "layer": jnp.int32(layer)})
            outputs.append(y)
        return outputs, pool

    rest = {name: value for name, value in operands.items() if name not in ("windows", "layer")}
    traced = jax.jit(convs, donate_argnums=0).trace(operands["windows"], rest)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


CHOICES = (
    (CausalConvConfig(1, 32, 8), 4, 5376, "float32"),
    (CausalConvConfig(2, 64, 8), 0, 5376, "bfloat16"),
    (CausalConvConfig(4, 32, 4), 2, 5120, "float16"),
)


@pytest.mark.parametrize(("chosen", "checkpoints", "channels", "dtype"), CHOICES, ids=repr)
def test_the_convolution_lowers_for_cuda_in_place_and_once_for_all_layers(
    chosen, checkpoints, channels, dtype
):
    operands = abstract(321, 3, checkpoints, channels, dtype)
    text = lower(operands, layers=2, config=chosen)
    calls = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert len(calls) == 1
    assert "output_operand_alias" in calls[0]
    assert text.count("tf.aliasing_output") == 1


def test_a_hopper_gpu_is_given_the_convolution(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    conv = jax.jit(lambda operands: pallas_kernels.causal_conv(**operands))
    text = conv.trace(abstract(7, 2, 1)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert not re.search(r"stablehlo.slice.*x10576x", text)


@pytest.mark.parametrize("tokens", [0, 5, 2048])
@pytest.mark.parametrize("channels", [128, 384, 5120, 5376])
def test_configurations_divide_the_channels(tokens, channels):
    chosen = causal_conv_config(tokens, channels)
    assert channels % (128 * chosen.width) == chosen.tokens % chosen.unroll == 0
    assert 64 % chosen.tokens == 0  # a row cut at a multiple of 64 is cut between tiles
    assert chosen.tokens >= support.MOST_TAPS - 1  # a window is in one tile at most


def test_reasons_name_what_does_not_fit():
    def reason(**sizes):
        operands = make_operands(Case("causal_conv", {**SIZES, **sizes}, (1,)), blocks=4)
        return support.shape_reason("causal_conv", operands)

    assert reason() is None
    assert "multiple of 128 channels, got 200" in str(reason(D=200))
    assert "no window" in str(reason(K=1))
    assert "at most 8 taps, got 9" in str(reason(K=9))


def test_columns_that_do_not_align_are_declined(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    operands = make_operands(Case("causal_conv", SIZES, (3,)))

    def reason(start, columns):
        x = Columns(jnp.zeros((3, columns)), start, 128)
        return support.supports("causal_conv", {**operands, "x": x})

    assert reason(8, 144) is None
    assert "begins at column 4" in str(reason(4, 144))
    assert "part of 145 columns" in str(reason(8, 145))
