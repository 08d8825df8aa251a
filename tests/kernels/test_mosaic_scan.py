"""The Mosaic prefill kernel of the selective scan without a GPU: interpreted, and lowered for CUDA."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import Rows, mosaic
from pallas_kernels.cases import SHAPES, Case, make_operands
from pallas_kernels.mosaic import support
from pallas_kernels.mosaic.config import ScanConfig, scan_config
from tests.kernels.test_cases import check

INTERPRET = plgpu.InterpretGPUParams()
BARE = {"absent": ("skip", "z", "dt_bias"), "dtype": "bfloat16", "state_dtype": "bfloat16"}
CALLS = (
    # Row 0 starts fresh, 1 continues and is empty, 2 forks, 3 is null, 4 ends within a tile.
    (Case("selective_scan", {"D": 32, "N": 16}, (3, 0, 18, 5, 32), 4, 3), ScanConfig(32, 4, 16, 8)),
    # The buffer is shorter than a tile.
    (Case("selective_scan", {"D": 64, "N": 16}, (2, 3), **BARE), ScanConfig(64, 2, 16, 16)),
)


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_the_scan_equals_the_loops(case, chosen):
    operands = make_operands(case)
    check(case, operands, mosaic.selective_scan(**operands, config=chosen, interpret=INTERPRET))


def abstract(tokens, rows, checkpoints=0, state_dtype="float32", size=16):
    """Shapes of a call's operands, without their memory."""
    sizes = {"T": tokens, "D": 5120, "N": size}
    operands = {"layer": jax.ShapeDtypeStruct((), jnp.int32)}
    for name, dims in SHAPES["selective_scan"].items():
        shape = tuple(sizes[dim] for dim in dims.split())
        dtype = "float32" if name == "A" else "bfloat16"
        if name == "states":
            shape, dtype = (3, 20, *shape), state_dtype
        operands[name] = jax.ShapeDtypeStruct(shape, dtype)
    return operands | {
        "rows": jax.eval_shape(
            lambda: Rows(
                jnp.zeros(rows + 1, jnp.int32),
                *(jnp.zeros(rows, jnp.int32) for _ in range(2)),
                *(jnp.zeros((rows, checkpoints), jnp.int32) for _ in range(2)),
            )
        )
    }


def lower(operands, layers=1, **options) -> str:
    """The text of `layers` calls, one after the other, lowered for an NVIDIA GPU."""
    scan = jax.jit(lambda operands: mosaic.selective_scan(**operands, **options))

    def scans(pool, operands):
        outputs = []
        for layer in range(layers):
            y, pool = scan({**operands, "states": pool, "layer": jnp.int32(layer)})
            outputs.append(y)
        return outputs, pool

    rest = {name: value for name, value in operands.items() if name not in ("states", "layer")}
    traced = jax.jit(scans, donate_argnums=0).trace(operands["states"], rest)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


CHOICES = (
    (ScanConfig(32, 4, 16, 8), 0, 16),
    (ScanConfig(64, 2, 16, 4), 3, 16),
    (ScanConfig(128, 1, 16, 4), 0, 16),
    (ScanConfig(32, 4, 16, 4), 0, 8),
)


@pytest.mark.parametrize(("chosen", "checkpoints", "size"), CHOICES, ids=repr)
def test_the_scan_lowers_for_cuda_in_place_and_once_for_all_layers(chosen, checkpoints, size):
    text = lower(abstract(321, 2, checkpoints, size=size), layers=2, config=chosen)
    calls = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    assert len(calls) == 1
    assert "output_operand_alias" in calls[0]
    assert text.count("tf.aliasing_output") == 1


@pytest.mark.parametrize(("tokens", "rows"), [(7, 1), (2048, 1), (16384, 8)])
def test_a_hopper_gpu_is_given_the_scan(monkeypatch, tokens, rows):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    operands = abstract(tokens, rows, 1, "bfloat16")
    scan = jax.jit(lambda operands: pallas_kernels.selective_scan(**operands))
    text = scan.trace(operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("checkpoints", [0, 3])
@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize(("channels", "size"), [(32, 8), (96, 16), (5120, 16), (2048, 64)])
def test_scan_configurations_divide_the_channels_and_the_states(rows, channels, size, checkpoints):
    chosen = scan_config(rows, channels, size, checkpoints)
    assert channels % chosen.channels == size % (2 * chosen.groups) == 64 % chosen.tokens == 0
    assert chosen.tokens % chosen.unroll == 0


def test_reasons_name_what_does_not_fit_the_scan():
    def reason(**sizes):
        operands = make_operands(
            Case("selective_scan", {"D": 64, "N": 16, **sizes}, (1,)), blocks=4
        )
        return support.shape_reason("selective_scan", operands)

    assert reason() is None
    assert "multiple of 32 channels, got 48" in str(reason(D=48))
    assert "multiple of 8 states a channel, at most 64, got 12" in str(reason(N=12))
    assert "got 72" in str(reason(N=72))
