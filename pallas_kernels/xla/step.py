"""Mamba-2's one-token step: conv step, state step and skip."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.xla.conv import conv_step
from pallas_kernels.xla.gates import NO_LIMIT, live_outputs, step_size


def mamba2_step(
    xbc: Float[Array, "R DC"],
    dt: Float[Array, "R H"],
    conv_weight: Float[Array, "K DC"],
    conv_bias: Float[Array, "DC"] | None,
    A: Float[Array, "H"],
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    windows: Float[Array, "layers blocks K-1 DC"],
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    gate: Float[Array, "R HP"] | None = None,
    *,
    n_groups: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
    activation: str | None = "silu",
) -> tuple[
    Float[Array, "R H P"],
    Float[Array, "layers blocks K-1 DC"],
    Float[Array, "layers blocks H P N"],
]:
    """`pallas_kernels.mamba2_step` in XLA."""
    xbc, windows = conv_step(
        xbc, conv_weight, conv_bias, windows, layer, read_ids, write_ids, activation=activation
    )
    count, (heads, width, size) = xbc.shape[0], states.shape[2:]
    x, B, C = jnp.split(
        xbc.astype(jnp.float32), [heads * width, heads * width + n_groups * size], axis=-1
    )
    x = x.reshape((count, n_groups, heads // n_groups, width))
    B, C = (v.reshape((count, n_groups, 1, 1, size)) for v in (B, C))
    dt = step_size(dt, dt_bias, dt_limit)
    decay = jnp.exp(dt * A.astype(jnp.float32)).reshape(x.shape[:3])

    h = read_blocks(states, layer, read_ids).astype(jnp.float32)
    h = h.reshape((*x.shape, size))
    h = decay[..., None, None] * h + (dt.reshape(x.shape[:3])[..., None] * x)[..., None] * B
    y = jnp.sum(h * C, axis=-1)
    if skip is not None:
        y = y + skip.astype(jnp.float32).reshape((*x.shape[1:3], 1)) * x
    y = y.reshape((count, heads, width))
    if gate is not None:
        y = y * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
    y = live_outputs(y, write_ids != 0)
    h = h.reshape((count, heads, width, size))
    return y.astype(xbc.dtype), windows, write_blocks(states, layer, write_ids, h)
