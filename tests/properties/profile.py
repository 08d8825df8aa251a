"""How hypothesis runs here: the same examples every time, so that a failure is one for everybody."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(count: int, **more) -> settings:
    """Settings for a test of so many examples."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow], **more,
    )  # fmt: skip
