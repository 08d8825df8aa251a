"""Frozen values that check nothing when they are made, made in a fraction of the time that their class takes."""

from __future__ import annotations

from typing import Any


def changed[T](value: T, /, **fields: Any) -> T:
    """The value with other fields, as `dataclasses.replace` makes it."""
    after = object.__new__(type(value))
    after.__dict__.update(value.__dict__, **fields)
    return after


def construct[T](kind: type[T], /, **fields: Any) -> T:
    """A value with these fields, all that have no default among them."""
    value = object.__new__(kind)
    value.__dict__.update(fields)
    return value
