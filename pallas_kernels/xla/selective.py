"""Mamba's selective scan in chunks: all chunks walk their tokens together, then are chained.

Gu & Dao 2023, "Mamba", arXiv:2312.00752. A chunk starts from a zero state; what the state before it
adds to its outputs is known in closed form, `C exp(A sum dt) h`, since the recurrence is linear.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import Rows, writes
from pallas_kernels.xla.gates import live_outputs, step_size
from pallas_kernels.xla.grid import (
    chain,
    checkpoint_places,
    chunk_grid,
    last_chunks,
    select_checkpoints,
    to_grid,
    to_packed,
)

CHUNK = 64


def _walk_chunks(
    x: Float[Array, "M Q D"],
    dt: Float[Array, "M Q D"],
    A: Float[Array, "N D"],
    B: Float[Array, "M Q N"],
    C: Float[Array, "M Q N"],
) -> tuple[Float[Array, "M N D"], Float[Array, "M Q D"]]:
    """State at the end and outputs of every chunk, each from a zero state."""

    def step(h, token):
        dtx, dt, B, C = token
        h = jnp.exp(dt[:, None, :] * A) * h + B[:, :, None] * dtx[:, None, :]
        return h, jnp.sum(C[:, :, None] * h, axis=1)

    tokens = [jnp.moveaxis(v, 1, 0) for v in (dt * x, dt, B, C)]
    h, y = lax.scan(step, jnp.zeros((x.shape[0], *A.shape), jnp.float32), tokens)
    return h, jnp.moveaxis(y, 0, 1)


def _carried_outputs(
    elapsed: Float[Array, "M Q D"],
    A: Float[Array, "N D"],
    C: Float[Array, "M Q N"],
    starts: Float[Array, "M N D"],
) -> Float[Array, "M Q D"]:
    """What the state before each chunk adds to its outputs."""
    y = jnp.zeros(elapsed.shape, jnp.float32)
    for n in range(A.shape[0]):
        y = y + C[:, :, n, None] * (jnp.exp(elapsed * A[n]) * starts[:, None, n])
    return y


def selective_scan(
    x: Float[Array, "T D"],
    dt: Float[Array, "T D"],
    A: Float[Array, "D N"],
    B: Float[Array, "T N"],
    C: Float[Array, "T N"],
    skip: Float[Array, "D"] | None,
    z: Float[Array, "T D"] | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: int | Int[Array, ""],
    rows: Rows,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_scan` in XLA."""
    grid = chunk_grid(rows, x.shape[0], CHUNK)
    A = A.astype(jnp.float32).T
    x_, B_, C_ = (to_grid(v.astype(jnp.float32), grid) for v in (x, B, C))
    dt_ = to_grid(step_size(dt, dt_bias), grid)
    elapsed = jnp.cumsum(dt_, axis=1)
    initial = read_blocks(states, layer, rows.read_ids).astype(jnp.float32)

    own, y = _walk_chunks(x_, dt_, A, B_, C_)
    starts, ends = chain(grid, jnp.exp(elapsed[:, -1:] * A), own, initial)
    y = to_packed(y + _carried_outputs(elapsed, A, C_, starts), grid)
    if skip is not None:
        y = y + skip.astype(jnp.float32) * x.astype(jnp.float32)
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    y = live_outputs(y, grid.live)

    write_ids, checkpoint_ids = writes(rows)
    ids, values = write_ids, ends[last_chunks(grid, rows, CHUNK)]
    if rows.checkpoint_ids.shape[1]:
        places = checkpoint_places(grid, rows, CHUNK)

        def inside():
            part = jnp.where(places.mask[:, :, None], dt_[places.chunk], 0)
            own, _ = _walk_chunks(x_[places.chunk], part, A, B_[places.chunk], C_[places.chunk])
            decay = jnp.exp(jnp.sum(part, axis=1)[:, None] * A)
            return decay * starts[places.chunk] + own

        ids = jnp.concatenate([ids, checkpoint_ids.ravel()])
        values = jnp.concatenate([values, select_checkpoints(places, ends, inside)])
    return y.astype(x.dtype), write_blocks(states, layer, ids, values)


def selective_step(
    x: Float[Array, "R D"],
    dt: Float[Array, "R D"],
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
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks N D"]]:
    """`pallas_kernels.selective_step` in XLA."""
    x_, B_, C_ = (v.astype(jnp.float32) for v in (x, B, C))
    dt_ = step_size(dt, dt_bias)
    h = read_blocks(states, layer, read_ids).astype(jnp.float32)
    decay = jnp.exp(dt_[:, None, :] * A.astype(jnp.float32).T)
    h = decay * h + B_[:, :, None] * (dt_ * x_)[:, None, :]
    y = jnp.sum(C_[:, :, None] * h, axis=1)
    if skip is not None:
        y = y + skip.astype(jnp.float32) * x_
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    y = live_outputs(y, write_ids != 0)
    return y.astype(x.dtype), write_blocks(states, layer, write_ids, h)
