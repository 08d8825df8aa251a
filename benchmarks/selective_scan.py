"""Speed of Mamba's prefill scan beside its XLA twin and a peer, on one GPU; see `benchmarks.prefill`.

    python -m benchmarks.selective_scan -o benchmarks/results/selective_scan.json
    python -m benchmarks.selective_scan --tune

The floor is one exponential per token, channel and state at 16 a clock and multiprocessor, 1.98 GHz.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import prefill
from benchmarks.prefill import Lengths, Prefill
from benchmarks.prefill_peers import jla_scan
from pallas_kernels.cases import Case
from pallas_kernels.mosaic.config import ScanConfig, scan_config
from pallas_kernels.mosaic.scan import selective_scan

D, N = 5120, 16
SHAPES = ((2048,), (8192,), (2048,) * 8)
GOALS = {(2048,): 90, (8192,): 320, (2048,) * 8: 480}
SIZES = {"D": 320, "N": 16}
RAGGED = (3, 0, 64, 70, 1, 200, 33, 129)
CASES = tuple(
    Case("selective_scan", SIZES, RAGGED, 21, 3, dtype) for dtype in ("bfloat16", "float32")
)
TUNING = (
    ScanConfig((32, 8), tokens=32),
    ScanConfig((32,)),
    ScanConfig((32,), unroll=2, helpers=1),
    ScanConfig((64,), unroll=2, helpers=1),
)


def call(operands, variant: ScanConfig | str, **changes):
    operands = {**operands, **changes}
    if isinstance(variant, str):
        return pallas_kernels.selective_scan(**operands, implementation="xla")
    return selective_scan(**operands, config=variant)


def step(v: dict[str, Any], h: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
    """One token of the recurrence in float64."""
    dt = np.logaddexp(0, v["dt"][t] + v["dt_bias"])
    h = np.exp(dt * v["A"].T) * h + v["B"][t][:, None] * (dt * v["x"][t])
    gate = v["z"][t] / (1 + np.exp(-v["z"][t]))
    return h, (v["C"][t] @ h + v["skip"] * v["x"][t]) * gate


def bounds(case: Case) -> dict[str, float]:
    return {"y": 2.0**-8 if case.dtype == "bfloat16" else 1e-5, "states": 1e-5}


def make_inputs(tokens: int, key) -> dict[str, jax.Array]:
    wide, narrow = (tokens, D), (tokens, N)
    shapes = {"x": wide, "dt": wide, "z": wide, "B": narrow, "C": narrow}
    shapes |= {"skip": (D,), "dt_bias": (D,), "A": (D, N)}
    keys = jax.random.split(key, len(shapes))
    values = {
        n: jax.random.normal(k, s, jnp.bfloat16)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    return values | {"A": -jnp.exp(jax.random.normal(keys[-1], (D, N), jnp.float32))}


def floor(lengths: Lengths) -> float:
    return sum(lengths) * D * N / (132 * 16 * 1.98e9)


BENCH = Prefill(
    call=call,
    step=step,
    make_inputs=make_inputs,
    shapes=SHAPES,
    goals=GOALS,
    floor=floor,
    block=(N, D),
    chosen=lambda lengths: scan_config(len(lengths), D, N),
    tuning=TUNING,
    small=lambda variant: variant,
    cases=CASES,
    one_row=Case("selective_scan", SIZES, (704, 0, 0), dtype="bfloat16"),
    bounds=bounds,
    peers={"jax-linear-attention": lambda lengths: jla_scan(lengths, D, N)},
)

if __name__ == "__main__":
    sys.exit(prefill.main(BENCH, __doc__ or ""))
