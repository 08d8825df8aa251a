"""Choice of an implementation and refusals that state what was expected."""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels import dispatch, mosaic
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.mosaic import support

CONV = Case("causal_conv", {"D": 6, "K": 4}, (5, 2))
SSD = Case("ssd", {"H": 4, "P": 2, "G": 2, "N": 3}, (5, 2))
STEP = Case("ssd_step", {"H": 4, "P": 2, "G": 2, "N": 3}, (1, 1))
FUSED = Case("projected_conv_step", {"I": 3, "O": 8, "D": 6, "K": 4}, (1, 1), options={"first": 2})


def test_an_unknown_implementation_names_the_choices():
    with pytest.raises(ValueError, match=r"unknown implementation 'triton'.*'reference', 'xla'"):
        pk.causal_conv(**make_operands(CONV), implementation="triton")


@pytest.fixture
def picky(monkeypatch):
    """An implementation that takes nothing but small convolutions."""

    def supports(op, operands):
        width = operands["x"].shape[1]
        return None if width <= 6 else f"{width} channels, at most 6"

    def causal_conv(x, weight, bias, windows, layer, rows, *, activation):
        return jnp.full_like(x, 42), windows

    module = SimpleNamespace(causal_conv=causal_conv, supports=supports)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "picky", module)
    monkeypatch.setattr(dispatch, "PREFERENCE", ("picky", *dispatch.PREFERENCE))
    yield
    dispatch._compiled.cache_clear()


def test_the_first_implementation_that_supports_a_call_runs_it(picky):
    y, _ = pk.causal_conv(**make_operands(CONV))
    assert (y == 42).all()
    wide = make_operands(Case("causal_conv", {"D": 7, "K": 4}, (5, 2)))
    y, _ = pk.causal_conv(**wide)
    assert not (y == 42).any()


def test_a_declined_call_gives_the_reason(picky):
    wide = make_operands(Case("causal_conv", {"D": 7, "K": 4}, (5, 2)))
    with pytest.raises(ValueError, match="'picky' declines this call: 7 channels, at most 6"):
        pk.causal_conv(**wide, implementation="picky")
    with pytest.raises(ValueError, match="picky has no ssd"):
        pk.ssd(**make_operands(SSD), implementation="picky")


