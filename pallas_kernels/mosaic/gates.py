"""Pointwise functions made of what Mosaic GPU can lower, in float32; scalars and arrays alike."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

NO_LIMIT = (0.0, float("inf"))


def float32(values: Iterable[Any]) -> list[Any]:
    """The values in float32; None stays None."""
    return [None if value is None else value.astype(jnp.float32) for value in values]


def softplus(x):
    """`log(1 + exp(x))`.

    Mosaic has no log1p, and `log(1 + u)` loses the small steps. Here `log(1 + u) = 2 atanh(s)` with
    `s = u / (2 + u)`, at most 1/3, so that eight terms of the series give float32.
    """
    u = jnp.exp(-jnp.maximum(x, -x))
    s = u / (u + 2.0)
    square = s * s
    series = 1.0 / 15.0
    for n in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / n
    return jnp.maximum(x, 0.0) + 2.0 * s * series


def silu(x):
    """`x` times its sigmoid."""
    return x / (jnp.exp(-x) + 1.0)


def step_size(dt, dt_bias, dt_limit=NO_LIMIT):
    """`clip(softplus(dt + dt_bias), *dt_limit)`."""
    dt = softplus(dt if dt_bias is None else dt + dt_bias)
    low, high = dt_limit
    dt = dt if low == 0.0 else jnp.maximum(dt, low)
    return dt if high == float("inf") else jnp.minimum(dt, high)
