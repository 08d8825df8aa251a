"""The truth, written to be read: one `lax.scan` over tokens per recurrence, all in float32.

Every other implementation is tested against this one. It keeps the whole contract of a packed call
(see `pallas_kernels.rows.Rows`) in one function, `walk`, and each recurrence in one `step`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import fill_blocks, read_blocks, write_blocks
from pallas_kernels.rows import Rows, decode_rows, token_rows, writes

__all__ = [
    "causal_conv",
    "conv_step",
    "fill_blocks",
    "projected_conv_step",
    "rms_norm",
    "rows_matmul",
    "selective_scan",
    "selective_step",
    "ssd",
    "ssd_step",
]


def walk(step: Callable, inputs, pool, layer, rows: Rows):
    """Walk `(state, y) = step(state, token)` over each row's tokens, from its read block.

    Returns the outputs, exactly 0 for tokens that no live row owns, and the pool with each row's
    last state in its write block and the states after its checkpoint positions in theirs.
    """
    row, position, live = token_rows(rows, jax.tree.leaves(inputs)[0].shape[0])
    initial = read_blocks(pool, layer, rows.read_ids).astype(jnp.float32)
    write_ids, checkpoint_ids = writes(rows)
    points = jnp.zeros((*checkpoint_ids.shape, *initial.shape[1:]), jnp.float32)

    def advance(carry, token):
        state, last, points = carry
        inputs, row, position, live = token
        state, y = step(jnp.where(position == 0, initial[row], state), inputs)
        reached = live & (rows.checkpoint_positions[row] == position + 1)
        reached = reached.reshape((-1,) + (1,) * state.ndim)
        last = last.at[row].set(jnp.where(live, state, last[row]))
        points = points.at[row].set(jnp.where(reached, state, points[row]))
        return (state, last, points), jnp.where(live, y, 0)

    carry = (jnp.zeros_like(initial[0]), initial, points)
    (_, last, points), y = lax.scan(advance, carry, (inputs, row, position, live))
    pool = write_blocks(pool, layer, write_ids, last)
    points = points.reshape((-1, *initial.shape[1:]))
    return y, write_blocks(pool, layer, checkpoint_ids.ravel(), points)


def _float32(*arrays) -> Any:
    return [None if array is None else array.astype(jnp.float32) for array in arrays]


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
    """Each output weighs the last K inputs of its row; the state is the last K - 1 inputs."""
    inputs, weight, bias = _float32(x, weight, bias)

    def step(window, x):
        seen = jnp.concatenate([window, x[None]])
        y = jnp.sum(weight * seen, axis=0)
        y = y if bias is None else y + bias
        return seen[1:], jax.nn.silu(y) if activation == "silu" else y

    y, windows = walk(step, inputs, windows, layer, rows)
    return y.astype(x.dtype), windows


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
    """Mamba's recurrence (Gu & Dao 2023, arXiv:2312.00752, equation 2 with their algorithm 2)."""
    inputs, dt, A, B, C, skip, gate, dt_bias = _float32(x, dt, A, B, C, skip, z, dt_bias)
    dt = jax.nn.softplus(dt if dt_bias is None else dt + dt_bias)

    def step(h, token):
        x, dt, B, C = token
        h = jnp.exp(dt * A.T) * h + B[:, None] * (dt * x)
        return h, jnp.sum(C[:, None] * h, axis=0)

    y, states = walk(step, (inputs, dt, B, C), states, layer, rows)
    _, _, live = token_rows(rows, x.shape[0])
    if skip is not None:
        y = y + skip * inputs
    if gate is not None:
        y = y * jax.nn.silu(gate)
    return jnp.where(live[:, None], y, 0).astype(x.dtype), states


def ssd(
    x: Float[Array, "T H P"],
    dt: Float[Array, "T H"],
    A: Float[Array, "H"],
    B: Float[Array, "T G N"],
    C: Float[Array, "T G N"],
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    rows: Rows,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk: int = 64,
) -> tuple[Float[Array, "T H P"], Float[Array, "layers blocks H P N"]]:
    """Mamba-2's recurrence (Dao & Gu 2024, arXiv:2405.21060); `chunk` changes nothing here."""
    del chunk
    inputs, dt, A, B, C, skip, dt_bias = _float32(x, dt, A, B, C, skip, dt_bias)
    dt = jnp.clip(jax.nn.softplus(dt if dt_bias is None else dt + dt_bias), *dt_limit)
    heads = x.shape[1] // B.shape[1]

    def step(h, token):
        x, dt, B, C = token
        B, C = jnp.repeat(B, heads, axis=0), jnp.repeat(C, heads, axis=0)
        h = jnp.exp(dt * A)[:, None, None] * h + (dt[:, None] * x)[:, :, None] * B[:, None, :]
        return h, jnp.sum(h * C[:, None, :], axis=-1)

    y, states = walk(step, (inputs, dt, B, C), states, layer, rows)
    _, _, live = token_rows(rows, x.shape[0])
    if skip is not None:
        y = jnp.where(live[:, None, None], y + skip[:, None] * inputs, 0)
    return y.astype(x.dtype), states


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
    """`causal_conv` of rows of one token."""
    rows = decode_rows(read_ids, write_ids)
    return causal_conv(x, weight, bias, windows, layer, rows, activation=activation)


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
    """`selective_scan` of rows of one token."""
    if dt_weight is not None:
        dt = rows_matmul(dt, dt_weight, dtype=dt.dtype)
    rows = decode_rows(read_ids, write_ids)
    return selective_scan(x, dt, A, B, C, skip, z, dt_bias, states, layer, rows)


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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "R H P"], Float[Array, "layers blocks H P N"]]:
    """`ssd` of rows of one token, and their gate."""
    rows = decode_rows(read_ids, write_ids)
    (inner,) = _float32(x)
    y, states = ssd(inner, dt, A, B, C, skip, dt_bias, states, layer, rows, dt_limit=dt_limit)
    if gate is not None:
        y = y * jax.nn.silu(gate.astype(jnp.float32)).reshape(y.shape)
    return y.astype(x.dtype), states


def rows_matmul(x, weight, residual=None, *, dtype):
    """`x @ weight.T`, rounded to `dtype`, and added to the residual."""
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    y = jnp.dot(x, weight.T, precision=lax.Precision.HIGHEST).astype(dtype)
    return y if residual is None else residual + y.astype(residual.dtype)


def projected_conv_step(
    x, weight, conv_weight, conv_bias, windows, layer, read_ids, write_ids, norm_weight=None,
    *, first, eps=0.0, activation=None,
):  # fmt: skip
    """`x @ weight.T`, and `conv_step` of as many of its columns from `first` on as it has channels."""
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps=eps)
    y, last = rows_matmul(x, weight, dtype=x.dtype), first + conv_weight.shape[1]
    ids = windows, layer, read_ids, write_ids
    convolved, windows = conv_step(
        y[:, first:last], conv_weight, conv_bias, *ids, activation=activation
    )
    return y.at[:, first:last].set(convolved), windows


def rms_norm(x, weight, *, eps):
    """Rows over their root mean square, times the weight."""
    x, scale = x.astype(jnp.float32), weight.astype(jnp.float32)
    return (x / jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True) + eps) * scale).astype(weight.dtype)
