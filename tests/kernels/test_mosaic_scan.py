"""The Mosaic prefill kernel of the selective scan without a GPU: interpreted, and lowered for CUDA."""

import re

import jax
import jax.numpy as jnp
import numpy as np
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
    # Row 0 starts fresh, 1 continues and is empty, 2 forks, 3 is null, 4 ends within a tile,
    # which has tokens of the padding, all NaN.
    (Case("selective_scan", {"D": 32, "N": 16}, (3, 0, 18, 5, 30), 6, 3), ScanConfig((32,), 16, 8)),
    # The buffer is shorter than a tile.
    (Case("selective_scan", {"D": 40, "N": 16}, (2, 3), **BARE), ScanConfig((32, 8), 16, 16)),
    # Tiles of two stretches, three blocks of inputs, the last of which begins within the one before.
    (Case("selective_scan", {"D": 16, "N": 32}, (150,), 3, 2), ScanConfig((16,), 32, 2, 1)),
)


@pytest.mark.parametrize(("case", "chosen"), CALLS, ids=lambda v: getattr(v, "name", repr(v)))
def test_the_scan_equals_the_loops(case, chosen):
    operands = make_operands(case)
    check(case, operands, mosaic.selective_scan(**operands, config=chosen, interpret=INTERPRET))


def test_a_cut_a_place_and_company_change_no_bit_of_the_scan():
    """Away from the end of the buffer, where a CPU rounds the tokens of a tile in different ways.

    The benchmark looks there too, on the GPU.
    """
    case = Case("selective_scan", {"D": 32, "N": 16}, (21,), 27)
    operands = make_operands(case)
    sequence = {name: np.asarray(operands[name])[:21] for name in ("x", "dt", "z", "B", "C")}
    rng = np.random.default_rng(1)

    @jax.jit
    def scan(operands):
        return mosaic.selective_scan(
            **operands, config=ScanConfig((32,), 16, 8), interpret=INTERPRET
        )

    def call(states, begin, end, place, read):
        """Tokens `begin` to `end` in row 1, after a row of `place` other tokens."""
        packed = {name: rng.normal(size=(48, *v.shape[1:])) for name, v in sequence.items()}
        for name, values in sequence.items():
            packed[name][place : place + end - begin] = values[begin:end]
        offsets = [0, place, place + end - begin]
        ids, none = ([0, read], [1, 2]), [[0], [0]]
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in (offsets, *ids, none, none)))
        arrays = {name: jnp.asarray(v, jnp.float32) for name, v in packed.items()}
        y, states = scan({**operands, **arrays, "states": states, "rows": rows})
        return np.asarray(y)[place : place + end - begin], states

    states = jnp.full((2, 3, 16, 32), jnp.nan)
    whole, after = call(states, 0, 21, 1, 0)
    first, states = call(states, 0, 16, 5, 0)
    second, states = call(states, 16, 21, 27, 2)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    np.testing.assert_array_equal(states[1, 2], after[1, 2])


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
    (ScanConfig((32, 8), 32), 0, 16),
    (ScanConfig((64,), 16, 2, 1), 3, 16),
    (ScanConfig((64,), 16, 2, 1), 0, 16),
    (ScanConfig((32,)), 0, 64),
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


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize(("channels", "size"), [(32, 16), (96, 32), (5120, 16), (2048, 64)])
def test_scan_configurations_divide_the_channels_and_the_states(rows, channels, size):
    chosen = scan_config(rows, channels, size)
    assert channels % chosen.channels == size % 16 == 64 % chosen.tokens == 0
    assert chosen.tokens % 16 == 16 % chosen.unroll == 0


def test_reasons_name_what_does_not_fit_the_scan():
    def reason(**sizes):
        operands = make_operands(
            Case("selective_scan", {"D": 64, "N": 16, **sizes}, (1,)), blocks=4
        )
        return support.shape_reason("selective_scan", operands)

    assert reason() is None
    assert "multiple of 32 channels, got 48" in str(reason(D=48))
    assert "multiple of 16 states a channel, at most 64, got 8" in str(reason(N=8))
    assert "got 80" in str(reason(N=80))
