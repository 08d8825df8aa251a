"""Which implementation runs an op, and whether its operands fit together.

An implementation is a module with a function for every op that it can run. If it cannot run every
call, it also has `supports(op, operands) -> str | None`, which gives its reason for declining.
"""

import functools
from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cpu, mosaic, reference, xla

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "cpu": cpu, "mosaic": mosaic, "reference": reference, "xla": xla,
}  # fmt: skip
# Those that run every call on every device.
PORTABLE = ("reference", "xla")
# Tried in this order when the caller names none; the last one runs everything.
PREFERENCE = ("mosaic", "cpu", "xla")


def declines(name: str, op: str, operands: Mapping[str, Any]) -> str | None:
    """Why implementation `name` cannot run this call of `op`; None if it can."""
    module = IMPLEMENTATIONS[name]
    if not hasattr(module, op):
        return f"{name} has no {op}"
    supports = getattr(module, "supports", None)
    return supports(op, operands) if supports else None


def choose(op: str, implementation: str | None, operands: Mapping[str, Any]) -> str:
    """Name of the implementation that runs this call.

    Raises ValueError if `implementation` is unknown, or is known and declines the call.
    """
    if implementation is None:
        return next(name for name in PREFERENCE if declines(name, op, operands) is None)
    if implementation not in IMPLEMENTATIONS:
        choices = ", ".join(repr(name) for name in sorted(IMPLEMENTATIONS))
        raise ValueError(
            f"{op}: unknown implementation {implementation!r}; use one of {choices}, or None to let"
            " the call choose"
        )
    reason = declines(implementation, op, operands)
    if reason is not None:
        raise ValueError(f"{op}: implementation {implementation!r} declines this call: {reason}")
    return implementation


@functools.cache
def _compiled(name: str, op: str, options: tuple[str, ...]):
    # jit here, not only at the callers': layers that share shapes are traced once.
    return jax.jit(getattr(IMPLEMENTATIONS[name], op), static_argnames=options)


def run(
    op: str, implementation: str | None, operands: Mapping[str, Any], **options: Hashable
) -> Any:
    """Runs `op` on the implementation that `choose` picks; `options` are static."""
    name = choose(op, implementation, {**operands, **options})
    return _compiled(name, op, tuple(sorted(options)))(**operands, **options)


def check_shapes(op: str, **operands: tuple[Any, str]) -> dict[str, int]:
    """Sizes of the dimensions in `name=(array, "T H P")`, in which a name has one size throughout.

    A dimension is a name, a name plus or less 1, or `_` for any size; operands that are None are
    skipped. Raises ValueError with the shapes expected and given.
    """
    sizes: dict[str, int] = {}
    for name, (array, spec) in operands.items():
        if array is None:
            continue
        dims, shape = spec.split(), jnp.shape(array)
        known: list[int | str] = []
        for dim, size in zip(dims, shape, strict=False):
            base, offset = (dim[:-2], int(dim[-2:])) if dim[-2:] in ("-1", "+1") else (dim, 0)
            known.append(size if dim == "_" else sizes.setdefault(base, size - offset) + offset)
        if len(dims) != len(shape) or tuple(known) != shape:
            wanted = [*map(str, known), *dims[len(known) :]]
            raise ValueError(
                f"{op}: {name} must have shape [{', '.join(dims)}] = [{', '.join(wanted)}],"
                f" got [{', '.join(map(str, shape))}]"
            )
    return sizes


def check_types(op: str, kind: Any, **operands: Any) -> None:
    """Raises TypeError for an operand whose dtype is not of `kind`, such as `jnp.floating`."""
    for name, array in operands.items():
        if array is not None and not jnp.issubdtype(jnp.result_type(array), kind):
            raise TypeError(
                f"{op}: {name} must hold {kind.__name__} numbers, got {jnp.result_type(array)}"
            )
