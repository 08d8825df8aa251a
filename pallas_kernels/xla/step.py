"""Mamba-2's one-token step: state, skip and gate."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.xla.gates import NO_LIMIT, live_outputs, step_size


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
    """`pallas_kernels.ssd_step` in XLA."""
    shape, dtype, (_, groups, size) = x.shape, x.dtype, B.shape
    x = x.astype(jnp.float32).reshape((shape[0], groups, -1, shape[2]))
    B, C = (v.astype(jnp.float32)[:, :, None, None] for v in (B, C))
    dt = step_size(dt, dt_bias, dt_limit)
    decay = jnp.exp(dt * A.astype(jnp.float32)).reshape(x.shape[:3])

    h = read_blocks(states, layer, read_ids).astype(jnp.float32)
    h = h.reshape((*x.shape, size))
    h = decay[..., None, None] * h + (dt.reshape(x.shape[:3])[..., None] * x)[..., None] * B
    y = jnp.sum(h * C, axis=-1)
    if skip is not None:
        y = y + skip.astype(jnp.float32).reshape((*x.shape[1:3], 1)) * x
    y = y.reshape(shape)
    if gate is not None:
        y = y * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
    y = live_outputs(y, write_ids != 0).astype(dtype)
    return y, write_blocks(states, layer, write_ids, h.reshape((*shape, size)))
