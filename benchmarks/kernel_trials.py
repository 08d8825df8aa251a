"""Random calls of the kernels, what is right for them in float64, and the comparison of the two."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.blocks import read_blocks
from pallas_kernels.cases import Case, make_rows

MAMBA = {"D": 5120, "N": 16, "rank": 160}
MAMBA2 = {"H": 80, "P": 64, "G": 1, "N": 128, "K": 4, "DC": 80 * 64 + 2 * 128}


def pool_shapes(op: str) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of a block of each pool, as `(inputs' dtype or float32)`."""
    m = MAMBA2
    windows = {"windows": ((m["K"] - 1, m["DC"]), None)}
    states = {"states": ((m["H"], m["P"], m["N"]), jnp.float32)}
    selective = {"states": ((MAMBA["N"], MAMBA["D"]), jnp.float32)}
    return {
        "conv_step": windows,
        "selective_step": selective,
        "low_rank_step": selective,
        "ssd_step": states,
    }[op]


def make_inputs(op: str, rows: int, dtype, key) -> dict[str, jax.Array]:
    """Random inputs of a call of `rows` rows."""
    D, N, m = MAMBA["D"], MAMBA["N"], MAMBA2
    if op in ("selective_step", "low_rank_step"):
        shapes = {
            "x": (rows, D), "dt": (rows, D), "A": (D, N), "B": (rows, N), "C": (rows, N), "skip": (D,),
            "z": (rows, D), "dt_bias": (D,),
        }  # fmt: skip
        if op == "low_rank_step":
            shapes |= {"dt": (rows, MAMBA["rank"]), "dt_weight": (D, MAMBA["rank"])}
    elif op == "conv_step":
        shapes = {"x": (rows, m["DC"]), "weight": (m["K"], m["DC"]), "bias": (m["DC"],)}
    else:
        shapes = {
            "x": (rows, m["H"], m["P"]), "dt": (rows, m["H"]), "A": (m["H"],),
            "B": (rows, m["G"], m["N"]), "C": (rows, m["G"], m["N"]), "skip": (m["H"],),
            "dt_bias": (m["H"],),
        }  # fmt: skip
    inputs = {}
    for name, shape in shapes.items():
        key, use = jax.random.split(key)
        value = jax.random.normal(use, shape, jnp.float32)
        if name == "dt_weight":
            value = value / MAMBA["rank"] ** 0.5
        inputs[name] = -jnp.exp(value) if name == "A" else value.astype(dtype)
    return inputs


