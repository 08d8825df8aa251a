"""Mamba-2's state space duality in chunks: matmuls inside a chunk, a recurrence between chunks.

Dao & Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section 6. Decays are always differences
of cumulative logs, masked before the exponential: nothing is divided by a decay that may be 0, and
gradients stay finite.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import Rows, writes
from pallas_kernels.xla.gates import step_size
from pallas_kernels.xla.grid import (
    chain,
    checkpoint_places,
    chunk_grid,
    last_chunks,
    select_checkpoints,
    to_grid,
    to_packed,
)

# Up to this many chunks the recurrence between them is unrolled, which XLA fuses.
_UNROLLED_CHUNKS = 16


class LogDecay(NamedTuple):
    """Cumulative log decays as a sum of two floats, so that a difference of two keeps its digits.

    The coarse part is a multiple of 2**-8 and its sums are exact; a single float would lose the
    decays of all tokens that follow a very strong one in the same chunk.
    """

    coarse: Float[Array, "..."]
    fine: Float[Array, "..."]

    def map(self, f) -> "LogDecay":
        return LogDecay(f(self.coarse), f(self.fine))

    def since(self, start: "LogDecay"):
        return (self.coarse - start.coarse) + (self.fine - start.fine)

    def total(self):
        return self.coarse + self.fine


def log_decays(dt: Float[Array, "M Q H"], A: Float[Array, "H"]) -> LogDecay:
    """Log decay from the start of each chunk through each token."""
    # exp(-104) is 0 in float32; the bound keeps the coarse sums exact.
    log = jnp.maximum(dt * A, -104.0)
    coarse = lax.stop_gradient(jnp.round(log * 256.0) / 256.0)
    return LogDecay(jnp.cumsum(coarse, axis=1), jnp.cumsum(log - coarse, axis=1))


def _low_einsum(spec: str, a, b):
    def widened(a, b):  # XLA's CPU backend has no such mixed product.
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))

    def mixed(a, b):
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    return lax.platform_dependent(a, b, cpu=widened, default=mixed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _low_matmul(spec: str, dtype, a, b):
    return _low_einsum(spec, a.astype(dtype), b.astype(dtype))


def _low_matmul_fwd(spec, dtype, a, b):
    a, b = a.astype(dtype), b.astype(dtype)
    return _low_einsum(spec, a, b), (a, b)


def _low_matmul_bwd(spec, dtype, saved, grad):
    # Rounds the cotangent too: otherwise the backward matmuls would run in float32.
    a, b = saved
    inputs, out = spec.split("->")
    a_index, b_index = inputs.split(",")
    grad = grad.astype(dtype)
    return (
        _low_einsum(f"{out},{b_index}->{a_index}", grad, b),
        _low_einsum(f"{out},{a_index}->{b_index}", grad, a),
    )


_low_matmul.defvjp(_low_matmul_fwd, _low_matmul_bwd)


def _matmul(spec: str, a, b, dtype=None):
    """Two-operand float32 einsum; its operands are rounded to `dtype` if one is given."""
    if dtype is None or jnp.dtype(dtype) == jnp.float32:
        return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)
    return _low_matmul(spec, jnp.dtype(dtype), a, b)


def _by_group(x: Float[Array, "M Q H ..."], groups: int) -> Float[Array, "M Q G H/G ..."]:
    return x.reshape((*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:]))


def _pair_decays(log: LogDecay) -> Float[Array, "... Q Q"]:
    """Decay from after token j through token i, 0 where j comes after i."""
    size = log.fine.shape[-1]
    causal = jnp.arange(size)[:, None] >= jnp.arange(size)
    between = log.map(lambda v: v[..., :, None]).since(log.map(lambda v: v[..., None, :]))
    return jnp.exp(jnp.where(causal, between, -jnp.inf))


def _chunk_states(
    x: Float[Array, "M Q H P"],
    dt: Float[Array, "M Q H"],
    log_decay: LogDecay,
    B: Float[Array, "M Q G N"],
    dtype=None,
) -> Float[Array, "M H P N"]:
    """What each chunk's own tokens leave in the state at its end."""
    groups = B.shape[2]
    weight = jnp.exp(log_decay.map(lambda v: v[:, -1:]).since(log_decay)) * dt
    state = _matmul("mjghp,mjgn->mghpn", _by_group(x * weight[..., None], groups), B, dtype)
    return state.reshape((x.shape[0], *x.shape[2:], B.shape[3]))


def _chunk_outputs(
    x: Float[Array, "M Q H P"],
    dt: Float[Array, "M Q H"],
    log_decay: LogDecay,
    B: Float[Array, "M Q G N"],
    C: Float[Array, "M Q G N"],
    state: Float[Array, "M H P N"],
    dtype=None,
) -> Float[Array, "M Q H P"]:
    """Outputs of each chunk that starts from `state`."""
    groups = B.shape[2]
    log = log_decay.map(lambda v: jnp.moveaxis(_by_group(v, groups), 1, -1))
    # Summed and transposed once, not again for each of the pairs.
    decay = _pair_decays(lax.optimization_barrier(log))
    scores = _matmul("mign,mjgn->mgij", C, B, dtype)
    values = _by_group(x * dt[..., None], groups)
    own = _matmul("mghij,mjghp->mighp", scores[:, :, None] * decay, values, dtype)
    state = state.reshape((state.shape[0], groups, -1, *state.shape[2:]))
    carried = _matmul("mign,mghpn->mighp", C, state, dtype)
    y = own + carried * jnp.exp(_by_group(log_decay.total(), groups))[..., None]
    return y.reshape(x.shape)


