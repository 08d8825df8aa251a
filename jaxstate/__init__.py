"""A state engine for Mamba-style language models, in JAX and Pallas.

Start with `LM.load("demo").generate("Once upon a time")`; the parts that it is made of are values to
build on: `CacheSpec`, `BlockPool`, `BlockTables`, `StateCache`, `Engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxstate.errors import (
    CapacityError,
    CheckpointError,
    JaxstateError,
    OwnershipError,
    PlanError,
    RequestError,
    SnapshotError,
    SpecError,
)
from jaxstate.request import Completion, Event, Request, SamplingParams, explain

if TYPE_CHECKING:
    from jaxstate.engine import Engine
    from jaxstate.lm import LM
    from jaxstate.models import load_model
    from jaxstate.sequences import Sequences
    from jaxstate.sizing import Sizes
    from jaxstate.state import BlockPool, BlockTables, CacheSpec, GroupSpec, Snapshot, StateCache
    from jaxstate.text import Tokenizer

# What needs jax is imported when it is first used, so that the command line answers --help at once.
_LAZY = {
    "BlockPool": "jaxstate.state",
    "BlockTables": "jaxstate.state",
    "CacheSpec": "jaxstate.state",
    "Engine": "jaxstate.engine",
    "GroupSpec": "jaxstate.state",
    "LM": "jaxstate.lm",
    "Sequences": "jaxstate.sequences",
    "Sizes": "jaxstate.sizing",
    "Snapshot": "jaxstate.state",
    "StateCache": "jaxstate.state",
    "Tokenizer": "jaxstate.text",
    "load_model": "jaxstate.models",
}

__all__ = [
    "LM",
    "BlockPool",
    "BlockTables",
    "CacheSpec",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "Engine",
    "Event",
    "GroupSpec",
    "JaxstateError",
    "OwnershipError",
    "PlanError",
    "Request",
    "RequestError",
    "SamplingParams",
    "Sequences",
    "Sizes",
    "Snapshot",
    "SnapshotError",
    "SpecError",
    "StateCache",
    "Tokenizer",
    "explain",
    "load_model",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxstate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
