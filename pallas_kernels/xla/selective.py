"""Mamba's selective scan, token by token or in chunks that walk together and are then chained.

Gu & Dao 2023, "Mamba", arXiv:2312.00752. In `scan_chunks` a chunk starts from a zero state; what the
state before it adds to its outputs is known in closed form, `C exp(A sum dt) h`, since the
recurrence is linear.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import Rows, token_rows, writes
from pallas_kernels.xla.dense import rows_matmul
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


def scan_tokens(
    x: Float[Array, "T D"],
    dt: Float[Array, "T D"],
    A: Float[Array, "N D"],
    B: Float[Array, "T N"],
    C: Float[Array, "T N"],
    initial: Float[Array, "R N D"],
    rows: Rows,
) -> tuple[Float[Array, "T D"], Float[Array, "R N D"], Float[Array, "R*M N D"]]:
    """Outputs, last states and checkpoints of packed rows, one token after the other."""
    row, position, _ = token_rows(rows, x.shape[0])
    last = jnp.maximum(rows.offsets[1:] - 1, 0)
    points = rows.offsets[:-1, None] + jnp.maximum(rows.checkpoint_positions, 1) - 1
    wanted = jnp.concatenate([last, points.ravel()])
    # Every token leaves its state in the current slot; a wanted token closes the slot.
    closes = jnp.zeros(x.shape[0], jnp.int32)
    closes = closes.at[wanted].set(1, mode="drop", wrap_negative_indices=False)
    slot = jnp.cumsum(closes) - closes
    kept = jnp.zeros((wanted.shape[0] + 1, *A.shape), jnp.float32)

    def step(carry, token):
        h, kept = carry
        dtx, dt, B, C, row, position, slot = token
        h = jnp.where(position == 0, initial[row], h)
        h = jnp.exp(dt * A) * h + B[:, None] * dtx
        return (h, lax.dynamic_update_index_in_dim(kept, h, slot, 0)), jnp.sum(C[:, None] * h, 0)

    tokens = (dt * x, dt, B, C, row, position, slot)
    (_, kept), y = lax.scan(step, (jnp.zeros_like(A), kept), tokens)
    states = kept[slot.at[wanted].get(mode="clip")]
    return y, states[: last.shape[0]], states[last.shape[0] :]


def scan_chunks(
    x: Float[Array, "T D"],
    dt: Float[Array, "T D"],
    A: Float[Array, "N D"],
    B: Float[Array, "T N"],
    C: Float[Array, "T N"],
    initial: Float[Array, "R N D"],
    rows: Rows,
) -> tuple[Float[Array, "T D"], Float[Array, "R N D"], Float[Array, "R*M N D"]]:
    """Outputs, last states and checkpoints of packed rows, all chunks at once."""
    grid = chunk_grid(rows, x.shape[0], CHUNK)
    x_, dt_, B_, C_ = (to_grid(v, grid) for v in (x, dt, B, C))
    elapsed = jnp.cumsum(dt_, axis=1)
    own, y = _walk_chunks(x_, dt_, A, B_, C_)
    starts, ends = chain(grid, jnp.exp(elapsed[:, -1:] * A), own, initial)
    y = to_packed(y + _carried_outputs(elapsed, A, C_, starts), grid)
    places = checkpoint_places(grid, rows, CHUNK)

    def inside():
        part = jnp.where(places.mask[:, :, None], dt_[places.chunk], 0)
        own, _ = _walk_chunks(x_[places.chunk], part, A, B_[places.chunk], C_[places.chunk])
        return jnp.exp(jnp.sum(part, axis=1)[:, None] * A) * starts[places.chunk] + own

    last = ends[last_chunks(grid, rows, CHUNK)]
    return y, last, select_checkpoints(places, ends, inside) if places.chunk.size else last[:0]


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
    A = A.astype(jnp.float32).T
    inputs = (x.astype(jnp.float32), step_size(dt, dt_bias), A)
    inputs += (B.astype(jnp.float32), C.astype(jnp.float32))
    initial = read_blocks(states, layer, rows.read_ids).astype(jnp.float32)
    # A CPU is bound by exponentials, of which chunks need at least twice as many; a GPU by steps.
    y, last, points = lax.platform_dependent(
        *inputs, initial, rows, cpu=scan_tokens, default=scan_chunks
    )
    _, _, live = token_rows(rows, x.shape[0])
    if skip is not None:
        y = y + skip.astype(jnp.float32) * x.astype(jnp.float32)
    if z is not None:
        y = y * jax.nn.silu(z.astype(jnp.float32))
    y = live_outputs(y, live).astype(x.dtype)
    write_ids, checkpoint_ids = writes(rows)
    ids = jnp.concatenate([write_ids, checkpoint_ids.ravel()])
    return y, write_blocks(states, layer, ids, jnp.concatenate([last, points]))


def selective_step(
    x: Float[Array, "R D"],
    dt: Float[Array, "R D"] | Float[Array, "R K"],
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
    """`pallas_kernels.selective_step` in XLA."""
    if dt_weight is not None:
        dt = rows_matmul(dt, dt_weight, dtype=dt.dtype)
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
