"""The project's one legend of dimension names, and the array types that public signatures use.

| name | meaning |
| --- | --- |
| layers, blocks | leading axes of every cache leaf |
| rows | sequences in flight, one table row each |
| capacity | block ids a table row can hold |
| tokens | tokens of all rows, packed one row after another |
| steps | tokens a row generates in one dispatch |
| vocab, hidden | sizes of the model |
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Int32, Key, UInt32

PyTree = Any

Device = Any
"""A `jax.Device`, which jax does not export as a type."""

__all__ = [
    "Array", "BFloat16", "Bool", "Device", "Float", "Float32", "Int", "Int32", "Key", "PyTree", "UInt32",
]  # fmt: skip
