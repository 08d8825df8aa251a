"""The public ops on rows alone, which read and write no block: products with a matrix, and norms."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import check_shapes, check_types, run
from pallas_kernels.ops import Matrix


def rows_matmul(
    x: Matrix,
    weight: Float[Array, "O I"],
    residual: Float[Array, "R O"] | None = None,
    *,
    dtype: Any,
    implementation: str | None = None,
) -> Float[Array, "R O"]:
    """`x @ weight.T` of up to some hundred rows, summed in float32 and rounded to `dtype`.

    `x[R, I]` may be `Columns`. With a `residual`, the rounded product is added to it, in its dtype.
    No row's result depends on another row. Products of float32 numbers are not rounded before.

    Raises ValueError for shapes that do not fit or an unknown implementation, and TypeError for
    dtypes.
    """
    op, operands = "rows_matmul", {"x": x, "weight": weight, "residual": residual}
    check_shapes(op, x=(x, "R I"), weight=(weight, "O I"), residual=(residual, "R O"))
    check_types(op, jnp.floating, **operands)
    return run(op, implementation, operands, dtype=jnp.dtype(dtype))


def rms_norm(
    x: Float[Array, "R D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "R D"]:
    """Rows over their root mean square (arXiv:1910.07467), times `weight` and in its dtype.

    Arithmetic is float32; `eps` is added to the mean square. Raises ValueError for shapes that do
    not fit or an unknown implementation, and TypeError for dtypes.
    """
    op, operands = "rms_norm", {"x": x, "weight": weight}
    check_shapes(op, x=(x, "R D"), weight=(weight, "D"))
    check_types(op, jnp.floating, **operands)
    return run(op, implementation, operands, eps=float(eps))
