"""Machines small enough to work by hand, and a packed call of fixed shape to run them with.

The decaying sum: `h = 0.5 h + x`, `y = h`. The convolution: weights (1, 2, 3, 4), newest input
times 4, window of the last 3 inputs. All their values are exact in float32.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Rows

TOKENS, ROWS, POINTS, BLOCKS, LAYERS = 40, 4, 4, 12, 2
LAYER = 1
CHUNK = 8
SUMS = ("ssd", "selective_scan")
HALVES = -np.log(2.0)


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


@cache
def compiled(op: str, implementation: str):
    run = partial(getattr(pallas_kernels, op), implementation=implementation)

    def ssd(x, pool, rows):
        step = {"dt_limit": (1.0, 1.0), "chunk": CHUNK}  # every step is exactly 1
        B = ones(TOKENS, 1, 1)
        A = jnp.full(1, HALVES, jnp.float32)
        y, pool = run(
            x[:, None, None], ones(TOKENS, 1), A, B, B, None, None, pool, LAYER, rows, **step
        )
        return y[:, 0, 0], pool

    def selective_scan(x, pool, rows):
        dt = 32 * ones(TOKENS, 1)  # softplus(32) is 32 in float32
        A = jnp.full((1, 1), HALVES / 32, jnp.float32)
        B, C = ones(TOKENS, 1) / 32, ones(TOKENS, 1)
        y, pool = run(x[:, None], dt, A, B, C, None, None, None, pool, LAYER, rows)
        return y[:, 0], pool

    def causal_conv(x, pool, rows):
        weight = jnp.arange(1.0, 5.0)[:, None]
        y, pool = run(x[:, None], weight, None, pool, LAYER, rows)
        return y[:, 0], pool

    return jax.jit(locals()[op])


def empty_pool(op: str, fill=np.nan):
    """A pool in which every block, 0 too, is poisoned."""
    shape = {"ssd": (1, 1, 1), "selective_scan": (1, 1), "causal_conv": (3, 1)}[op]
    return np.full((LAYERS, BLOCKS, *shape), fill, np.float32)


def call(op, implementation, pool, rows, *, before=(), after=()):
    """Runs `rows` = [(inputs, read, write, {position: block})...] packed between paddings.

    Returns each row's outputs as a list, all outputs, and the pool as numpy.
    """
    offsets, reads, writes = [len(before)], [], []
    points, positions = np.zeros((2, ROWS, POINTS), np.int32)
    tokens = list(before)
    for row, (inputs, read, write, *asked) in enumerate(rows):
        tokens += inputs
        offsets.append(len(tokens))
        reads.append(read)
        writes.append(write)
        for i, (position, block) in enumerate((asked or [{}])[0].items()):
            points[row, i], positions[row, i] = block, position
    spare = ROWS - len(rows)
    offsets += offsets[-1:] * spare
    tokens += after
    tokens += [np.nan] * (TOKENS - len(tokens))
    packed = Rows(
        *(
            jnp.asarray(v, jnp.int32)
            for v in (offsets, reads + [0] * spare, writes + [0] * spare, points, positions)
        )
    )
    x = jnp.asarray(tokens, jnp.float32)
    y, pool = compiled(op, implementation)(x, jnp.array(pool), packed)
    y = np.asarray(y)
    split = [y[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return split[: len(rows)], y, np.array(pool)


def block(pool, index) -> list[float]:
    return pool[LAYER, index].ravel().tolist()
