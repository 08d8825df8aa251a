"""The same bits whatever the company, the place in the buffer, and the split at chunk multiples."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import Rows
from pallas_kernels.xla import selective

T, ROWS, POINTS, BLOCKS, CHUNK = 96, 5, 2, 40, 16
LENGTH = 77
# Sizes that vector units divide, and sizes that leave them remainders.
SIZES = {
    "even": {"H": 4, "P": 16, "G": 2, "N": 16, "D": 48, "K": 4},
    "odd": {"H": 3, "P": 5, "G": 1, "N": 7, "D": 37, "K": 3},
}


def draw(rng, shape):
    return rng.normal(size=shape).astype(np.float32)


def tokens(rng, s, count):
    """Inputs of all three ops for `count` tokens."""
    shapes = {
        "x": (s["H"], s["P"]),
        "dt": (s["H"],),
        "B": (s["G"], s["N"]),
        "C": (s["G"], s["N"]),
        "u": (s["D"],),
        "du": (s["D"],),
        "Bu": (s["N"],),
        "Cu": (s["N"],),
    }
    return {name: draw(rng, (count, *shape)) for name, shape in shapes.items()}


@functools.cache
def compiled(kind):
    s, rng = SIZES[kind], np.random.default_rng(0)
    A, Au = -np.exp(draw(rng, s["H"])), -np.exp(draw(rng, (s["D"], s["N"])))
    weight, skip = draw(rng, (s["K"], s["D"])), draw(rng, s["H"])

    @jax.jit
    def run(pools, rows, t):
        conv, ssm, scan = pools
        y0, conv = pk.causal_conv(t["u"], weight, None, conv, 1, rows, activation="silu")
        y1, ssm = pk.ssd(t["x"], t["dt"], A, t["B"], t["C"], skip, None, ssm, 1, rows, chunk=CHUNK)
        args = (t["u"], t["du"], Au, t["Bu"], t["Cu"], None, None, None)
        y2, scan = pk.selective_scan(*args, scan, 1, rows)
        return (y0, y1, y2), (conv, ssm, scan)

    return run


def poisoned(s):
    shapes = [(s["K"] - 1, s["D"]), (s["H"], s["P"], s["N"]), (s["N"], s["D"])]
    return tuple(np.full((2, BLOCKS, *shape), np.nan, np.float32) for shape in shapes)


def run_split(kind, sequence, cuts, rng=None):
    """One sequence cut into calls, in the company that `rng` draws.

    Returns its outputs, its last states, and the states after each cut and at position 23.
    """
    s, pools, block = SIZES[kind], poisoned(SIZES[kind]), 0
    outputs, kept = [], {}
    for start, stop in itertools.pairwise(cuts):
        count = stop - start
        room, others = T - count, []
        for other in range(rng.integers(0, ROWS) if rng else 0):
            size = int(rng.integers(0, room // 2 + 1))
            room -= size
            others.append((tokens(rng, s, size), size, 0, 30 + other))
        place = int(rng.integers(0, len(others) + 1)) if rng else 0
        own = {name: values[start:stop] for name, values in sequence.items()}
        parts = [*others[:place], (own, count, block, 10 + stop // 4), *others[place:]]
        packed = {
            name: np.concatenate(
                [*(part[0][name] for part in parts), np.full((T, *v.shape[1:]), np.nan, np.float32)]
            )[:T]
            for name, v in sequence.items()
        }
        lengths, reads, writes = (
            [part[i] for part in parts] + [0] * (ROWS - len(parts)) for i in (1, 2, 3)
        )
        points, positions = np.zeros((2, ROWS, POINTS), np.int32)
        inside, grid = [(23 - start, 5), (CHUNK, 6 + start // CHUNK % 3)]
        for i, (position, point) in enumerate([inside, grid]):
            if 1 <= position <= count:
                points[place, i], positions[place, i] = point, position
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = Rows(
            *(jnp.asarray(v, jnp.int32) for v in (offsets, reads, writes, points, positions))
        )
        ys, pools = compiled(kind)(pools, rows, packed)
        block = 10 + stop // 4
        outputs.append([np.asarray(y)[offsets[place] : offsets[place] + count] for y in ys])
        kept[stop] = [np.asarray(pool)[1, block] for pool in pools]
        if points[place, 1]:
            kept[start + CHUNK, "point"] = [np.asarray(pool)[1, points[place, 1]] for pool in pools]
        if points[place, 0]:
            kept[23] = [np.asarray(pool)[1, 5] for pool in pools]
    return [np.concatenate(y) for y in zip(*outputs, strict=True)], kept


def assert_same_bits(a, b):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kind", SIZES)
def test_br77_br43_company_place_and_split_change_no_bit(kind):
    rng = np.random.default_rng(3)
    sequence = tokens(rng, SIZES[kind], LENGTH)
    outputs, kept = run_split(kind, sequence, [0, LENGTH])
    assert all(np.isfinite(y).all() for y in outputs)
    seen = {}
    for _ in range(12):
        cuts = rng.choice(np.arange(CHUNK, LENGTH, CHUNK), rng.integers(0, 4), replace=False)
        cuts = [0, *sorted(cuts.tolist()), LENGTH]
        again, states = run_split(kind, sequence, cuts, rng)
        assert_same_bits(outputs, again)
        assert_same_bits(kept[LENGTH], states[LENGTH])
        for at, state in states.items():
            # A checkpoint on the grid and the state carried to the same position are one thing.
            position = at[0] if isinstance(at, tuple) else at
            if position in seen:
                assert_same_bits(seen[position], state)
            seen.setdefault(position, state)
    assert len(seen) >= 5


def test_br43_a_checkpoint_lies_on_its_rows_own_grid():
    rng = np.random.default_rng(4)
    s = SIZES["even"]
    sequence = tokens(rng, s, 40)
    _, alone = run_split("even", sequence, [0, 16, 40])
    for before in (16, 25):  # aligned and not
        first = tokens(rng, s, before)
        packed = {
            name: np.concatenate([first[name], v, np.zeros((T, *v.shape[1:]), np.float32)])[:T]
            for name, v in sequence.items()
        }
        points, positions = np.zeros((2, ROWS, POINTS), np.int32)
        points[1, 0], positions[1, 0] = 9, 16
        offsets = [0, before, *[before + 40] * 4]
        rows = (offsets, [0] * ROWS, [3, 4, 0, 0, 0], points, positions)
        rows = Rows(*(jnp.asarray(v, jnp.int32) for v in rows))
        _, pools = compiled("even")(poisoned(s), rows, packed)
        assert_same_bits(alone[16], [np.asarray(pool)[1, 9] for pool in pools])


def test_mamba1_chunks_keep_their_bits_too():
    """The variant for GPUs, which a CPU does not choose."""
    rng = np.random.default_rng(5)
    D, N, chunk = 37, 7, selective.CHUNK
    total = 3 * chunk
    A = -np.exp(draw(rng, (N, D)))
    x, B, C = draw(rng, (total, D)), draw(rng, (total, N)), draw(rng, (total, N))
    dt = np.abs(draw(rng, (total, D)))
    scan = jax.jit(selective.scan_chunks)

    def call(start, count, place, initial, noise):
        packed = [draw(noise, (total, *v.shape[1:])) for v in (x, dt, B, C)]
        for buffer, v in zip(packed, (x, dt, B, C), strict=True):
            buffer[place : place + count] = v[start : start + count]
        packed[1] = np.abs(packed[1])
        offsets = jnp.asarray([0, place, place + count], jnp.int32)
        points = jnp.asarray([[0], [1]], jnp.int32)
        positions = jnp.asarray([[0], [min(chunk, count)]], jnp.int32)
        rows = Rows(offsets, points[:, 0], jnp.asarray([1, 2], jnp.int32), points, positions)
        init = jnp.stack([jnp.ones((N, D)), initial])
        y, last, point = scan(packed[0], packed[1], A, packed[2], packed[3], init, rows)
        return np.asarray(y)[place : place + count], last[1], point[1]

    zero = jnp.zeros((N, D))
    length = 2 * chunk + 9
    whole, last, point = call(0, length, 0, zero, rng)
    y0, carried, _ = call(0, chunk, 31, zero, rng)
    y1, again, _ = call(chunk, length - chunk, 17, carried, rng)
    assert_same_bits([whole, last, point], [np.concatenate([y0, y1]), again, carried])
