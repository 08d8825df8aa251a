"""Tests of what only a GPU can show; `make test-gpu` runs them, and elsewhere they are skipped."""

import jax
import pytest

from pallas_kernels.mosaic import support


@pytest.fixture(autouse=True, scope="session")
def gpu():
    """The GPU that the tests run on; skips where there is none."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and JAX's first device is {device.platform}")
    return device


@pytest.fixture
def hopper():
    """Skips where the kernels do not run."""
    reason = support.device_reason()
    if reason is not None:
        pytest.skip(f"the kernels decline: {reason}")
