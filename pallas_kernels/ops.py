"""The public ops: check the shapes, choose an implementation, run it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.columns import Columns
from pallas_kernels.dispatch import check_shapes, check_types, run
from pallas_kernels.rows import Rows

Layer = int | Int[Array, ""]
Matrix = Float[Array, "R C"] | Columns
NO_LIMIT = (0.0, float("inf"))


def _floats(op: str, **operands: tuple[Any, str]) -> tuple[dict[str, Any], dict[str, int]]:
    """The arrays of `name=(array, shape)` and the sizes of their dimensions, checked."""
    arrays = {name: array for name, (array, _) in operands.items()}
    sizes = check_shapes(op, **operands)
    check_types(op, jnp.floating, **arrays)
    return arrays, sizes


def _ids(op: str, count: int, read_ids, write_ids) -> dict[str, Int[Array, "R"]]:
    """The checked ids of a step op's `count` rows."""
    ids = {"read_ids": read_ids, "write_ids": write_ids}
    for name, array in ids.items():
        if jnp.shape(array) != (count,):
            raise ValueError(
                f"{op}: {name} must have shape [R] = [{count}], got {jnp.shape(array)}"
            )
    check_types(op, jnp.integer, **ids)
    return ids


def _check_rows(op: str, rows: Rows) -> None:
    check_shapes(
        op,
        read_ids=(rows.read_ids, "R"),
        write_ids=(rows.write_ids, "R"),
        offsets=(rows.offsets, "R+1"),
        checkpoint_ids=(rows.checkpoint_ids, "R M"),
        checkpoint_positions=(rows.checkpoint_positions, "R M"),
    )
    check_types(op, jnp.integer, **rows._asdict())


def _check_activation(op: str, activation: str | None) -> None:
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: unknown activation {activation!r}; use 'silu' or None")


def _check_groups(op: str, heads: int, groups: int) -> None:
    if groups < 1 or heads % groups:
        raise ValueError(f"{op}: {heads} heads cannot be shared evenly by {groups} groups")


def _check_limit(op: str, dt_limit: tuple[float, float]) -> tuple[float, float]:
    low, high = (float(bound) for bound in dt_limit)
    if not 0.0 <= low <= high:
        raise ValueError(f"{op}: dt_limit must satisfy 0 <= low <= high, got ({low}, {high})")
    return low, high


def _layer(layer: Layer) -> Int[Array, ""]:
    # An array whatever it was, so that a Python int does not make another trace.
    return jnp.asarray(layer, jnp.int32)


def fill_blocks(
    pool: Shaped[Array, "layers blocks ..."],
    ids: Int[Array, "n"],
    value: complex | Shaped[Array, ""],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "layers blocks ..."]:
    """The pool with `value` in every element of blocks `ids`, in all layers; id 0 is dropped.

    So are ids outside the pool. Raises ValueError for an unknown implementation.
    """
    ids = jnp.asarray(ids)
    if not ids.shape[0]:
        return pool
    operands = {"pool": pool, "ids": ids, "value": jnp.asarray(value, pool.dtype)}
    return run("fill_blocks", implementation, operands)


def causal_conv(
    x: Matrix,
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: Layer,
    rows: Rows,
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks K-1 D"]]:
    """Causal depthwise convolution of packed rows, then `activation` ("silu" or None).

    `weight[K - 1]` weighs the newest input. A row's state is its last K - 1 inputs, oldest first.
    `x[T, D]` may be `Columns`. Arithmetic is float32; `y` has the dtype of `x`. Returns
    `(y, windows)`.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation, and
    TypeError for dtypes.
    """
    op = "causal_conv"
    operands, _ = _floats(
        op,
        x=(x, "T D"),
        weight=(weight, "K D"),
        bias=(bias, "D"),
        windows=(windows, "_ _ K-1 D"),
    )
    _check_rows(op, rows)
    _check_activation(op, activation)
    operands |= {"layer": _layer(layer), "rows": rows}
    return run(op, implementation, operands, activation=activation)


def selective_scan(
    x: Float[Array, "T D"],
    dt: Float[Array, "T D"],
    A: Float[Array, "D N"],
    B: Matrix,
    C: Matrix,
    skip: Float[Array, "D"] | None,
    z: Matrix | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: Layer,
    rows: Rows,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "layers blocks N D"]]:
    """Mamba's selective scan of packed rows (Gu & Dao 2023, arXiv:2312.00752).

    With `dt = softplus(dt + dt_bias)`: `h = exp(dt A) h + dt B x`, `y = C h + skip x`, times
    `silu(z)` if `z` is given. Arithmetic is float32; `y` has the dtype of `x`. Splitting a row over
    calls at multiples of 64 tokens gives the same bits under jit if `states` is float32. `B[T, N]`,
    `C[T, N]` and `z[T, D]` may be `Columns`. Returns `(y, states)`.

    Raises ValueError for shapes that do not fit or an unknown implementation, and TypeError for
    dtypes.
    """
    op = "selective_scan"
    operands, _ = _floats(
        op,
        x=(x, "T D"),
        dt=(dt, "T D"),
        A=(A, "D N"),
        B=(B, "T N"),
        C=(C, "T N"),
        skip=(skip, "D"),
        z=(z, "T D"),
        dt_bias=(dt_bias, "D"),
        states=(states, "_ _ N D"),
    )
    _check_rows(op, rows)
    return run(op, implementation, operands | {"layer": _layer(layer), "rows": rows})


