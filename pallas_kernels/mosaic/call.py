"""How a kernel is called: optional operands, pools updated in place, one lowering for all layers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def call(
    body: Callable,
    operands: Mapping[str, Any],
    pool: jax.Array,
    out: jax.ShapeDtypeStruct | None,
    *,
    grid: Mapping[str, int],
    scratch: Mapping[str, Any] | None = None,
    threads: int | None = None,
    interpret: Any = None,
) -> tuple[Any, jax.Array]:
    """Runs `body(refs, pool, y)` and returns `(y, pool)`; there is no `y` if `out` is None.

    `refs` maps every name of `operands` to a ref, or to None where the operand is None. The pool is
    one buffer before and after, if the caller lets XLA donate it. With `threads`, that many
    warpgroups run the body, each with its number on the axis "thread"; layouts and the barriers that
    keep them in order are the body's own. With `scratch`, a further argument maps its names to refs.
    """
    names = [name for name, operand in operands.items() if operand is not None]
    absent = dict.fromkeys(operands.keys() - set(names))

    def kernel(*refs, **shared):
        inputs, rest = refs[: len(names)], refs[len(names) :]
        more = () if scratch is None else (shared,)
        body({**dict(zip(names, inputs, strict=True)), **absent}, *rest, *more)

    kernel.__name__ = body.__name__
    options: dict[str, Any] = {}
    parameters = plgpu.CompilerParams(approx_math=True)
    if threads:
        options = {"num_threads": threads, "thread_name": "thread", "scratch_types": scratch or {}}
        # Lane semantics lower many small operations several times faster.
        parameters = plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        )
    ref = jax.new_ref(pool)
    y = plgpu.kernel(
        kernel,
        out_type=() if out is None else out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=parameters,
        interpret=interpret,
        **options,
    )(*(operands[name] for name in names), ref)
    return y, jax.freeze(ref)


def scalar_operand(layer) -> jax.Array:
    """A layer index as the array of one element that kernels load it from."""
    return jnp.asarray(layer, jnp.int32).reshape(1)
