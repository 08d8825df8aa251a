"""Speed of Mamba-2's prefill beside its XLA twin and its peers, on one GPU; see `benchmarks.prefill`.

    python -m benchmarks.ssd -o benchmarks/results/ssd.json
    python -m benchmarks.ssd --tune

The floor is the bytes that a call must move at the speed of a pass in place, measured in the same run.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import prefill
from benchmarks.kernels import pass_bandwidth
from benchmarks.prefill import Lengths, Prefill
from benchmarks.prefill_peers import jla_ssd, mamba_ssm_ssd
from pallas_kernels.cases import Case
from pallas_kernels.mosaic.config import SsdConfig, ssd_config
from pallas_kernels.mosaic.ssd_walk import ssd

H, P, G, N = 80, 64, 1, 128
SHAPES = ((2048,), (8192,), (32768,), (2048,) * 8)
GOALS = {(2048,): 60, (8192,): 150, (32768,): 520, (2048,) * 8: 220}
RAGGED = (3, 0, 64, 70, 1, 200, 33, 129)
WIDE = {"H": 2, "P": 128, "G": 1, "N": 64}
CASES = (
    Case("ssd", {"H": 4, "P": 64, "G": 2, "N": 128}, RAGGED, 21, 3, "bfloat16"),
    Case("ssd", WIDE, (130, 5), 3, 2, "bfloat16", options={"dt_limit": (0.1, 0.9)}),
    Case(
        "ssd", {**WIDE, "P": 64, "N": 128}, (128, 65), dtype="bfloat16", absent=("skip", "dt_bias")
    ),
    Case("ssd", {"H": 2, "P": 64, "G": 1, "N": 128}, (40, 1190), 3, 3, "bfloat16"),
)
ONE_ROW = Case("ssd", {"H": 4, "P": 64, "G": 1, "N": 128}, (704, 0, 0), dtype="bfloat16")


def call(operands, variant: SsdConfig | str, **changes):
    operands = {**operands, **changes}
    if isinstance(variant, str):
        return pallas_kernels.ssd(**operands, implementation="xla")
    return ssd(**operands, config=variant)


def step(v: dict[str, Any], h: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
    """One token of the recurrence in float64."""
    dt = np.clip(np.logaddexp(0, v["dt"][t] + v.get("dt_bias", 0)), *v["dt_limit"])
    B, C = (np.repeat(v[name][t], len(h) // v[name].shape[1], axis=0) for name in "BC")
    h = np.exp(dt * v["A"])[:, None, None] * h
    h = h + (dt[:, None] * v["x"][t])[:, :, None] * B[:, None]
    skip = v.get("skip", np.zeros(len(h)))[:, None]
    return h, np.einsum("hpn,hn->hp", h, C) + skip * v["x"][t]


def bounds(case: Case) -> dict[str, float]:
    """The tensor cores take the factors of outputs and states in bfloat16."""
    return {"y": 2.0**-7, "y_rms": 5e-3, "states": 2.0**-7, "states_rms": 5e-3}


def make_inputs(tokens: int, key) -> dict[str, jax.Array]:
    shapes = {"x": (tokens, H, P), "dt": (tokens, H), "B": (tokens, G, N), "C": (tokens, G, N)}
    shapes |= {"skip": (H,), "dt_bias": (H,), "A": (H,)}
    keys = jax.random.split(key, len(shapes))
    values = {
        n: jax.random.normal(k, s, jnp.bfloat16)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    return values | {"A": -jnp.exp(values["A"].astype(jnp.float32))}


def bytes_moved(lengths: Lengths) -> int:
    tokens = sum(lengths)
    return 2 * tokens * (2 * H * P + H + 2 * G * N) + 2 * len(lengths) * H * P * N * 4


@functools.cache
def bandwidth() -> float:
    return pass_bandwidth()


BENCH = Prefill(
    call=call,
    step=step,
    make_inputs=make_inputs,
    shapes=SHAPES,
    goals=GOALS,
    floor=lambda lengths: bytes_moved(lengths) / bandwidth(),
    block=(H, P, N),
    chosen=lambda lengths: ssd_config(len(lengths), H, sum(lengths)),
    tuning=(SsdConfig(),),
    small=lambda variant: SsdConfig(16, 4) if variant.segments > 1 else variant,
    cases=CASES,
    one_row=ONE_ROW,
    bounds=bounds,
    peers={
        "jax-linear-attention": lambda lengths: jla_ssd(lengths, H, P, N),
        "mamba_ssm": lambda lengths: mamba_ssm_ssd(lengths, H, P, N),
    },
)

if __name__ == "__main__":
    sys.exit(prefill.main(BENCH, __doc__ or "", {"pass_tb_s": bandwidth() / 1e12}))