def ssd(
    x: Float[Array, "T H P"] | Columns,
    dt: Matrix,
    A: Float[Array, "H"],
    B: Float[Array, "T G N"] | Columns,
    C: Float[Array, "T G N"] | Columns,
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: Layer,
    rows: Rows,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
    chunk: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H P"], Float[Array, "layers blocks H P N"]]:
    """Mamba-2's state space duality over packed rows (Dao & Gu 2024, arXiv:2405.21060).

    With `dt = clip(softplus(dt + dt_bias), *dt_limit)`, per head `h = exp(dt A) h + dt x B` and
    `y = h C + skip x`; heads `g H / G` to `(g + 1) H / G` share `B` and `C` of group `g`. Arithmetic
    is float32; `y` has the dtype of `x`. Splitting a row over calls at multiples of `chunk` gives
    the same bits under jit if `states` is float32. `x[T, H, P]`, `dt[T, H]`, `B[T, G, N]` and
    `C[T, G, N]` may be `Columns`. Returns `(y, states)`.

    Raises ValueError for shapes or options that do not fit or an unknown implementation, and
    TypeError for dtypes.
    """
    op = "ssd"
    operands, _ = _floats(
        op,
        x=(x, "T H P"),
        dt=(dt, "T H"),
        A=(A, "H"),
        B=(B, "T G N"),
        C=(C, "T G N"),
        skip=(skip, "H"),
        dt_bias=(dt_bias, "H"),
        states=(states, "_ _ H P N"),
    )
    _check_rows(op, rows)
    _check_groups(op, x.shape[1], B.shape[1])
    dt_limit = _check_limit(op, dt_limit)
    if chunk < 1:
        raise ValueError(f"{op}: chunk must be at least 1, got {chunk}")
    operands |= {"layer": _layer(layer), "rows": rows}
    return run(op, implementation, operands, dt_limit=dt_limit, chunk=chunk)


def conv_step(
    x: Matrix,
    weight: Float[Array, "K D"],
    bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: Layer,
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks K-1 D"]]:
    """`causal_conv` of one token a row, `x[R, D]`, which may be `Columns`. Returns `(y, windows)`.

    Raises ValueError for shapes that do not fit, an unknown activation or implementation, and
    TypeError for dtypes.
    """
    op = "conv_step"
    operands, sizes = _floats(
        op,
        x=(x, "R D"),
        weight=(weight, "K D"),
        bias=(bias, "D"),
        windows=(windows, "_ _ K-1 D"),
    )
    _check_activation(op, activation)
    operands |= {"layer": _layer(layer), **_ids(op, sizes["R"], read_ids, write_ids)}
    return run(op, implementation, operands, activation=activation)


def selective_step(
    x: Matrix,
    dt: Matrix,
    A: Float[Array, "D N"],
    B: Matrix,
    C: Matrix,
    skip: Float[Array, "D"] | None,
    z: Matrix | None,
    dt_bias: Float[Array, "D"] | None,
    states: Float[Array, "layers blocks N D"],
    layer: Layer,
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    dt_weight: Float[Array, "D K"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "layers blocks N D"]]:
    """`selective_scan` of one token a row (arXiv:2312.00752). Returns `(y, states)`.

    The step sizes before bias and softplus are `dt[R, D]` or, with `dt_weight`, the product
    `dt[R, K] @ dt_weight.T`, summed in float32 and rounded to the dtype of `dt`. `x[R, D]`, `dt`,
    `B[R, N]`, `C[R, N]` and `z[R, D]` may be `Columns`.

    Raises ValueError for shapes that do not fit or an unknown implementation, and TypeError for
    dtypes.
    """
    op = "selective_step"
    operands, sizes = _floats(
        op,
        x=(x, "R D"),
        dt=(dt, "R D" if dt_weight is None else "R K"),
        A=(A, "D N"),
        B=(B, "R N"),
        C=(C, "R N"),
        skip=(skip, "D"),
        z=(z, "R D"),
        dt_bias=(dt_bias, "D"),
        states=(states, "_ _ N D"),
        dt_weight=(dt_weight, "D K"),
    )
    operands |= {"layer": _layer(layer), **_ids(op, sizes["R"], read_ids, write_ids)}
    return run(op, implementation, operands)


def ssd_step(
    x: Float[Array, "R H P"] | Columns,
    dt: Matrix,
    A: Float[Array, "H"],
    B: Float[Array, "R G N"] | Columns,
    C: Float[Array, "R G N"] | Columns,
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    states: Float[Array, "layers blocks H P N"],
    layer: Layer,
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    gate: Matrix | None = None,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
    implementation: str | None = None,
) -> tuple[Float[Array, "R H P"], Float[Array, "layers blocks H P N"]]:
    """`ssd` of one token a row (arXiv:2405.21060). Returns `(y, states)`.

    If `gate[R, HP]` is given, `y` is multiplied by its silu. `x[R, H, P]`, `dt[R, H]`, `B[R, G, N]`,
    `C[R, G, N]` and `gate` may be `Columns`.

    Raises ValueError for shapes or options that do not fit or an unknown implementation, and
    TypeError for dtypes.
    """
    op = "ssd_step"
    operands, sizes = _floats(
        op,
        x=(x, "R H P"),
        dt=(dt, "R H"),
        A=(A, "H"),
        B=(B, "R G N"),
        C=(C, "R G N"),
        skip=(skip, "H"),
        dt_bias=(dt_bias, "H"),
        states=(states, "_ _ H P N"),
        gate=(gate, "R HP"),
    )
    _check_groups(op, sizes["H"], sizes["G"])
    if gate is not None and sizes["HP"] != sizes["H"] * sizes["P"]:
        raise ValueError(
            f"{op}: gate must have H P = {sizes['H'] * sizes['P']} columns, got {sizes['HP']}"
        )
    dt_limit = _check_limit(op, dt_limit)
    operands |= {"layer": _layer(layer), **_ids(op, sizes["R"], read_ids, write_ids)}
    return run(op, implementation, operands, dt_limit=dt_limit)


def projected_conv_step(
    x: Matrix,
    weight: Float[Array, "O I"],
    conv_weight: Float[Array, "K D"],
    conv_bias: Float[Array, "D"] | None,
    windows: Float[Array, "layers blocks K-1 D"],
    layer: Layer,
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    norm_weight: Float[Array, "I"] | None = None,
    *,
    first: int,
    eps: float = 0.0,
    activation: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "R O"], Float[Array, "layers blocks K-1 D"]]:
    """`x @ weight.T` of few rows, of which columns `first` to `first + D` go through `conv_step`.

    It has the bits of `rows_matmul`, rounded to the dtype of `x`, followed by `conv_step`; other columns
    are the projection's, those of null rows too. With `norm_weight` those of `rms_norm(x, norm_weight,
    eps=eps)` in place of `x`. `x[R, I]` may be `Columns`. Returns `(y, windows)`.

    Raises ValueError for shapes or options that do not fit or an unknown implementation, and
    TypeError for dtypes.
    """
    op = "projected_conv_step"
    operands, sizes = _floats(
        op,
        x=(x, "R I"),
        weight=(weight, "O I"),
        conv_weight=(conv_weight, "K D"),
        conv_bias=(conv_bias, "D"),
        windows=(windows, "_ _ K-1 D"),
        norm_weight=(norm_weight, "I"),
    )
    if not 0 <= first <= sizes["O"] - sizes["D"]:
        raise ValueError(
            f"{op}: {sizes['D']} channels from column {first} on are not within {sizes['O']} columns"
        )
    _check_activation(op, activation)
    operands |= {"layer": _layer(layer), **_ids(op, sizes["R"], read_ids, write_ids)}
    return run(op, implementation, operands, first=first, eps=float(eps), activation=activation)
