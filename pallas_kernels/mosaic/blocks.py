"""Reads and writes of state blocks inside a kernel, under the rules of `pallas_kernels.blocks`."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def splat(value, shape: tuple[int, ...], layout, dtype=jnp.float32):
    """An array that holds one number."""
    value = jnp.asarray(value, dtype)
    return plgpu.layout_cast(lax.broadcast_in_dim(value, shape, ()), layout)


def inside(pool, block):
    """Whether `block` may be read or written: not null, and in the pool."""
    return (block > 0) & (block < pool.shape[1])


def read_block(pool, block, read: Callable, shape: tuple[int, ...], layout):
    """What `read()` gives, in float32; zeros for block 0, NaN for a block outside the pool."""

    def absent():
        return splat(jnp.where(block == 0, 0.0, jnp.nan), shape, layout)

    return lax.cond(inside(pool, block), lambda: read().astype(jnp.float32), absent)


def when_inside(pool, block) -> Callable:
    """Runs the function below it only for a block that may be written."""
    return pl.when(inside(pool, block))
