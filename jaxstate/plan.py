"""Everything that one step will do, made on the host in numpy and checked there before anything is dispatched.

A `StepPlan` has one shape for the life of an engine: lists are padded with the null id, row settings are dense and
masked. What a step may not do is refused here, by `check_plan`, with the rule that it breaks; compiled code has nothing
left that can fail. An idle row, rank or engine runs an ordinary plan whose rows are all null.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from flax import struct

from jaxstate.errors import CapacityError, PlanError
from jaxstate.request import MAX_STOP_IDS
from jaxstate.sampling import Sampling
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import NULL, CacheSpec, format_leaves, has_values
from jaxstate.state.tables import Cells
from jaxstate.typing import Bool, Int32

HostTables = dict[str, np.ndarray]
"""The host's copy of the block tables, `int32[rows, capacity]` per group."""

Holders = list[str | None]
"""Whose each row is while the plan runs; None for a null row."""


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """The static sizes of an engine's plans.

    `chunk_tokens` is how many prompt tokens one prefill step takes, `copies` how many block copies per group a plan can
    hold. The zero and cell lists hold a full row, or one block for every row, whichever is more.
    """

    spec: CacheSpec
    chunk_tokens: int
    copies: int = 0

    def width(self, group: str) -> int:
        """Entries in a plan's cell and zero lists of this group."""
        return max(self.spec.rows, self.spec.capacity(group))


class Admission(struct.PyTreeNode):
    """Settings of the rows that start with this plan; rows not marked in `rows` keep theirs."""

    rows: Bool[Any, "rows"]
    budget: Int32[Any, "rows"]  # tokens to generate
    stop_ids: Int32[Any, "rows n"]  # padded with -1, which is no token
    sampling: Sampling


class Prefill(struct.PyTreeNode):
    """Prompt tokens of this step, packed row after row."""

    tokens: Int32[Any, "chunk_tokens"]
    offsets: Int32[Any, "rows+1"]  # row r has tokens offsets[r]:offsets[r + 1]
    starts: Int32[Any, "rows"]  # position of the row's first token in its text
    sample: Bool[Any, "rows"]  # the row's prompt ends here


class StepPlan(struct.PyTreeNode):
    """What to do to tables, blocks and rows, and (in a prefill step) which prompt tokens to read.

    Order of effects: clear rows, write cells, zero blocks, copy blocks, then the forward pass.
    """

    clear: Bool[Any, "rows"]
    cells: dict[str, Cells]
    zero: dict[str, np.ndarray]
    copies: dict[str, tuple[np.ndarray, np.ndarray]]
    freed: dict[
        str, np.ndarray
    ]  # bool[blocks]: nobody's since this plan; poison mode fills them with NaN
    admission: Admission
    prefill: Prefill | None

    def __repr__(self) -> str:
        if not has_values((self.clear, self.zero, self.admission.rows, self.prefill or ())):
            return "StepPlan(\n" + "\n".join(format_leaves(vars(self))) + "\n)"
        zeroed = {g: z[z != NULL].tolist() for g, z in self.zero.items()}
        text = f"clear rows {np.flatnonzero(self.clear).tolist()}, zero {zeroed}"
        if self.prefill is not None:
            lengths = np.diff(self.prefill.offsets)
            text += f", prefill {[(int(r), int(lengths[r])) for r in np.flatnonzero(lengths)]} (row, tokens)"
        return f"StepPlan({text}, admit rows {np.flatnonzero(self.admission.rows).tolist()})"


def null_plan(shape: PlanShape, *, prefill: bool) -> StepPlan:
    """The plan that does nothing: every row null. What builds a plan fills in copies of these arrays."""
    spec, rows = shape.spec, shape.spec.rows

    def zeros(n: int) -> np.ndarray:
        return np.zeros(n, np.int32)

    sampling = Sampling(
        temperature=np.zeros(rows, np.float32), top_k=zeros(rows), top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32), seed=np.zeros(rows, np.uint32), request=np.zeros(rows, np.uint32),
    )  # fmt: skip
    return StepPlan(
        clear=np.zeros(rows, bool),
        cells={g: Cells(*(zeros(shape.width(g)) for _ in range(3))) for g in spec.names},
        zero={g: zeros(shape.width(g)) for g in spec.names},
        copies={g: (zeros(shape.copies), zeros(shape.copies)) for g in spec.names},
        freed={g: np.zeros(spec.blocks(g), bool) for g in spec.names},
        admission=Admission(
            rows=np.zeros(rows, bool), budget=zeros(rows),
            stop_ids=np.full((rows, 2 * MAX_STOP_IDS), -1, np.int32), sampling=sampling,
        ),
        prefill=Prefill(
            tokens=zeros(shape.chunk_tokens), offsets=zeros(rows + 1), starts=zeros(rows), sample=np.zeros(rows, bool)
        ) if prefill else None,
    )  # fmt: skip


