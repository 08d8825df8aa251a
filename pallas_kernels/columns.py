"""A part of a wider array as an operand, without a copy of it."""

import dataclasses
import functools
import math
from typing import Any

import jax
from jaxtyping import Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["start", "size", "inner"]
)
@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns `start` to `start + size` of `array`, as ops take them where they take a matrix.

    XLA copies what it slices before a kernel of ours sees it; this leaves the slicing to the kernel.
    """

    array: Array
    start: int
    size: int
    inner: tuple[int, ...] = ()  # what the columns are split into; none: nothing

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[:-1], *(self.inner or (self.size,)))

    def reshaped(self, *inner: int) -> "Columns":
        """The columns as an array of more axes, `inner` in place of the last one."""
        if math.prod(inner) != self.size:
            raise ValueError(f"{self.size} columns cannot be shaped as {inner}")
        return dataclasses.replace(self, inner=inner)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def sliced(self) -> Array:
        """The columns as an array of their own."""
        columns = jax.lax.slice_in_dim(self.array, self.start, self.start + self.size, axis=-1)
        return columns.reshape(self.shape)


def split(matrix: Array | Columns, *sizes: int) -> list[Columns]:
    """The columns of `matrix` in parts of these sizes, in order."""
    if sum(sizes) != matrix.shape[-1]:
        raise ValueError(f"parts of {sizes} columns do not make {matrix.shape[-1]}")
    array, first = parts(matrix)
    starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
    return [Columns(array, start, size) for start, size in zip(starts, sizes, strict=True)]


def sliced(operand: Any) -> Any:
    """The operand as an array; others than columns as they are."""
    return operand.sliced() if isinstance(operand, Columns) else operand


def parts(operand: Any) -> tuple[Any, int]:
    """The array that a kernel is handed for an operand, and the column at which it begins."""
    return (operand.array, operand.start) if isinstance(operand, Columns) else (operand, 0)
