"""Which implementation runs an op, and whether its operands fit together.

An implementation is a module with a function for every op that it can run. If it cannot run every
call, it also has `supports(op, operands) -> str | None`, which gives its reason for declining. With
`TAKES_COLUMNS` it takes matrices as `Columns` too.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import cpu, mosaic, reference, xla
from pallas_kernels.columns import Columns, sliced

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "cpu": cpu, "mosaic": mosaic, "reference": reference, "xla": xla,
}  # fmt: skip
# Those that run every call on every device.
PORTABLE = ("reference", "xla")
# Tried in this order when the caller names none; the last one runs everything.
PREFERENCE = ("mosaic", "cpu", "xla")

# Part of the key of jit's caches, so that what was traced under another preference is not found.
_order = jax.make_user_context(None)


class Choice(NamedTuple):
    """What runs an op, and why those that come before it do not."""

    name: str
    declined: tuple[tuple[str, str], ...] = ()


_chosen: dict[str, Choice] = {}


def chosen() -> dict[str, Choice]:
    """The latest choice for each op that was traced in this process."""
    return dict(_chosen)


def describe(choices: Mapping[str, Choice]) -> str:
    """Who runs what, and why not who comes first, in one line."""
    ops: dict[str, list[str]] = {}
    declined: dict[tuple[str, str], list[str]] = {}
    for op, choice in sorted(choices.items()):
        ops.setdefault(choice.name, []).append(op)
        for name, why in choice.declined:
            # That an implementation does not have an op is no news.
            if op not in why:
                declined.setdefault((name, why), []).append(op)
    parts = [f"{', '.join(names)} by {name}" for name, names in ops.items()]
    parts += [
        f"{name} declines {', '.join(names)}: {why}" for (name, why), names in declined.items()
    ]
    return "; ".join(parts)


def prefer(*names: str) -> contextlib.AbstractContextManager:
    """In this context a call that names no implementation tries these, in turn.

    Raises ValueError for a name that is not known, and if the last one does not run everything.
    """
    for name in names:
        _check_known("prefer", name)
    if not names or names[-1] not in PORTABLE:
        raise ValueError(f"prefer: the last of {names} must be one of {PORTABLE}")
    return _order(names)


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
        choice = _first(op, _order.value or PREFERENCE, operands)
        _chosen[op] = choice
        return choice.name
    _check_known(op, implementation)
    reason = declines(implementation, op, operands)
    if reason is not None:
        raise ValueError(f"{op}: implementation {implementation!r} declines this call: {reason}")
    return implementation


def _first(op: str, order: tuple[str, ...], operands: Mapping[str, Any]) -> Choice:
    declined = []
    for name in order:
        reason = declines(name, op, operands)
        if reason is None:
            return Choice(name, tuple(declined))
        declined.append((name, reason))
    raise AssertionError(f"nothing in {order} runs {op}")


def _check_known(op: str, name: str) -> None:
    if name not in IMPLEMENTATIONS:
        choices = ", ".join(repr(known) for known in sorted(IMPLEMENTATIONS))
        raise ValueError(
            f"{op}: unknown implementation {name!r}; use one of {choices}, or None to let the call"
            " choose"
        )


@functools.cache
def _compiled(function: Callable, options: tuple[str, ...]):
    # jit here, not only at the callers': layers that share shapes are traced once.
    return jax.jit(function, static_argnames=options)


def run(
    op: str, implementation: str | None, operands: Mapping[str, Any], **options: Hashable
) -> Any:
    """Runs `op` on the implementation that `choose` picks; `options` are static."""
    name = choose(op, implementation, {**operands, **options})
    if not getattr(IMPLEMENTATIONS[name], "TAKES_COLUMNS", False):
        operands = {key: sliced(operand) for key, operand in operands.items()}
    function = getattr(IMPLEMENTATIONS[name], op)
    return _compiled(function, tuple(sorted(options)))(**operands, **options)


def check_shapes(op: str, **operands: tuple[Any, str]) -> dict[str, int]:
    """Sizes of the dimensions in `name=(array, "T H P")`, in which a name has one size throughout.

    A dimension is a name, a name plus or less 1, or `_` for any size; operands that are None are
    skipped. Raises ValueError with the shapes expected and given.
    """
    sizes: dict[str, int] = {}
    for name, (array, spec) in operands.items():
        if array is None:
            continue
        dims, shape = spec.split(), getattr(array, "shape", ()) or jnp.shape(array)
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
        if array is None:
            continue
        dtype = array.dtype if isinstance(array, Columns) else jnp.result_type(array)
        if not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{op}: {name} must hold {kind.__name__} numbers, got {dtype}")