def _dense_states(
    states: Float[Array, "B C H P N"], total: LogDecay, initial: Float[Array, "B H P N"]
) -> tuple[Float[Array, "B C H P N"], Float[Array, "B H P N"]]:
    """State at the start of each chunk and at the end; `total` is of each chunk."""
    chunks = states.shape[1]
    if chunks <= _UNROLLED_CHUNKS:
        decay = jnp.exp(total.total())[..., None, None]
        starts = [initial]
        for k in range(chunks):
            starts.append(decay[:, k] * starts[-1] + states[:, k])
        return jnp.stack(starts[:-1], axis=1), starts[-1]
    step = lambda h, c: (jnp.exp(c[1])[..., None, None] * h + c[0], h)  # noqa: E731
    moved = (jnp.moveaxis(states, 1, 0), jnp.moveaxis(total.total(), 1, 0))
    final, starts = lax.scan(step, initial, moved)
    return jnp.moveaxis(starts, 0, 1), final


def ssd_dense(
    x: Float[Array, "B L H P"],
    dt: Float[Array, "B L H"],
    A: Float[Array, "H"],
    B: Float[Array, "B L G N"],
    C: Float[Array, "B L G N"],
    *,
    initial: Float[Array, "B H P N"] | None = None,
    chunk: int = 64,
    matmul_dtype=None,
) -> tuple[Float[Array, "B L H P"], Float[Array, "B H P N"]]:
    """Whole sequences of equal length, for training: `h = exp(dt A) h + dt B x`, `y = C h`.

    `dt` is the positive step, after its softplus. `matmul_dtype` (bfloat16) rounds the operands of
    the matmuls, forwards and backwards; sums, decays and states stay float32. Returns `y` in the
    dtype of `x` and the final state in float32.
    """
    batch, length, heads, width = x.shape
    size = min(chunk, length)
    chunks = -(-length // size)

    def split(v):
        v = jnp.pad(v, ((0, 0), (0, chunks * size - length)) + ((0, 0),) * (v.ndim - 2))
        return v.reshape((batch * chunks, size, *v.shape[2:])).astype(jnp.float32)

    if initial is None:
        initial = jnp.zeros((batch, heads, width, B.shape[3]), jnp.float32)
    x_, dt_, B_, C_ = split(x), split(dt), split(B), split(C)
    log_decay = log_decays(dt_, A.astype(jnp.float32))
    states = _chunk_states(x_, dt_, log_decay, B_, matmul_dtype)
    starts, final = _dense_states(
        states.reshape((batch, chunks, *states.shape[1:])),
        log_decay.map(lambda v: v[:, -1].reshape((batch, chunks, heads))),
        initial.astype(jnp.float32),
    )
    starts = starts.reshape(states.shape)
    y = _chunk_outputs(x_, dt_, log_decay, B_, C_, starts, matmul_dtype)
    return y.reshape((batch, -1, heads, width))[:, :length].astype(x.dtype), final


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
    """`pallas_kernels.ssd` in XLA."""
    grid = chunk_grid(rows, x.shape[0], chunk)
    A = A.astype(jnp.float32)
    x_, B_, C_ = (to_grid(v.astype(jnp.float32), grid) for v in (x, B, C))
    dt_ = to_grid(step_size(dt, dt_bias, dt_limit), grid)
    initial = read_blocks(states, layer, rows.read_ids).astype(jnp.float32)

    def advance(dt, B, x):
        """Decay of a chunk's start and what its own tokens add, at its end."""
        log_decay = log_decays(dt, A)
        decay = jnp.exp(log_decay.total()[:, -1])[..., None, None]
        return log_decay, decay, _chunk_states(x, dt, log_decay, B)

    log_decay, decay, own = advance(dt_, B_, x_)
    starts, ends = chain(grid, decay, own, initial)
    y = to_packed(_chunk_outputs(x_, dt_, log_decay, B_, C_, starts), grid)
    if skip is not None:
        y = y + skip.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
        y = jnp.where(grid.live[:, None, None], y, 0)

    write_ids, checkpoint_ids = writes(rows)
    states = write_blocks(states, layer, write_ids, ends[last_chunks(grid, rows, chunk)])
    if rows.checkpoint_ids.shape[1]:
        places = checkpoint_places(grid, rows, chunk)

        def inside():
            part = jnp.where(places.mask[:, :, None], dt_[places.chunk], 0)
            _, decay, own = advance(part, B_[places.chunk], x_[places.chunk])
            return decay * starts[places.chunk] + own

        def checkpointed(states):
            values = select_checkpoints(places, ends, inside)
            return write_blocks(states, layer, checkpoint_ids.ravel(), values)

        states = lax.cond(jnp.any(places.asked), checkpointed, lambda states: states, states)
    return y.astype(x.dtype), states
