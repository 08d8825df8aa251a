"""The whole suite runs with memory that nobody may read filled with NaN."""

import os

os.environ.setdefault("JAXSTATE_POISON", "1")
