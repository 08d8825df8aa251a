"""Causal depthwise convolution of a few taps, over packed rows and for one token a row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import Rows, lengths, token_rows, writes
from pallas_kernels.xla.gates import activate, live_outputs


def _rows_of(values: Float[Array, "S D"], index: Int[Array, "..."]) -> Float[Array, "... D"]:
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def causal_conv(
    x: Float[Array, "T D"],
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    activation: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.causal_conv` in XLA."""
    taps, tokens = weight.shape[0], x.shape[0]
    kept = taps - 1
    # Behind a barrier, or XLA for GPUs reads the pool again after it was written, and so copies it before.
    window = lax.optimization_barrier(read_blocks(windows, layer, rows.read_ids))
    # One array that holds every input a tap can see: each row's window, then the tokens.
    source = jnp.concatenate([window.reshape((-1, x.shape[1])), x])
    before = window.shape[0] * kept

    def place(row, position):
        """Where `source` holds a row's input; negative positions lie in its window."""
        in_window = row * kept + kept + position
        return jnp.where(position < 0, in_window, before + rows.offsets[row] + position)

    row, position, live = token_rows(rows, tokens)
    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        lag = kept - tap
        seen = x if lag == 0 else _rows_of(source, place(row, position - lag))
        y = y + seen.astype(jnp.float32) * weight[tap].astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = jnp.where(live[:, None], activate(y, activation), 0).astype(x.dtype)

    write_ids, checkpoint_ids = writes(rows)
    owner = jnp.arange(window.shape[0], dtype=jnp.int32)[:, None]
    after = jnp.concatenate([lengths(rows)[:, None], rows.checkpoint_positions], axis=1)
    ids = jnp.concatenate([write_ids[:, None], checkpoint_ids], axis=1)
    positions = after[..., None] - kept + jnp.arange(kept, dtype=jnp.int32)
    states = _rows_of(source, place(owner[..., None], positions))
    states = states.reshape((-1, kept, x.shape[1]))
    return y, write_blocks(windows, layer, ids.ravel(), states)


def conv_step(
    x: Float[Array, "R D"],
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    *,
    activation: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks K-1 D"]]:
    """`pallas_kernels.conv_step` in XLA."""
    window = lax.optimization_barrier(read_blocks(windows, layer, read_ids))
    y = x.astype(jnp.float32) * weight[-1].astype(jnp.float32)
    for tap in range(weight.shape[0] - 1):
        y = y + window[:, tap].astype(jnp.float32) * weight[tap].astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    y = live_outputs(activate(y, activation), write_ids != 0).astype(x.dtype)
    window = jnp.concatenate([window[:, 1:], x[:, None].astype(window.dtype)], axis=1)
    return y, write_blocks(windows, layer, write_ids, window)


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
