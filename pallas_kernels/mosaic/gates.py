"""Pointwise functions made of what Mosaic GPU can lower, in float32; scalars and arrays alike."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

NO_LIMIT = (0.0, float("inf"))
LOG2_E = 1.4426950408889634


def float32(values: Iterable[Any]) -> list[Any]:
    """The values in float32; None stays None."""
    return [None if value is None else value.astype(jnp.float32) for value in values]


# log(1 + u) / u for u in 0..1, to 2e-7 of itself; highest power first.
LOG1P = (
    -0.0085391989, 0.0440895967, -0.1076816618, 0.1774523854, -0.2449546158, 0.3327547908,
    -0.4999740422, 0.9999998212,
)  # fmt: skip


def softplus(x):
    """`log(1 + exp(x))`.

    Mosaic has no log1p, and `log(1 + u)` loses the small steps; the polynomial keeps them.
    """
    u = jnp.exp(-jnp.abs(x))
    series = LOG1P[0]
    for coefficient in LOG1P[1:]:
        series = series * u + coefficient
    return jnp.maximum(x, 0.0) + u * series


def silu(x):
    """`x` times its sigmoid, which is a square of a reciprocal root: cheaper than a division."""
    root = lax.rsqrt(jnp.exp(-x) + 1.0)
    return x * root * root


def step_size(dt, dt_bias, dt_limit=NO_LIMIT):
    """`clip(softplus(dt + dt_bias), *dt_limit)`."""
    dt = softplus(dt if dt_bias is None else dt + dt_bias)
    low, high = dt_limit
    dt = dt if low == 0.0 else jnp.maximum(dt, low)
    return dt if high == float("inf") else jnp.minimum(dt, high)
