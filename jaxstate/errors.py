"""Every error a user can cause, as one family: catch `JaxstateError` to catch them all.

A message says what happened, with the numbers, and what to change. The numbers are also fields, so that callers need
not parse text. `assert` is kept for mistakes of our own.
"""

from __future__ import annotations

import functools


class JaxstateError(Exception):
    """Base of every error that jaxstate raises for a mistake of its user."""


class SpecError(JaxstateError, ValueError):
    """A state layout that cannot be: a size below one, a duplicate name, a pool too small for one row."""


class CapacityError(JaxstateError):
    """More blocks or tokens are needed than there is room for; nothing was changed and nothing was dispatched."""

    def __init__(
        self, *, request: str, group: str, need: int, capacity: int, unit: str, remedy: str
    ):
        self.request, self.group = request, group
        self.need, self.capacity, self.unit, self.remedy = need, capacity, unit, remedy
        super().__init__(
            f"request {request!r}, group {group!r}: needs {need} {unit}, has room for {capacity}; {remedy}"
        )

    def __reduce__(self):
        # An error may be raised in another process than it is caught in.
        names = ("request", "group", "need", "capacity", "unit", "remedy")
        given = {name: getattr(self, name) for name in names}
        return functools.partial(type(self), **given), ()


class OwnershipError(JaxstateError):
    """A block operation against the rules of ownership, such as a double free or a write to a sealed block."""

    def __init__(self, rule: str, message: str):
        self.rule, self._message = rule, message
        super().__init__(f"{message} (rule: {rule})")

    def __reduce__(self):
        return type(self), (self.rule, self._message)


class PlanError(JaxstateError):
    """A plan that breaks a rule; found on the host, before anything was dispatched."""

    def __init__(self, rule: str, message: str):
        self.rule, self._message = rule, message
        super().__init__(f"{message} (rule: {rule})")

    def __reduce__(self):
        return type(self), (self.rule, self._message)


class RequestError(JaxstateError, ValueError):
    """A request that cannot be served, with a stable `code` for programs and the parameter at fault."""

    def __init__(self, code: str, message: str, param: str | None = None):
        self.code, self.message, self.param = code, message, param
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.code, self.message, self.param)


class CheckpointError(JaxstateError):
    """A model folder that cannot be loaded as it stands: a missing file or tensor, a wrong shape, an unknown model."""


class SnapshotError(JaxstateError):
    """A snapshot that cannot be read or restored: another model, layout or dtype, or not a whole snapshot."""
