"""Choice of an implementation and refusals that state what was expected."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.cases import Case, make_operands

CONV = Case("causal_conv", {"D": 6, "K": 4}, (5, 2))
SSD = Case("ssd", {"H": 4, "P": 2, "G": 2, "N": 3}, (5, 2))
STEP = Case("mamba2_step", {"H": 4, "P": 2, "G": 2, "N": 3, "K": 4}, (1, 1))


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
        (STEP, {"xbc": (2, 21), "conv_weight": (4, 21), "conv_bias": (21,), "windows": (2, 7, 3, 21)},
         r"xbc must have H P \+ 2 G N = 20 channels .* got 21"),
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
        pk.mamba2_step(**operands | {"write_ids": jnp.ones(3, jnp.int32)})


@pytest.mark.parametrize(
    "case, option, message",
    [
        (CONV, {"activation": "gelu"}, "unknown activation 'gelu'; use 'silu' or None"),
        (SSD, {"chunk": 0}, "chunk must be at least 1, got 0"),
        (SSD, {"dt_limit": (2.0, 1.0)}, r"dt_limit must satisfy 0 <= low <= high, got \(2.0, 1.0\)"),
        (STEP, {"n_groups": 3}, "4 heads cannot be shared evenly by 3 groups"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(case, option, message):
    with pytest.raises(ValueError, match=message):
        getattr(pk, case.op)(**make_operands(case) | option)


def test_integers_are_not_taken_for_floats():
    operands = make_operands(CONV)
    with pytest.raises(TypeError, match="x must hold floating numbers, got int32"):
        pk.causal_conv(**operands | {"x": jnp.ones((7, 6), jnp.int32)})