def apply_cells(tables: HostTables, plan: StepPlan) -> HostTables:
    """The host's tables after the plan's clears and cells; the device's must equal them."""
    after = {}
    for group, table in tables.items():
        table = table.copy()
        table[plan.clear] = NULL
        cells = plan.cells[group]
        real = cells.ids != NULL
        table[cells.rows[real], cells.columns[real]] = cells.ids[real]
        after[group] = table
    return after


def check_plan(
    plan: StepPlan, shape: PlanShape, tables: HostTables, pool: BlockPool, holders: Holders
) -> HostTables:
    """The tables after the plan, once it is known to break no rule; else nothing has changed.

    `tables` are the host's tables before the plan; `pool` and `holders` are those while it runs.

    Raises:
      CapacityError: a cell past the end of its row.
      PlanError: any other rule, named in the error.
    """
    spec = shape.spec
    for group in spec.names:
        _check_cells(plan, spec, group, holders)
        _check_blocks(plan, spec, group, pool)
    after = apply_cells(tables, plan)
    for group in spec.names:
        _check_kept(plan, group, tables[group])
        _check_owners(plan, group, after[group], pool, holders)
    if plan.prefill is not None:
        _check_prefill(plan.prefill, shape, after, pool, holders)
    return after


def _check_cells(plan: StepPlan, spec: CacheSpec, group: str, holders: Holders) -> None:
    cells, capacity = plan.cells[group], spec.capacity(group)
    if not cells.ids.any():
        return
    written = set()
    for row, column, block in zip(
        cells.rows.tolist(), cells.columns.tolist(), cells.ids.tolist(), strict=True
    ):
        if block == NULL:
            continue
        if not 0 <= row < spec.rows:
            raise PlanError(
                "rows are in range", f"group {group!r}: row {row} is outside the {spec.rows} rows"
            )
        if column >= capacity or column < 0:
            raise CapacityError(
                request=holders[row] or f"row {row}", group=group, need=column + 1, capacity=capacity,
                unit="block ids in a row", remedy=f"raise max_len from {spec.max_len}, or shorten the request",
            )  # fmt: skip
        if (row, column) in written:
            raise PlanError(
                "each cell is written once", f"group {group!r}: row {row}, column {column} twice"
            )
        written.add((row, column))


def _check_blocks(plan: StepPlan, spec: CacheSpec, group: str, pool: BlockPool) -> None:
    size, zero, (source, destination) = spec.blocks(group), plan.zero[group], plan.copies[group]
    for what, ids in (
        ("cells", plan.cells[group].ids),
        ("zero", zero),
        ("copies", source),
        ("copies", destination),
    ):
        if ids.size and (ids.min() < 0 or ids.max() >= size):
            raise PlanError(
                "ids are in range",
                f"group {group!r}: {what} name {ids.tolist()}; the pool has {size} blocks",
            )
    real = destination != NULL
    if source.any() or real.any():
        if (source[real] == NULL).any() or source[~real].any():
            raise PlanError(
                "copies go from a block to a block",
                f"group {group!r}: {source.tolist()} to {destination.tolist()}",
            )
        if len(np.unique(destination[real])) < real.sum():
            raise PlanError(
                "each block is written once",
                f"group {group!r}: copies go to {destination[real].tolist()}",
            )
        if np.isin(source[real], zero[zero != NULL]).any():
            raise PlanError(
                "nothing fresh is copied from",
                f"group {group!r}: a block in {source.tolist()} is zeroed by this plan",
            )
        if plan.freed[group][source[real]].any():
            raise PlanError(
                "nothing freed is copied from",
                f"group {group!r}: a block in {source.tolist()} is freed by this plan",
            )
    for what, ids in (("zeroed", zero[zero != NULL]), ("copied to", destination[real])):
        if pool.sealed[group][ids].any():
            raise PlanError(
                "sealed blocks are never written",
                f"group {group!r}: a block in {ids.tolist()} would be {what}",
            )
    fresh = plan.cells[group].ids
    fresh = fresh[fresh != NULL]
    made = np.concatenate([zero, destination])
    dirty = fresh[~np.isin(fresh, made) & ~pool.sealed[group][fresh]]
    if dirty.size:
        raise PlanError(
            "blocks are zeroed when handed out",
            f"group {group!r}: blocks {dirty.tolist()} are new to a row and neither zeroed nor copied to",
        )


