"""Block ids and row numbers as a caller gives them: whole numbers, looked at before a cast makes them narrower."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxstate.errors import OwnershipError


def whole_numbers(values: Any, what: str) -> np.ndarray:
    """The values as `int64[n]`; a number by itself is one of them.

    Raises:
      OwnershipError: they are not whole numbers (a float is not cut to one, True is not 1).
    """
    array = np.atleast_1d(np.asarray(values))
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise OwnershipError("ids and counts are whole numbers", f"{what} are {values!r}")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise OwnershipError("ids are in range", f"{what} are {values!r}")
    return array.astype(np.int64)


def whole_number(value: Any, what: str) -> int:
    """The value as an int; OwnershipError when it is not a whole number."""
    if np.ndim(value) != 0:
        raise OwnershipError("ids and counts are whole numbers", f"{what} is {value!r}")
    return int(whole_numbers(value, what)[0])