def truth(op: str, inputs, states: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Outputs and new blocks in float64, from the old blocks of each row."""
    v = {name: value.astype(jnp.float64) for name, value in inputs.items()}
    if op == "conv_step":
        seen = jnp.concatenate([states["windows"], v["x"][:, None]], axis=1)
        y = jnp.einsum("rkd,kd->rd", seen, v["weight"]) + v["bias"]
        return y / (1 + jnp.exp(-y)), {"windows": seen[:, 1:]}
    if op == "low_rank_step":
        v["dt"] = jnp.dot(v["dt"], v["dt_weight"].T).astype(inputs["dt"].dtype).astype(jnp.float64)
    dt = jnp.log1p(jnp.exp(v["dt"] + v["dt_bias"]))
    if op in ("selective_step", "low_rank_step"):
        h = jnp.exp(dt[:, None] * v["A"].T) * states["states"]
        h = h + v["B"][:, :, None] * (dt * v["x"])[:, None]
        y = (jnp.einsum("rnd,rn->rd", h, v["C"]) + v["skip"] * v["x"]) * v["z"]
        return y / (1 + jnp.exp(-v["z"])), {"states": h}
    h = jnp.exp(dt * v["A"])[..., None, None] * states["states"]
    h = h + (dt[..., None] * v["x"])[..., None] * v["B"][:, :, None]
    y = jnp.einsum("rhpn,rn->rhp", h, v["C"][:, 0]) + v["skip"][:, None] * v["x"]
    return y, {"states": h}


def pool_dtype(wanted, dtype):
    return dtype if wanted is None else wanted


class Trial(NamedTuple):
    """Random operands of one call, and what is right for it."""

    op: str
    inputs: dict[str, jax.Array]
    pools: dict[str, jax.Array]
    read: jax.Array
    write: jax.Array
    y: jax.Array
    new: dict[str, jax.Array]


def make_trial(op: str, rows: int, dtype, seed: int) -> Trial:
    """Rows that start fresh, continue, fork and are null, over shuffled blocks; NaN elsewhere."""
    blocks = 2 * rows + 3
    ids = make_rows(Case(op, {}, (1,) * rows), np.random.default_rng(seed), blocks)

    @jax.jit
    def make(key, read):
        pools = {}
        for name, (shape, wanted) in pool_shapes(op).items():
            key, use = jax.random.split(key)
            values = jax.random.normal(use, (rows, *shape), jnp.float32)
            pool = jnp.full((2, blocks, *shape), jnp.nan, pool_dtype(wanted, dtype))
            values = values.astype(pool.dtype)
            pools[name] = pool.at[1, jnp.where(read > 0, read, blocks)].set(values, mode="drop")
        return make_inputs(op, rows, dtype, key), pools

    @jax.jit
    def right(inputs, pools, read):
        old = {name: read_blocks(pool, 1, read) for name, pool in pools.items()}
        old = {name: value.astype(jnp.float64) for name, value in old.items()}
        return truth(op, inputs, old)

    inputs, pools = make(jax.random.key(seed), ids.read_ids)
    with jax.enable_x64(True):
        y, new = right(inputs, pools, ids.read_ids)
    return Trial(op, inputs, pools, ids.read_ids, ids.write_ids, y, new)


def trial_shapes(op: str, rows: int, dtype) -> tuple[Any, ...]:
    """Shapes of the operands of a trial's call: inputs, pools, layer, read ids, write ids."""
    blocks = 2 * rows + 3
    pools = {
        name: jax.ShapeDtypeStruct((2, blocks, *shape), pool_dtype(wanted, dtype))
        for name, (shape, wanted) in pool_shapes(op).items()
    }
    inputs = jax.eval_shape(lambda key: make_inputs(op, rows, dtype, key), jax.random.key(0))
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return inputs, pools, jax.ShapeDtypeStruct((), jnp.int32), ids, ids


def bits(array: jax.Array) -> jax.Array:
    kind = jnp.uint16 if array.dtype.itemsize == 2 else jnp.uint32
    return lax.bitcast_convert_type(array, kind)


@jax.jit
def compare(pools, write, right, expected, y, after) -> tuple[dict[str, Any], dict[str, Any]]:
    """Largest errors as shares of the largest right value, and what must be true."""
    live = write > 0

    def worst(values):
        mask = live.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.max(jnp.where(mask, jnp.abs(values), 0))

    errors = {"y": worst(y.astype(jnp.float64) - right) / worst(right)}
    null = jnp.where(live.reshape((-1,) + (1,) * (y.ndim - 1)), 0, y)
    true = {"a null row's output is 0": jnp.all(null == 0)}
    for name, pool in after.items():
        new, before = expected[name], pools[name]
        errors[name] = worst(pool[1, write].astype(jnp.float64) - new) / worst(new)
        same = jnp.all(bits(pool) == bits(before), axis=tuple(range(2, pool.ndim)))
        named = jnp.zeros(pool.shape[1], bool).at[write].set(True).at[0].set(False)
        true[f"{name}: blocks that the call does not name keep their bits"] = jnp.all(
            same | (named & jnp.array([[False], [True]]))
        )
    return errors, true


def check(call: Callable, trial: Trial) -> tuple[dict[str, float], list[str]]:
    """Errors of a call, and what is wrong with it."""
    y, after = call(trial.inputs, trial.pools, jnp.int32(1), trial.read, trial.write)
    with jax.enable_x64(True):
        errors, true = jax.device_get(
            compare(trial.pools, trial.write, trial.y, trial.new, y, after)
        )
    wrong = [f"false: {name}" for name, value in true.items() if not value]
    for name, value in errors.items():
        # Step sizes of low rank are rounded to the inputs' dtype on their way to the state.
        within = name != "states" or trial.op == "low_rank_step"
        rounded = y.dtype != jnp.float32 and within
        if not value <= (2.0**-7 if rounded else 1e-5):
            wrong.append(f"{name}: error {value:.1e}")
    return {name: float(value) for name, value in errors.items()}, wrong
