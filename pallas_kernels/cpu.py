"""One-token steps for CPUs: row after row, each block read and written where it lies.

A gather of all rows and a scatter back are passes of their own over the states, and slow ones in XLA's code for CPUs;
a slice read and updated in place is neither. All else is as in `pallas_kernels.xla`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import update_blocks
from pallas_kernels.xla.dense import rows_matmul
from pallas_kernels.xla.gates import NO_LIMIT, live_outputs, step_size

__all__ = ["selective_step", "ssd_step", "supports"]


def supports(op: str, operands: Mapping[str, Any]) -> str | None:
    """Why these steps are not for this device; None if they are."""
    platform = jax.default_backend()
    return None if platform == "cpu" else f"it is for CPUs, and this is {platform}"


def selective_step(
    x: Float[Array, "R D"],
    dt: Float[Array, "R _"],
    A: Float[Array, "D N"],
    B: Float[Array, "R N"],
    C: Float[Array, "R N"],
    skip: Float[Array, "D"] | None,
    z: Float[Array, "R D"] | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    dt_weight: Float[Array, "D K"] | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_step` row after row."""
    if dt_weight is not None:
        dt = rows_matmul(dt, dt_weight, dtype=dt.dtype)
    x_, B, C = (v.astype(jnp.float32) for v in (x, B, C))
    dt = step_size(dt, dt_bias)
    A = A.astype(jnp.float32).T

    def update(h, row):
        dt, dx, B = row
        return jnp.exp(dt * A) * h + B[:, None] * dx

    def output(h, C):
        return jnp.dot(C, h, precision=lax.Precision.HIGHEST)

    y, states = update_blocks(
        states, layer, read_ids, write_ids, update, (dt, dt * x_, B), output, C
    )
    if skip is not None:
        y = y + skip.astype(jnp.float32) * x_
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    return _outputs(y, states, write_ids).astype(x.dtype), states


def ssd_step(
    x: Float[Array, "R H P"],
    dt: Float[Array, "R H"],
    A: Float[Array, "H"],
    B: Float[Array, "R G N"],
    C: Float[Array, "R G N"],
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    gate: Float[Array, "R HP"] | None = None,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> tuple[Float[Array, "R H P"], Float[Array, "layers blocks H P N"]]:
    """`pallas_kernels.ssd_step` row after row."""
    shape, dtype, (_, groups, size) = x.shape, x.dtype, B.shape
    x, B, C = (v.astype(jnp.float32) for v in (x, B, C))
    x = x.reshape((shape[0], groups, -1, shape[2]))
    dt = step_size(dt, dt_bias, dt_limit)
    decay = jnp.exp(dt * A.astype(jnp.float32)).reshape(x.shape[:3])
    dx = dt.reshape(x.shape[:3])[..., None] * x

    def update(h, row):
        decay, dx, B = row
        h = h.reshape((*dx.shape, size))
        h = decay[..., None, None] * h + dx[..., None] * B[:, None, None, :]
        return h.reshape(states.shape[2:])

    def output(h, C):
        h = h.reshape((groups, -1, size))
        y = jnp.einsum("gkn,gn->gk", h, C, precision=lax.Precision.HIGHEST)
        return y.reshape(shape[1:])

    y, states = update_blocks(states, layer, read_ids, write_ids, update, (decay, dx, B), output, C)
    if skip is not None:
        y = y + skip.astype(jnp.float32)[:, None] * x.reshape(y.shape)
    if gate is not None:
        y = y * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
    return _outputs(y, states, write_ids).astype(dtype), states


def _outputs(y: Float[Array, "R ..."], states: Array, write_ids: Int[Array, "R"]) -> Array:
    """The outputs, 0 of null rows and NaN of rows whose write id is outside the pool."""
    stray = (write_ids < 0) | (write_ids >= states.shape[1])
    y = jnp.where(stray.reshape((-1,) + (1,) * (y.ndim - 1)), jnp.nan, y)
    return live_outputs(y, write_ids != 0)
