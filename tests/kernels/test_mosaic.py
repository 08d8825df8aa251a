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
BARE = ("skip", "z", "dt_bias")
BRAIN = {"dtype": "bfloat16"}
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
    *(
        (Case("selective_step", {"D": 128, "N": 16, "rank": rank}, (1,) * rows, **more), chosen)
        for rank, rows, more, chosen in (
            (160, 6, BRAIN, SelectiveConfig(2, 4, cores=True)),
            (160, 6, BRAIN, SelectiveConfig(1, 4, 4)),
            (48, 3, BRAIN, SelectiveConfig(2, 4, 4, warpgroups=2, cores=True)),
            (64, 20, HALF, SelectiveConfig(2, 4, 8, 2, cores=True)),
            (96, 9, {**BRAIN, "absent": BARE}, SelectiveConfig(4, 4, 8, warpgroups=4, cores=True)),
            (48, 5, {**HALF, "absent": BARE}, SelectiveConfig(1, 8)),
            (24, 5, BRAIN, None),  # a product in a launch before
            (160, 5, {}, None),
        )
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
] + [call for call in CALLS if call[0].options == LIMIT or call[0].sizes.get("rank") == 160]


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


def abstract_operands(op: str, rows: int, state_dtype: str = "float32", **more: int):
    """Shapes of a call's operands, without their memory."""
    sizes = {"T": rows, **SIZES[op], **more}
    sizes["HP"] = 80 * 64
    shapes = {"layer": jax.ShapeDtypeStruct((), jnp.int32)}
    for name, dims in {**cases.SHAPES[op], **(cases.LOW_RANK if more else {})}.items():
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


LOW_RANK_CHOICES = (
    SelectiveConfig(1, 8),
    SelectiveConfig(1, 4, 2),
    SelectiveConfig(2, 4, 2, cores=True),
    SelectiveConfig(2, 4, 8, 2, cores=True),
    SelectiveConfig(2, 4, 8, warpgroups=4, cores=True),
    SelectiveConfig(4, 4, 8, warpgroups=2, cores=True),
)


@pytest.mark.parametrize("chosen", LOW_RANK_CHOICES, ids=repr)
def test_a_product_inside_the_step_lowers_for_cuda_in_place_and_once_for_all_layers(chosen):
    shapes = abstract_operands("selective_step", 11, rank=160)
    text = lower("selective_step", shapes, layers=3, config=chosen)
    (call,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert "output_operand_alias" in call and text.count("tf.aliasing_output") == 1


@pytest.mark.parametrize("rank", [16, 160, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 20, 64])
def test_the_configuration_chosen_for_a_product_inside_the_step_lowers(rows, rank):
    shapes = abstract_operands("selective_step", rows, rank=rank)
    text = lower("selective_step", shapes)
    assert len(re.findall("custom_call @mosaic_gpu_v2", text)) == 1
    assert "dot_general" not in text


@pytest.mark.parametrize(
    ("rank", "rows", "calls", "products"), [(160, 65, 1, 1), (24, 8, 1, 1), (544, 8, 2, 0)]
)
def test_a_product_that_the_step_declines_is_a_launch_before(rank, rows, calls, products):
    shapes = abstract_operands("selective_step", rows, rank=rank)
    text = lower("selective_step", shapes)
    assert len(re.findall("custom_call @mosaic_gpu_v2", text)) == calls
    assert text.count("stablehlo.dot_general") == products


def test_a_rows_step_does_not_depend_on_other_rows():
    case = Case("selective_step", {"D": 64, "N": 16, "rank": 160}, (1,) * 9, **BRAIN)
    operands = make_operands(case)
    for name in ("dt", "dt_weight"):  # sums that are rounded
        operands[name] = jax.random.normal(jax.random.key(len(name)), operands[name].shape)
        operands[name] = operands[name].astype("bfloat16")
    row, alone = 5, dict(operands)
    others = np.arange(9) != row
    for name in ("x", "dt", "B", "C", "z"):
        alone[name] = operands[name].at[others].set(jnp.nan)
    alone["write_ids"] = operands["write_ids"].at[others].set(0)
    write = int(operands["write_ids"][row])
    for chosen in SelectiveConfig(2, 4, 8, 2, cores=True), SelectiveConfig(1, 4, 3):
        (y, states), (z, after) = (run(case, each, chosen) for each in (operands, alone))
        np.testing.assert_array_equal(y[row], z[row])
        np.testing.assert_array_equal(states[-1, write], after[-1, write])
        assert np.isfinite(np.asarray(states[-1, write])).all()


@pytest.mark.parametrize(
    "chosen", [SelectiveConfig(2, 4, 4, cores=True), SelectiveConfig(1, 8)], ids=repr
)
def test_the_low_rank_form_is_read_where_it_stands_in_a_wider_array(chosen):
    case = Case("selective_step", {"D": 64, "N": 16, "rank": 32}, (1,) * 3, **BRAIN)
    operands = make_operands(case)
    around = (0, 0), (16, 8)
    wide = jnp.pad(operands["dt"], around, constant_values=jnp.nan)
    columns = operands | {"dt": pallas_kernels.Columns(wide, 16, 32)}
    chex.assert_trees_all_equal(run(case, columns, chosen), run(case, operands, chosen))


def test_a_step_size_is_read_where_it_stands_in_a_wider_array():
    case = Case("selective_step", {"D": 128, "N": 16}, (1,) * 2, **BRAIN)
    operands, chosen = make_operands(case), SelectiveConfig(1)
    wide = jnp.pad(operands["dt"], ((0, 0), (16, 8)), constant_values=jnp.nan)
    columns = operands | {"dt": pallas_kernels.Columns(wide, 16, 128)}
    chex.assert_trees_all_equal(run(case, columns, chosen), run(case, operands, chosen))


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
    chosen = config.selective_config(rows, channels, 16, low_rank=True)
    assert channels % chosen.channels == chosen.rows % chosen.warpgroups == 0
    assert not chosen.cores or chosen.channels % 64 == 0
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
    assert "2 to 32 of them, got 64" in str(reason("selective_step", D=256, N=64))
    assert "2 to 32 of them, got 1" in str(reason("selective_step", D=256, N=1))
    assert reason("ssd_step", H=4, P=32, N=64) is None
    assert "got 24 by 64" in str(reason("ssd_step", H=4, P=24, N=64))
    assert "got 32 by 48" in str(reason("ssd_step", H=4, P=32, N=48))


def test_products_outside_the_step_have_a_reason():
    def reason(rank=160, rows=8, channels=5120, size=16, dtype="bfloat16"):
        dt = jax.ShapeDtypeStruct((rows, rank), dtype)
        weight = jax.ShapeDtypeStruct((channels, rank), "bfloat16")
        return support.low_rank_reason(dt, weight, rows, channels, size)

    assert reason() is reason(rank=16) is reason(rank=512, rows=64) is reason(channels=64) is None
    assert "these are float32 and bfloat16" in str(reason(dtype="float32"))
    assert "multiple of 16, at most 512, got 24" in str(reason(rank=24))
    assert "at most 512, got 528" in str(reason(rank=528))
    assert "64 channels and of 8 states, got 96 and 16" in str(reason(channels=96))
    assert "got 128 and 4" in str(reason(channels=128, size=4))
    assert "1 to 64 rows, got 65" in str(reason(rows=65))


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
