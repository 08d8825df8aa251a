"""The Mosaic GPU kernels without a GPU: interpreted against float64 loops, and lowered for CUDA."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import cases, mosaic, xla
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import config, gates, support
from pallas_kernels.mosaic.config import ConvConfig, SelectiveConfig, StateConfig
from tests.kernels.test_cases import check

INTERPRET = plgpu.InterpretGPUParams()
ROWS = (1,) * 6
CONV = {"D": 256, "K": 4}
MAMBA = {"D": 256, "N": 16}
MAMBA2 = {"H": 4, "P": 32, "G": 2, "N": 32}
LIMIT = {"dt_limit": (0.1, 0.9)}
HALF = {"dtype": "bfloat16", "state_dtype": "bfloat16"}

CALLS = (
    (Case("conv_step", CONV, ROWS, options={"activation": "silu"}), ConvConfig(2)),
    (Case("conv_step", {"D": 256, "K": 2}, ROWS, absent=("bias",), **HALF), ConvConfig(1)),
    (Case("selective_step", MAMBA, ROWS), SelectiveConfig(2, lanes=4)),
    (Case("selective_step", MAMBA, ROWS, dtype="bfloat16"), SelectiveConfig(4, lanes=2, rows=3)),
    (
        Case("selective_step", {"D": 128, "N": 3}, ROWS, absent=("skip", "z", "dt_bias"), **HALF),
        SelectiveConfig(1, rows=2),
    ),
    (Case("ssd_step", MAMBA2, ROWS, options=LIMIT), StateConfig(16)),
    (Case("ssd_step", MAMBA2, ROWS, absent=("skip", "dt_bias", "gate"), **HALF), StateConfig(32)),
    (Case("ssd_step", MAMBA2, ROWS, dtype="bfloat16"), StateConfig(32)),
)


def run(case: Case, operands, chosen):
    return getattr(mosaic, case.op)(**operands, config=chosen, interpret=INTERPRET)


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_a_kernel_equals_the_loops(case, chosen):
    operands = make_operands(case)
    check(case, operands, run(case, operands, chosen))


FORMS = [
    next(call for call in CALLS if call[0].op == op) for op in ("conv_step", "selective_step")
] + [call for call in CALLS if call[0].options == LIMIT]


@pytest.mark.parametrize(("case", "chosen"), FORMS, ids=lambda v: getattr(v, "name", repr(v)))
def test_ids_outside_the_pool_touch_nobody(case, chosen):
    operands = make_operands(case)
    pools = {name: value for name, value in operands.items() if name in ("windows", "states")}
    blocks = next(iter(pools.values())).shape[1]
    # Row 0 reads past the end, row 1 before the start; rows 2 and 4 write there.
    read, write = (np.array(operands[name]) for name in ("read_ids", "write_ids"))
    free = np.setdiff1d(np.arange(1, blocks), [*read, *write])[:2]
    read[:2], write[:2] = (blocks, -1), free
    write[[2, 4]] = blocks + 1, -2
    operands |= {"read_ids": jnp.asarray(read), "write_ids": jnp.asarray(write)}
    y, *after = run(case, operands, chosen)
    assert np.isnan(np.asarray(y[:2])).all()
    assert np.isfinite(np.asarray(y[4:])).all()
    for before, pool in zip(pools.values(), after, strict=True):
        rest = np.setdiff1d(np.arange(blocks), write)
        np.testing.assert_array_equal(pool[-1, rest], before[-1, rest])
        np.testing.assert_array_equal(pool[:-1], before[:-1])


@pytest.mark.parametrize(("block", "dtype"), [((3, 256), "bfloat16"), ((4, 32, 16), "float32")])
@pytest.mark.parametrize("value", [0.0, np.nan])
def test_blocks_are_filled_and_others_keep_their_bits(block, dtype, value):
    pool = jax.random.normal(jax.random.key(0), (2, 6, *block), dtype)
    ids = jnp.asarray([4, 0, 2, 6, -1, 0], jnp.int32)
    filled = mosaic.fill_blocks(
        pool=pool, ids=ids, value=jnp.asarray(value, dtype), interpret=INTERPRET
    )
    expected = np.array(pool, np.float32)
    expected[:, [2, 4]] = value
    np.testing.assert_array_equal(np.asarray(filled, np.float32), expected)
    assert filled.dtype == dtype


def test_a_kernel_differentiates_like_its_xla_twin():
    operands = make_operands(Case("conv_step", CONV, ROWS, options={"activation": "silu"}))
    windows = jax.random.normal(jax.random.key(0), operands["windows"].shape)

    def loss(module):
        def of(x, windows):
            results = module.conv_step(**{**operands, "x": x, "windows": windows})
            return sum(jnp.sum(jnp.sin(value)) for value in results)

        return jax.jit(jax.grad(of, argnums=(0, 1)))(operands["x"], windows)

    chex.assert_trees_all_equal(loss(mosaic), loss(xla))


# Lowering --------------------------------------------------------------------------------------

SIZES = {
    "conv_step": {"D": 5376, "K": 4},
    "selective_step": {"D": 5120, "N": 16},
    "ssd_step": {"H": 80, "P": 64, "G": 1, "N": 128},
}


def abstract_operands(op: str, rows: int, state_dtype: str = "float32"):
    """Shapes of a call's operands, without their memory."""
    sizes = {"T": rows, **SIZES[op]}
    sizes["HP"] = 80 * 64
    shapes = {"layer": jax.ShapeDtypeStruct((), jnp.int32)}
    for name, dims in cases.SHAPES[op].items():
        shape = tuple(sizes.get(dim, 3) for dim in dims.split())
        dtype = "float32" if name == "A" else "bfloat16"
        if name in cases.POOLS:
            shape, dtype = (3, rows + 1, *shape), state_dtype
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return shapes | {"read_ids": ids, "write_ids": ids}


