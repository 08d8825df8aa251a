"""Reading a config.json: every field is checked, and one error names all that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxstate.errors import CheckpointError

_REQUIRED = object()


def _is_number(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return whole or isinstance(value, float)


class Fields:
    """The fields of one config, read one by one; `done` raises what was found.

    A field that this project does not compute is refused by name unless it has the value that changes nothing.
    """

    def __init__(self, values: Mapping[str, Any], what: str):
        self.values, self.what = values, what
        self.problems: list[str] = []

    def size(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self._wrong(name, value, f"a whole number of at least {least}")
        return least

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number that is not negative."""
        value = self._get(name, default)
        if _is_number(value) and 0 <= value < math.inf:
            return float(value)
        self._wrong(name, value, "a finite number of at least 0")
        return 0.0

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        self._wrong(name, value, "true or false")
        return False

    def limits(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """A pair of numbers, the first not above the second, which may be infinite."""
        value = self._get(name, default)
        if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)):
            low, high = float(value[0]), float(value[1])
            if 0 <= low <= high:
                return low, high
        self._wrong(name, value, "two numbers, 0 <= low <= high")
        return default

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or null for none."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list) else (value,)
        if all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31 for x in ids):
            return ids
        self._wrong(name, value, "a token id, a list of them, or null")
        return ()

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses any value but those allowed; an absent field is allowed."""
        if name in self.values and self.values[name] not in allowed:
            self.problems.append(
                f"{name} is {self.values[name]!r}, which is not supported; supported: "
                + ", ".join(map(repr, allowed))
            )

    def problem(self, text: str) -> None:
        """Adds a problem to the list."""
        self.problems.append(text)

    def done(self) -> None:
        """Raises CheckpointError when anything was wrong."""
        if self.problems:
            raise CheckpointError(f"{self.what}: " + "; ".join(self.problems))

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        return None if value is _REQUIRED else value

    def _wrong(self, name: str, value: Any, wanted: str) -> None:
        if name not in self.values:
            self.problems.append(f"{name} is missing; it must be {wanted}")
        else:
            self.problems.append(f"{name} is {value!r}; it must be {wanted}")
