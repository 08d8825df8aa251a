"""Which block each row's tokens live in: `int32[rows, capacity]` ids per group, as an immutable value.

A cell that holds 0 names the null block. A row is cleared whole, in every group, over its full width, so nothing of a
former tenant is left for a reader to find; the ids a step works with are looked up here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from jaxstate.errors import CapacityError, OwnershipError, SpecError
from jaxstate.state.ids import whole_number, whole_numbers
from jaxstate.state.spec import NULL, CacheSpec, format_leaves, has_values
from jaxstate.typing import Array, Bool, Int
from pallas_kernels.blocks import read_cells, write_cells


class Cells(struct.PyTreeNode):
    """Table cells to be written: id `ids[i]` at `rows[i]`, `columns[i]`; an id of 0 marks an unused entry."""

    rows: Int[Any, "n"]
    columns: Int[Any, "n"]
    ids: Int[Any, "n"]


class BlockTables(struct.PyTreeNode):
    """Block ids per group, row and column.

    Example:
      >>> tables = BlockTables.empty(spec)
      >>> tables = tables.write(row=0, ids={"mamba": [3]})
      >>> tables.clear_row(0)
    """

    ids: dict[str, Int[Array, "rows capacity"]]

    @classmethod
    def empty(cls, spec: CacheSpec) -> BlockTables:
        """Tables whose every cell is null."""
        return cls(
            {name: jnp.zeros((spec.rows, spec.capacity(name)), jnp.int32) for name in spec.names}
        )

    @property
    def rows(self) -> int:
        return next(iter(self.ids.values())).shape[0]

    def write(
        self, row: int | Array, ids: Mapping[str, Any], start: Mapping[str, int] | int = 0
    ) -> BlockTables:
        """Writes `ids[group]` into the row, from column `start` on: over all groups or not at all.

        Works under `jax.jit`: sizes and columns are static and are checked when traced; rows and ids are checked where
        they are known, and are never wrapped or clamped where they are not.

        Raises:
          CapacityError: more ids than the group's row has columns left.
          OwnershipError: a null, negative or repeated id, one that no int32 holds, or a row or column that is not
            there. A table does not know how many blocks the pool has; `rules.check_plan` does.
        """
        entries = {}
        for group, given in ids.items():
            table = self._table(group)
            # Wide first: a cast to int32 would wrap an id that is too large onto another block.
            given = (
                given
                if isinstance(given, Tracer)
                else whole_numbers(given, f"group {group!r}: ids")
            )
            first = start if isinstance(start, int) else start.get(group, 0)
            end = first + given.shape[0]
            if first < 0:
                raise OwnershipError("columns are in range", f"group {group!r}: column {first}")
            if end > table.shape[1]:
                raise CapacityError(
                    request=f"row {row}", group=group, need=end, capacity=table.shape[1], unit="block ids in a row",
                    remedy="raise the spec's max_len, or write fewer blocks",
                )  # fmt: skip
            if isinstance(given, np.ndarray):
                bad = (given <= NULL) | (given > np.iinfo(np.int32).max)
                if bad.any() or len(np.unique(given)) != len(given):
                    raise OwnershipError(
                        "rows name blocks once, and never null",
                        f"group {group!r}: ids are {given.tolist()}",
                    )
                given = given.astype(np.int32)
            columns = jnp.arange(first, end, dtype=jnp.int32)
            entries[group] = Cells(jnp.full(given.shape, row, jnp.int32), columns, given)
        self._check_row(row)
        return self.update(entries=entries)

    def clear_row(self, row: int | Array) -> BlockTables:
        """Makes every cell of the row null, in every group; OwnershipError when the row is not there."""
        self._check_row(row)
        return self.update(clear=jnp.arange(self.rows) == row)

    def update(
        self, clear: Bool[Any, "rows"] | None = None, entries: Mapping[str, Cells] | None = None
    ) -> BlockTables:
        """Clears the marked rows, then writes the entries: what a step does with its plan's, which was checked."""
        tables = dict(self.ids)
        if clear is not None:
            tables = {
                group: jnp.where(jnp.asarray(clear)[:, None], NULL, table)
                for group, table in tables.items()
            }
        for group, cells in (entries or {}).items():
            tables[group] = write_cells(tables[group], cells.rows, cells.columns, cells.ids)
        return self.replace(ids=tables)

    def lookup(
        self, group: str, columns: Int[Array, "rows"], live: Bool[Array, "rows"]
    ) -> Int[Array, "rows"]:
        """The id at each row's column; null where the row is not live or the column is outside the table."""
        return jnp.where(live, read_cells(self.ids[group], columns), NULL)

    def _table(self, group: str) -> Array:
        if group not in self.ids:
            raise SpecError(f"there is no group {group!r}; the groups are {sorted(self.ids)}")
        return self.ids[group]

    def _check_row(self, row: int | Array) -> None:
        if isinstance(row, Tracer):
            return
        known = whole_number(row, "row")
        if not 0 <= known < self.rows:
            raise OwnershipError(
                "rows are in range", f"row {known} is outside the tables' {self.rows} rows"
            )

    def __repr__(self) -> str:
        if not has_values(self.ids) or not isinstance(self.ids, dict):
            return "BlockTables(\n" + "\n".join(format_leaves(self.ids)) + "\n)"
        lines = []
        for group, table in self.ids.items():
            ids = np.asarray(table)
            used = np.flatnonzero((ids != NULL).any(1))
            lines.append(
                f"  {group}: {len(used)} of {ids.shape[0]} rows used, {ids.shape[1]} ids a row"
            )
            for row in used[:16]:
                last = int(np.flatnonzero(ids[row])[-1])
                lines.append(f"    row {row}: {' '.join(map(str, ids[row, : last + 1].tolist()))}")
        return "BlockTables(\n" + "\n".join(lines) + "\n)"