def lower(op: str, shapes, layers: int = 1, **options) -> str:
    """The text of `layers` calls, one after the other, lowered for an NVIDIA GPU."""
    pools = [name for name in ("windows", "states") if name in shapes]
    step = jax.jit(lambda operands: getattr(mosaic, op)(**operands, **options))

    def steps(pool_arrays, operands):
        outputs = []
        for layer in range(layers):
            y, *pool_arrays = step(
                {
                    **operands,
                    **dict(zip(pools, pool_arrays, strict=True)),
                    "layer": jnp.int32(layer),
                }
            )
            outputs.append(y)
        return outputs, pool_arrays

    arrays = [shapes.pop(name) for name in pools]
    traced = jax.jit(steps, donate_argnums=0).trace(arrays, shapes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


CHOICES = (
    ("conv_step", ConvConfig(1)),
    ("conv_step", ConvConfig(2)),
    ("selective_step", SelectiveConfig(1)),
    ("selective_step", SelectiveConfig(2, lanes=4)),
    ("selective_step", SelectiveConfig(4, lanes=4, rows=2)),
    ("ssd_step", StateConfig(16)),
    ("ssd_step", StateConfig(32)),
    ("ssd_step", StateConfig(64)),
)


@pytest.mark.parametrize(("op", "chosen"), CHOICES, ids=repr)
def test_a_kernel_lowers_for_cuda_in_place_and_once_for_all_layers(op, chosen):
    text = lower(op, abstract_operands(op, 8), layers=3, config=chosen)
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert "output_operand_alias" in call
    assert text.count("tf.aliasing_output") == 1


def test_filling_lowers_for_cuda_in_place():
    pool, ids = jax.ShapeDtypeStruct((3, 9, 80, 64, 128), jnp.float32), jnp.zeros(8, jnp.int32)
    fill = jax.jit(
        lambda p: mosaic.fill_blocks(pool=p, ids=ids, value=jnp.float32(0)), donate_argnums=0
    )
    text = fill.trace(pool).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert "output_operand_alias" in call and text.count("tf.aliasing_output") == 1


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("op", SIZES)
def test_the_chosen_configuration_lowers(op, rows):
    shapes = abstract_operands(op, rows, state_dtype="bfloat16")
    assert "mosaic_gpu_v2" in lower(op, shapes)


def test_a_hopper_gpu_is_given_the_kernels(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    operands = abstract_operands("ssd_step", 1)
    step = jax.jit(lambda operands: pallas_kernels.ssd_step(**operands))
    text = step.trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


# Choices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 8, 32, 100, 256])
@pytest.mark.parametrize(
    ("heads", "width", "size"),
    [(80, 64, 128), (24, 64, 128), (12, 64, 64), (8, 128, 256), (4, 48, 32)],
)
def test_a_state_configuration_divides_the_head(rows, heads, width, size):
    chosen = config.state_config(rows, heads, width, size)
    assert width % chosen.rows == 0
    assert chosen.rows % 16 == 0


@pytest.mark.parametrize("rows", [1, 3, 8, 32, 100, 256])
@pytest.mark.parametrize("channels", [128, 384, 5120, 5376])
def test_channel_configurations_divide_the_channels(rows, channels):
    for size in (16, 3):
        chosen = config.selective_config(rows, channels, size)
        assert channels % chosen.channels == rows % chosen.rows == size % chosen.lanes == 0
    assert channels % (128 * config.conv_config(rows, channels).width) == 0


def test_reasons_name_what_does_not_fit():
    def reason(op, **sizes):
        case = Case(op, {**SIZES[op], **sizes}, (1,))
        return support.shape_reason(op, make_operands(case, blocks=4))

    def fill_reason(shape, dtype="float32"):
        operands = {"pool": jax.ShapeDtypeStruct((2, 3, *shape), dtype)}
        return support.shape_reason("fill_blocks", operands)

    assert fill_reason((4, 32)) is None
    assert "holds 96 numbers, not a multiple of 128" in str(fill_reason((3, 32)))
    assert "pool is int32" in str(fill_reason((128,), "int32"))
    assert reason("conv_step", D=256) is None
    assert "multiple of 128 channels, got 200" in str(reason("conv_step", D=200))
    assert "no window" in str(reason("conv_step", D=256, K=1))
    assert reason("selective_step", D=256) is None
    assert "multiple of 128 channels, got 96" in str(reason("selective_step", D=96))
    assert "at most 32 of them, got 64" in str(reason("selective_step", D=256, N=64))
    assert reason("ssd_step", H=4, P=32, N=64) is None
    assert "got 24 by 64" in str(reason("ssd_step", H=4, P=24, N=64))
    assert "got 32 by 48" in str(reason("ssd_step", H=4, P=32, N=48))


def test_a_cpu_and_other_ops_are_declined_with_a_reason():
    conv = make_operands(Case("conv_step", CONV, ROWS))
    with pytest.raises(ValueError, match="'mosaic' declines this call: it needs an NVIDIA GPU"):
        pallas_kernels.conv_step(**conv, implementation="mosaic")
    prompt = make_operands(Case("causal_conv", CONV, ROWS))
    with pytest.raises(ValueError, match="cpu has no causal_conv"):
        pallas_kernels.causal_conv(**prompt, implementation="cpu")


# Numbers ---------------------------------------------------------------------------------------


def test_softplus_keeps_its_relative_accuracy_where_it_is_small():
    x = np.linspace(-30, 30, 20001, dtype=np.float32)
    right = np.logaddexp(0, x.astype(np.float64))
    np.testing.assert_allclose(gates.softplus(jnp.asarray(x)), right, rtol=1e-6)


def test_silu_and_limits():
    x = np.linspace(-80, 80, 20001, dtype=np.float32)
    right = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(gates.silu(jnp.asarray(x)), right, rtol=2e-5, atol=1e-30)
    steps = gates.step_size(jnp.asarray([-9.0, 0.0, 9.0]), 0.5, (0.1, 2.0))
    np.testing.assert_allclose(steps, [0.1, 0.974077, 2.0], rtol=1e-6)
