"""Mamba-2's prefill kernels without a GPU: interpreted against float64 loops, and lowered for CUDA."""

import re

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import Rows, mosaic
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import ssd_walk, support
from pallas_kernels.mosaic.config import SsdConfig, ssd_config
from tests.kernels.test_cases import check

INTERPRET = plgpu.InterpretGPUParams()
SIZES = {"H": 1, "P": 64, "G": 1, "N": 64}
# A row of chunks that it does not fill, one that continues in place, a fork, a null row; starts that are no multiples
# of eight, checkpoints at 1 and at the end, padding.
CASES = (
    Case("ssd", SIZES, (3, 70, 5, 9), 2, 2, "bfloat16"),
    Case("ssd", {**SIZES, "N": 128}, (330,), dtype="bfloat16", absent=("skip", "dt_bias")),
    Case("ssd", SIZES, (5, 66), 0, 1, "bfloat16", "bfloat16"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_equal_the_loops(case):
    operands = make_operands(case)
    check(case, operands, mosaic.ssd(**operands, interpret=INTERPRET))


def test_columns_are_read_where_they_stand():
    case = Case("ssd", {**SIZES, "H": 2, "G": 2}, (20,), dtype="bfloat16")
    operands = make_operands(case)
    x, B, C = (operands[name] for name in "xBC")
    flat = [value.reshape((x.shape[0], -1)) for value in (x, B, C)]
    noise = jnp.full((x.shape[0], 8), jnp.nan, "bfloat16")
    _, *split = pallas_kernels.split(jnp.concatenate([noise, *flat], axis=1), 8, *[128] * 3)
    wide = {
        name: columns.reshaped(*value.shape[1:])
        for name, columns, value in zip("xBC", split, (x, B, C), strict=True)
    }
    check(case, operands, mosaic.ssd(**{**operands, **wide}, interpret=INTERPRET))


def test_a_row_in_segments_has_the_bits_of_a_whole_one():
    """Three chunks and a half, a checkpoint where segments meet and one within, a null row."""
    case = Case("ssd", SIZES, (0, 5, 230), 3, 2, "bfloat16")
    operands = make_operands(case)
    rows = operands["rows"]
    positions = rows.checkpoint_positions.at[2].set(jnp.asarray([128, 199], jnp.int32))
    operands["rows"] = rows._replace(checkpoint_positions=positions)
    whole, parts = (
        mosaic.ssd(**operands, config=config, interpret=INTERPRET)
        for config in (SsdConfig(), SsdConfig(3, 2))
    )
    check(case, operands, parts)
    chex.assert_trees_all_equal(parts, whole)


def test_no_segment_reads_the_block_that_another_writes(monkeypatch):
    """Segments run side by side, which interpretation does not: so the blocks are spoilt before they are walked."""
    operands = make_operands(Case("ssd", SIZES, (0, 5, 230), 3, 2, "bfloat16"))
    rows = operands["rows"]
    operands["rows"] = rows._replace(read_ids=rows.write_ids)
    pool = operands["states"]
    operands["states"] = jax.random.normal(jax.random.key(5), pool.shape, pool.dtype)
    config, launch, launched = SsdConfig(3, 2), ssd_walk.call, []
    whole = mosaic.ssd(**operands, config=config, interpret=INTERPRET)

    def spoil(kernel, arrays, states, *rest, **options):
        if len(launched) == 1:
            long = rows.write_ids[2]  # the one row that has several segments
            assert long != 0
            states = states.at[operands["layer"], long].set(jnp.nan)
        launched.append(kernel)
        return launch(kernel, arrays, states, *rest, **options)

    monkeypatch.setattr(ssd_walk, "call", spoil)
    spoilt = mosaic.ssd(**operands, config=config, interpret=INTERPRET)
    assert len(launched) >= 2 and jnp.isfinite(whole[0].astype(jnp.float32)).all()
    chex.assert_trees_all_equal(spoilt, whole)


# Lowering --------------------------------------------------------------------------------------


def abstract(rows: int, points: int, sizes=(80, 64, 1, 128), tokens=2048, dtype="bfloat16"):
    """Shapes of a call's operands, without their memory."""
    H, P, G, N = sizes
    shapes = {"x": (tokens, H, P), "dt": (tokens, H), "B": (tokens, G, N), "C": (tokens, G, N)}
    shapes |= {"skip": (H,), "dt_bias": (H,)}
    operands = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    ids = [(rows + 1,), (rows,), (rows,), (rows, points), (rows, points)]
    return operands | {
        "A": jax.ShapeDtypeStruct((H,), "float32"),
        "states": jax.ShapeDtypeStruct((3, 9, H, P, N), "float32"),
        "layer": jax.ShapeDtypeStruct((), "int32"),
        "rows": Rows(*(jax.ShapeDtypeStruct(shape, "int32") for shape in ids)),  # pyright: ignore
    }


def lower(operands, layers: int) -> str:
    """The text of `layers` calls, one after the other, lowered for an NVIDIA GPU."""
    step = jax.jit(lambda operands: mosaic.ssd(**operands))

    def steps(states, operands):
        outputs = []
        for layer in range(layers):
            y, states = step({**operands, "states": states, "layer": jnp.int32(layer)})
            outputs.append(y)
        return outputs, states

    operands = dict(operands)
    traced = jax.jit(steps, donate_argnums=0).trace(operands.pop("states"), operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "tokens", "points"),
    [((80, 64, 1, 128), 2048, 0), ((8, 128, 2, 64), 5, 0), ((8, 64, 8, 128), 1021, 2)],
)
def test_the_kernels_lower_for_cuda_in_place_and_once_for_all_layers(sizes, tokens, points):
    text = lower(abstract(4, points, sizes, tokens), layers=2)
    calls = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    # Checkpoints inside a chunk are a launch of their own.
    assert len(calls) == (2 if points else 1)
    assert all("output_operand_alias" in call for call in calls)
    assert text.count("tf.aliasing_output") == 1


def test_a_hopper_gpu_is_given_the_kernel(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    step = jax.jit(lambda operands: pallas_kernels.ssd(**operands))

    def kernels(dtype, tokens=2048):
        traced = step.trace(abstract(1, 0, tokens=tokens, dtype=dtype))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count("custom_call @mosaic_gpu_v2")

    assert kernels("bfloat16") == 1
    assert kernels("bfloat16", 8192) == 2  # the second for the states at the starts of segments
    assert kernels("float32") == 0


# Choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 50])
@pytest.mark.parametrize("places", [1, 24, 80, 512])
@pytest.mark.parametrize("tokens", [1, 64, 2048, 8192, 100_000])
def test_segments_cover_every_row_that_fits(rows, places, tokens):
    chosen = ssd_config(rows, places, tokens)
    assert chosen.segments == 1 or chosen.segments * chosen.chunks * 64 >= tokens
    assert chosen.chunks % 4 == 0
    assert chosen.segments == 1 or rows <= 2


def test_reasons_name_what_does_not_fit():
    def reason(dtype="bfloat16", state="float32", chunk=64, tokens=5, **sizes):
        case = Case("ssd", {**SIZES, **sizes}, (tokens,), dtype=dtype, state_dtype=state)
        return support.shape_reason("ssd", {**make_operands(case, blocks=4), "chunk": chunk})

    assert reason() is None
    assert reason(chunk=128, P=128, N=128) is None
    assert "of bfloat16, and x is float32" in str(reason(dtype="float32"))
    assert reason(state="bfloat16") is None
    assert "of bfloat16, and x is float16" in str(reason(dtype="float16"))
    assert "states is float16" in str(reason(state="float16"))
    assert "got 32 by 64" in str(reason(P=32))
    assert "got 64 by 256" in str(reason(N=256))
    assert "of 64 tokens, and 96 is no multiple" in str(reason(chunk=96))
    assert "no token" in str(reason(tokens=0))
