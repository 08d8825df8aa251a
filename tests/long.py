"""Tests that the suite leaves out, since they take long beside what they show; `JAXSTATE_LONG_TESTS=1` runs them."""

import os

import pytest

WANTED = bool(os.environ.get("JAXSTATE_LONG_TESTS"))
long = pytest.mark.skipif(not WANTED, reason="takes long; JAXSTATE_LONG_TESTS=1 runs it")
