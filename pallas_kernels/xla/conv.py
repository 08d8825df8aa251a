"""Causal depthwise convolution of a few taps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def activate(y: Float[Array, "..."], activation: str | None) -> Float[Array, "..."]:
    """`y` through the named activation."""
    return jax.nn.silu(y) if activation == "silu" else y


def causal_conv_dense(
    x: Float[Array, "B L D"],
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None = None,
    activation: str | None = None,
) -> Float[Array, "B L D"]:
    """Causal depthwise convolution of whole sequences from a zero window, for training."""
    taps, length = weight.shape[0], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        shifted = jax.lax.slice_in_dim(padded, tap, tap + length, axis=1)
        y = y + shifted.astype(jnp.float32) * weight[tap].astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return activate(y, activation).astype(x.dtype)
