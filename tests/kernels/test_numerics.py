"""Large and tiny steps, strong decays, state dtypes: finite everywhere and right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import Rows, dispatch
from pallas_kernels.cases import Case, make_operands
from pallas_kernels.rows import decode_rows
from pallas_kernels.xla import selective
from pallas_kernels.xla.gates import step_size
from tests.kernels import loops

every = pytest.mark.parametrize("implementation", dispatch.PORTABLE)


def one_row(length: int) -> Rows:
    ids = jnp.ones(1, jnp.int32)
    none = jnp.zeros((1, 0), jnp.int32)
    return Rows(jnp.asarray([0, length], jnp.int32), 0 * ids, ids, none, none)


def test_br119_softplus_does_not_overflow():
    x = jnp.asarray([-100.0, 0, 20, 89, 1000])
    np.testing.assert_allclose(
        step_size(x, None), np.asarray([0, 0.6931472, 20, 89, 1000], np.float32), rtol=1e-6
    )
    slope = jax.vmap(jax.grad(lambda x: step_size(x, None)))(x)
    np.testing.assert_allclose(slope, [0, 0.5, 1, 1, 1], atol=1e-6)


def step_of(dt):
    """What softplus maps to `dt`."""
    dt = np.asarray(dt, np.float64)
    return np.where(dt > 30, dt, np.log(np.expm1(np.minimum(dt, 30)))).astype(np.float32)


@every
@pytest.mark.parametrize("rate", [0.0, 1e-8, 16.0, 1e4, 1.6e5])
def test_br120_strong_decays_stay_finite(implementation, rate):
    """`a = exp(-rate)`, `b = 1` at each of 64 tokens."""
    length = 64
    dt = jnp.full((length, 1), step_of(1.0))
    exact = np.exp(-rate)
    expected = np.cumsum(exact ** np.arange(length))
    x = jnp.ones((length, 1))
    A = jnp.asarray([-rate], jnp.float32)
    B, D = jnp.ones((length, 1)), jnp.full((1, 2, 1, 1), np.nan)
    y, states = pk.ssd(
        x[..., None], dt, A, B[..., None], B[..., None], None, None, D[..., None], 0,
        one_row(length), chunk=32, implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(y[:, 0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(states[0, 1].ravel(), expected[-1], rtol=1e-6)
    y, states = pk.selective_scan(
        x, dt, A[:, None], B, B, None, None, None, D, 0, one_row(length),
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(y[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(states[0, 1].ravel(), expected[-1], rtol=1e-6)


@every
def test_weak_decays_keep_their_digits_after_a_strong_one(implementation):
    """A difference of plain cumulative sums would be off by one part in a hundred here."""
    length = 40
    dt = np.full(length, 0.01)
    dt[3] = 1.6e5
    h, expected = 0.0, []
    for step in dt:
        h = np.exp(-step) * h + 1.0
        expected.append(h)
    x = jnp.asarray(1 / dt, jnp.float32)[:, None, None]
    one = jnp.ones((length, 1, 1))
    y, _ = pk.ssd(
        x, jnp.asarray(step_of(dt))[:, None], -jnp.ones(1), one, one, None, None,
        jnp.zeros((1, 2, 1, 1, 1)), 0, one_row(length), implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(y[:, 0, 0], expected, rtol=3e-6)


@every
def test_a_step_of_zero_leaves_the_state_alone(implementation):
    case = Case("ssd", {"H": 2, "P": 3, "G": 1, "N": 5}, (1, 9, 4))
    operands = make_operands(case) | {"dt": jnp.full((14, 2), -200.0), "dt_bias": None}
    _, states = pk.ssd(**operands, implementation=implementation)
    rows, before = operands["rows"], np.asarray(operands["states"])
    assert int(rows.read_ids[1]) == int(rows.write_ids[1]) != 0
    for read, write in [(rows.read_ids[i], rows.write_ids[i]) for i in (1, 2)]:
        np.testing.assert_array_equal(states[1, write], before[1, read])
    np.testing.assert_array_equal(states[1, rows.write_ids[0]], 0)


@every
def test_dt_limit_holds_in_prefill_and_in_decode(implementation):
    """Steps far above the limit count as the limit: x = 2, h = 3 * 2 after one token from zero."""
    ids = (jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    one, options = jnp.ones((1, 1, 1)), {"dt_limit": (0.5, 3.0), "implementation": implementation}
    pool = jnp.full((1, 2, 1, 1, 1), np.nan)
    for raw, step in [(50.0, 3.0), (-50.0, 0.5)]:
        dt = jnp.full((1, 1), raw)
        y, _ = pk.ssd(
            2 * one, dt, -jnp.ones(1), one, one, None, None, pool, 0, decode_rows(*ids), **options
        )
        assert y.item() == 2 * step
        y, _ = pk.ssd_step(
            2 * one, dt, -jnp.ones(1), one, one, None, None, pool, 0, *ids, **options
        )
        assert y.item() == 2 * step


@pytest.mark.parametrize(
    "dtype, expected, error", [("float32", 8.648, 1e-3), ("bfloat16", 2.1875, 0)]
)
def test_br72_the_states_dtype_is_the_pools(dtype, expected, error):
    """h = 0.999 h + 0.01 over 2,000 steps; 16 bits stall."""
    ids = jnp.ones(1, jnp.int32)
    one = jnp.ones((1, 1))
    A = jnp.full((1, 1), np.log(0.999) / 32, jnp.float32)

    def step(_, states):
        x = 0.01 / 32 * one
        return pk.selective_step(x, 32 * one, A, one, one, None, None, None, states, 0, ids, ids)[1]

    states = jax.lax.fori_loop(0, 2000, step, jnp.zeros((1, 2, 1, 1), dtype))
    assert states.dtype == dtype
    np.testing.assert_allclose(np.float32(states[0, 1].item()), expected, atol=error)


LENGTH = 130


@pytest.fixture(scope="module")
def sequence():
    case = Case("ssd", {"H": 2, "P": 4, "G": 1, "N": 8}, (LENGTH,))
    operands = make_operands(case, seed=7)
    y, _ = jax.jit(pk.ssd)(**operands)
    truth, final = loops.ssd(**operands)
    np.testing.assert_allclose(y, truth, atol=2e-6 * np.abs(truth).max())
    return operands, truth, final


def test_br127_br40_prefill_then_steps_equals_the_whole(sequence):
    operands, truth, _ = sequence
    rows, pool = operands["rows"], operands["states"]
    block = int(rows.write_ids[0])
    prefill, step = jax.jit(pk.ssd), jax.jit(pk.ssd)
    names = ("x", "dt", "B", "C")
    scale = np.abs(truth).max()
    for length in (1, 63, 64, 65, 127, 128, 129):
        shorter = rows._replace(offsets=jnp.asarray([0, length], jnp.int32))
        y, states = prefill(**operands | {"rows": shorter})
        np.testing.assert_allclose(y[:length], truth[:length], atol=2e-6 * scale)
        assert not np.asarray(y[length:]).any()
        token = {name: operands[name][length : length + 1] for name in names}
        ids = jnp.asarray([block], jnp.int32)
        y, _ = step(**operands | token | {"states": states, "rows": decode_rows(ids, ids)})
        np.testing.assert_allclose(y[0], truth[length], atol=2e-6 * scale)
    assert pool.shape[0] == 2


def test_br127_steps_do_not_drift_with_length():
    """130 steps of convolution and state against float64 loops."""
    operands = make_operands(Case("ssd_step", {"H": 2, "P": 4, "G": 1, "N": 8}, (1,)), seed=8)
    kernel = make_operands(Case("conv_step", {"D": 24, "K": 4}, (1,)), seed=8)
    operands |= {name: kernel[name] for name in ("weight", "bias", "windows")}
    ids = jnp.ones(1, jnp.int32)
    rng = np.random.default_rng(9)
    xbc = rng.normal(size=(LENGTH, 24)).astype(np.float32)
    dt = rng.normal(size=(LENGTH, 2)).astype(np.float32)
    pools = (jnp.zeros_like(operands["windows"]), jnp.zeros_like(operands["states"]))
    fixed = ("weight", "bias", "A", "skip", "dt_bias")

    def step(pools, token):
        weight, bias, A, skip, dt_bias = (operands[name] for name in fixed)
        windows, states = pools
        conv, windows = pk.conv_step(
            token[0][None], weight, bias, windows, 1, ids, ids, activation="silu"
        )
        x, B, C = pk.split(conv, 8, 8, 8)
        x, B, C = x.reshaped(2, 4), B.reshaped(1, 8), C.reshaped(1, 8)
        y, states = pk.ssd_step(x, token[1][None], A, B, C, skip, dt_bias, states, 1, ids, ids)
        return (windows, states), y[0]

    _, y = jax.jit(lambda pools, tokens: jax.lax.scan(step, pools, tokens))(pools, (xbc, dt))
    none = np.zeros((1, 0), int)
    rows = (np.asarray([0, LENGTH]), [0], [1], none, none)
    conv, _ = loops.causal_conv(xbc, *(operands[k] for k in fixed[:2]), pools[0], 1, rows, "silu")
    x, B, C = np.split(conv, [8, 16], axis=1)
    truth, _ = loops.ssd(
        x.reshape(-1, 2, 4), dt, operands["A"], B[:, None], C[:, None], operands["skip"],
        operands["dt_bias"], pools[1], 1, rows,
    )  # fmt: skip
    np.testing.assert_allclose(y, truth, atol=2e-6 * np.abs(truth).max())


def test_mamba1_chunks_equal_tokens():
    """The variant for GPUs against the one for CPUs, checkpoints at all kinds of places too."""
    case = Case("selective_scan", {"D": 12, "N": 5}, (3, 64, 70, 0, 129, 1), 4, 3)
    o = make_operands(case, seed=2)
    rng = np.random.default_rng(0)
    dt = step_size(o["dt"], None)
    initial = jnp.asarray(rng.normal(size=(6, 5, 12)), jnp.float32)
    args = (o["x"], dt, o["A"].T, o["B"], o["C"], initial, o["rows"])
    total = int(o["rows"].offsets[-1])
    tokens, chunks = jax.jit(selective.scan_tokens)(*args), jax.jit(selective.scan_chunks)(*args)
    alive = np.flatnonzero((np.diff(o["rows"].offsets) > 0) & (np.asarray(o["rows"].write_ids) > 0))
    points = np.flatnonzero(np.isin(np.arange(18) // 3, alive))
    owned = np.repeat(np.arange(6), np.diff(o["rows"].offsets))
    keep = np.flatnonzero(np.isin(owned, alive))
    assert total == len(owned)
    for a, b, index in zip(tokens, chunks, (keep, alive, points), strict=True):
        a, b = np.asarray(a)[index], np.asarray(b)[index]
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(a).max())
