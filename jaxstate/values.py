"""Copies of frozen values."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(value: T, **fields: Any) -> T:
    """`dataclasses.replace` for values that check nothing when they are made; several times as fast."""
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__, **fields)
    return made