def _check_kept(plan: StepPlan, group: str, before: np.ndarray) -> None:
    kept = before[~plan.clear]
    made = np.concatenate([plan.zero[group], plan.copies[group][1]])
    wiped = made[(made != NULL) & np.isin(made, kept)]
    if wiped.size:
        raise PlanError(
            "only what is handed out is zeroed or copied to",
            f"group {group!r}: blocks {np.unique(wiped).tolist()} are in use by a row",
        )


def _check_owners(
    plan: StepPlan, group: str, table: np.ndarray, pool: BlockPool, holders: Holders
) -> None:
    live = table[(table != NULL)]
    live = live[~pool.sealed[group][live]]
    if len(np.unique(live)) < len(live):
        ids, counts = np.unique(live, return_counts=True)
        raise PlanError(
            "one owner",
            f"group {group!r}: blocks {ids[counts > 1].tolist()} stand in two cells and are not sealed",
        )
    if plan.freed[group][live].any():
        raise PlanError(
            "no freed block in a row", f"group {group!r}: a row names a block that this plan frees"
        )
    if pool.refs[group][plan.freed[group]].any():
        raise PlanError(
            "freed blocks are nobody's",
            f"group {group!r}: a block in {np.flatnonzero(plan.freed[group]).tolist()} still has a holder",
        )
    used = (table != NULL).any(axis=1)
    for row in np.flatnonzero(used).tolist():
        if holders[row] is None:
            raise PlanError(
                "finished rows are null",
                f"group {group!r}: row {row} is nobody's and names {table[row].tolist()}",
            )
    for row in np.flatnonzero(~used).tolist():
        if holders[row] is not None:
            raise PlanError(
                "live rows have blocks", f"group {group!r}: row {row} of {holders[row]!r} is null"
            )
    changed = np.unique(plan.cells[group].rows[plan.cells[group].ids != NULL])
    for row in changed.tolist():
        mine = pool.held.get(holders[row] or "", {}).get(group, ())
        named = table[row].tolist()
        foreign = set(named) - {NULL} - set(mine)
        if foreign:
            raise PlanError(
                "one owner",
                f"group {group!r}: row {row} names blocks {sorted(foreign)}, which {holders[row]!r} does not hold",
            )
        if sorted(named[: len(mine)]) != sorted(mine):
            raise PlanError(
                "rows name all that they hold",
                f"group {group!r}: row {row} names {named}; {holders[row]!r} holds {list(mine)}",
            )


def _check_prefill(
    prefill: Prefill, shape: PlanShape, tables: HostTables, pool: BlockPool, holders: Holders
) -> None:
    spec, lengths = shape.spec, np.diff(prefill.offsets)
    if prefill.offsets[0] < 0 or (lengths < 0).any() or prefill.offsets[-1] > shape.chunk_tokens:
        raise PlanError(
            "tokens fit the step",
            f"offsets are {prefill.offsets.tolist()} for {shape.chunk_tokens} tokens",
        )
    if prefill.tokens.min(initial=0) < 0:
        raise PlanError("tokens are ids", "a prompt token is negative")
    for row in np.flatnonzero(lengths).tolist():
        start, end = int(prefill.starts[row]), int(prefill.starts[row] + lengths[row])
        need = spec.need(end, holders[row] or f"row {row}")
        if start < 0 or holders[row] is None:
            raise PlanError(
                "only live rows read tokens", f"row {row} has {lengths[row]} tokens and no request"
            )
        for group, n in need.items():
            spec.check_row(group, n, holders[row] or "")
            ids, before = tables[group][row], spec.need(start)[group]
            # What it starts from, if anything, and what it leaves its state in.
            for column in {max(before, 1) - 1, n - 1}:
                if ids[column] == NULL:
                    raise PlanError(
                        "no live row resolves to null",
                        f"group {group!r}: {holders[row]!r} has no block in column {column} for "
                        f"positions {start} to {end - 1}",
                    )
            per_block = spec.group(group).tokens_per_block(spec.context_shards)
            first = start // per_block if per_block is not None else 0
            if pool.sealed[group][ids[first:n]].any():
                raise PlanError(
                    "sealed blocks are never written",
                    f"group {group!r}: {holders[row]!r} would write a block in {ids[first:n].tolist()}",
                )
    if prefill.sample[lengths == 0].any():
        raise PlanError(
            "only rows with tokens are sampled",
            f"rows {np.flatnonzero(prefill.sample & (lengths == 0)).tolist()}",
        )