@pytest.mark.parametrize(
    "case, change, message",
    [
        (SSD, {"dt": (7, 3)}, r"ssd: dt must have shape \[T, H\] = \[7, 4\], got \[7, 3\]"),
        (SSD, {"x": (7, 8)}, r"ssd: x must have shape \[T, H, P\] = \[7, 8, P\], got \[7, 8\]"),
        (SSD, {"states": (2, 9, 4, 3, 2)}, r"states must .* = \[2, 9, 4, 2, 3\], got \[2, 9, 4, 3, 2\]"),
        (CONV, {"windows": (2, 9, 4, 6)}, r"\[_, _, K-1, D\] = \[2, 9, 3, 6\], got \[2, 9, 4, 6\]"),
        (STEP, {"gate": (2, 7)}, "gate must have H P = 8 columns, got 7"),
        (FUSED, {"weight": (7, 3)}, "6 channels from column 2 on are not within 7 columns"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(case, change, message):
    operands = make_operands(case) | {name: jnp.ones(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        getattr(pk, case.op)(**operands)


def test_rows_that_do_not_fit_are_refused():
    operands = make_operands(CONV)
    rows = operands["rows"]
    short = rows._replace(offsets=rows.offsets[:-1])
    with pytest.raises(ValueError, match=r"offsets must have shape \[R\+1\] = \[3\], got \[2\]"):
        pk.causal_conv(**operands | {"rows": short})
    floats = rows._replace(read_ids=rows.read_ids.astype(jnp.float32))
    with pytest.raises(TypeError, match="read_ids must hold integer numbers, got float32"):
        pk.causal_conv(**operands | {"rows": floats})


def test_ids_of_a_step_that_do_not_fit_are_refused():
    operands = make_operands(STEP)
    with pytest.raises(ValueError, match=r"write_ids must have shape \[R\] = \[2\], got \(3,\)"):
        pk.ssd_step(**operands | {"write_ids": jnp.ones(3, jnp.int32)})


@pytest.mark.parametrize(
    "case, option, message",
    [
        (CONV, {"activation": "gelu"}, "unknown activation 'gelu'; use 'silu' or None"),
        (SSD, {"chunk": 0}, "chunk must be at least 1, got 0"),
        (SSD, {"dt_limit": (2.0, 1.0)}, r"dt_limit must satisfy 0 <= low <= high, got \(2.0, 1.0\)"),
        (FUSED, {"first": -1}, "6 channels from column -1 on are not within 8 columns"),
        (FUSED, {"activation": "gelu"}, "unknown activation 'gelu'"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(case, option, message):
    with pytest.raises(ValueError, match=message):
        getattr(pk, case.op)(**make_operands(case) | option)


def test_integers_are_not_taken_for_floats():
    operands = make_operands(CONV)
    with pytest.raises(TypeError, match="x must hold floating numbers, got int32"):
        pk.causal_conv(**operands | {"x": jnp.ones((7, 6), jnp.int32)})


def test_prefer_sets_what_a_call_chooses_from_and_jit_notices(picky):
    operands = make_operands(CONV)
    call = jax.jit(lambda x: pk.causal_conv(**{**operands, "x": x})[0])
    assert (call(operands["x"]) == 42).all()
    with pk.prefer("xla"):
        assert not (call(operands["x"]) == 42).any()
    with pk.prefer("picky", "reference"):
        assert (call(operands["x"]) == 42).all()
    assert (call(operands["x"]) == 42).all()
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        pk.prefer("fast", "xla")
    with pytest.raises(ValueError, match="must be one of"):
        pk.prefer("picky")


def test_what_was_chosen_is_told_with_the_reason(picky):
    pk.causal_conv(**make_operands(Case("causal_conv", {"D": 7, "K": 4}, (5, 2))))
    choice = dispatch.chosen()["causal_conv"]
    assert choice.name == "xla" and ("picky", "7 channels, at most 6") in choice.declined
    choice = choice._replace(declined=choice.declined[:1])
    told = dispatch.describe({"causal_conv": choice, "ssd": dispatch.Choice("xla")})
    assert told == "causal_conv, ssd by xla; picky declines causal_conv: 7 channels, at most 6"


@pytest.mark.parametrize("implementation", dispatch.PORTABLE)
def test_columns_of_a_wider_array_are_an_operand(implementation):
    operands = make_operands(STEP)
    matrices = {name: operands[name].reshape((2, -1)) for name in ("gate", "x", "B", "C", "dt")}
    widths = [value.shape[1] for value in matrices.values()]
    wide = jnp.concatenate(list(matrices.values()), axis=1)
    gate, inner, dt = pk.split(wide, widths[0], sum(widths[1:4]), widths[4])
    x, B, C = pk.split(inner, *widths[1:4])
    parts = {"gate": gate, "x": x.reshaped(4, 2), "B": B.reshaped(2, 3), "C": C.reshaped(2, 3)}
    step = jax.jit(lambda operands: pk.ssd_step(**operands, implementation=implementation))
    chex.assert_trees_all_equal(step({**operands, **parts, "dt": dt}), step(operands))
    with pytest.raises(ValueError, match=r"parts of \(3, 4\) columns do not make 32"):
        pk.split(wide, 3, 4)
    short = pk.Columns(wide, 0, 7)
    with pytest.raises(ValueError, match=r"must have shape \[R, H\] = \[2, 4\]"):
        pk.ssd_step(**{**operands, "dt": short})
    with pytest.raises(ValueError, match="gate must have H P = 8 columns, got 7"):
        pk.ssd_step(**{**operands, "gate": short})


def test_columns_have_the_shape_that_they_are_given():
    operands = make_operands(Case("ssd", {"H": 2, "P": 4, "G": 2, "N": 8}, (5, 3)))
    flat = [operands[name].reshape((8, -1)) for name in "xBC"]
    x, B, C = pk.split(jnp.concatenate(flat, axis=1), 8, 16, 16)
    shaped = {"x": x.reshaped(2, 4), "B": B.reshaped(2, 8), "C": C.reshaped(2, 8)}
    assert shaped["x"].shape == (8, 2, 4)
    scan = jax.jit(lambda operands: pk.ssd(**operands, implementation="xla"))
    chex.assert_trees_all_equal(scan({**operands, **shaped}), scan(operands))
    with pytest.raises(ValueError, match=r"16 columns cannot be shaped as \(3, 4\)"):
        B.reshaped(3, 4)


def test_columns_keep_where_they_are_in_a_kernel(monkeypatch):
    operands = make_operands(Case("conv_step", {"D": 128, "K": 3}, (1,) * 4))
    noise = jnp.full((4, 16), jnp.nan)
    wide = jnp.concatenate([noise, operands["x"], noise], axis=1)
    step = functools.partial(mosaic.conv_step, interpret=plgpu.InterpretGPUParams())
    placed = step(**{**operands, "x": pk.Columns(wide, 16, 128)})
    chex.assert_trees_all_equal(placed, step(**operands))
    monkeypatch.setattr(support, "device_reason", lambda: None)
    odd = {**operands, "x": pk.Columns(wide, 4, 128)}
    assert "begins at column 4" in str(support.supports("conv_step", odd))
