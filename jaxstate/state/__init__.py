"""Block tables, state caches, the block pool and snapshots: immutable values, usable without the engine."""

from jaxstate.state.cache import StateCache
from jaxstate.state.pool import BlockPool
from jaxstate.state.snapshot import Snapshot
from jaxstate.state.spec import CacheSpec, GroupSpec
from jaxstate.state.tables import BlockTables, Cells

__all__ = [
    "BlockPool",
    "BlockTables",
    "CacheSpec",
    "Cells",
    "GroupSpec",
    "Snapshot",
    "StateCache",
]
