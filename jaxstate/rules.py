"""What a plan may not do, checked on the host before the step is dispatched.

Every refusal names its rule. Compiled code relies on these: kernels run concurrently, cannot look at one another's ids,
and have no way to fail.
"""

from __future__ import annotations

import numpy as np

from jaxstate.errors import CapacityError, PlanError
from jaxstate.plan import Holders, HostTables, PlanShape, Prefill, StepPlan, apply_cells
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import NULL, CacheSpec
from pallas_kernels.rows import CHUNK


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
        _check_sources(plan, group, pool, holders)
    if plan.prefill is not None:
        _check_prefill(plan.prefill, shape, after, pool, holders)
        for group in spec.names:
            _check_checkpoints(plan, plan.prefill, group, after[group], pool)
    return after


def _real(*ids: np.ndarray) -> np.ndarray:
    """The ids that are not null, in one array."""
    return np.concatenate([i[i != NULL] for i in ids])


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
    fresh, made = _real(plan.cells[group].ids), _real(zero, destination)
    if not fresh.size:
        return
    dirty = fresh[~np.isin(fresh, made) & ~pool.sealed[group][fresh]]
    if dirty.size:
        raise PlanError(
            "blocks are zeroed when handed out",
            f"group {group!r}: blocks {dirty.tolist()} are new to a row and neither zeroed nor copied to",
        )


def _check_kept(plan: StepPlan, group: str, before: np.ndarray) -> None:
    kept, made = before[~plan.clear], _real(plan.zero[group], plan.copies[group][1])
    if not made.size:
        return
    wiped = made[np.isin(made, kept)]
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
    if live.size and np.bincount(live).max() > 1:
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
    used, held = (table != NULL).any(axis=1), np.array([h is not None for h in holders])
    for row in np.flatnonzero(used != held).tolist():
        if used[row]:
            raise PlanError(
                "finished rows are null",
                f"group {group!r}: row {row} is nobody's and names {table[row].tolist()}",
            )
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
        own = [block for block in mine if not pool.sealed[group][block]]
        if not set(own) <= set(named):
            raise PlanError(
                "rows name all that they hold",
                f"group {group!r}: row {row} names {named}; {holders[row]!r} holds {own} to write to",
            )


def _check_sources(plan: StepPlan, group: str, pool: BlockPool, holders: Holders) -> None:
    source, admission = plan.admission.source[group], plan.admission
    if source.any():
        if source.min() < 0 or source.max() >= len(pool.refs[group]):
            raise PlanError("ids are in range", f"group {group!r}: sources are {source.tolist()}")
        if not pool.sealed[group][source[source != NULL]].all():
            raise PlanError(
                "only published states are started from",
                f"group {group!r}: sources are {source.tolist()}",
            )
        for row in np.flatnonzero(source).tolist():
            if not admission.rows[row] or holders[row] is None:
                raise PlanError(
                    "only new rows have a source",
                    f"group {group!r}: row {row} is not admitted here",
                )
    placed = admission.position > 0
    if (placed != (source != NULL)).any():
        raise PlanError(
            "a hit is a hit in every group",
            f"group {group!r}: sources {source.tolist()} for positions {admission.position.tolist()}",
        )


def _check_checkpoints(
    plan: StepPlan, prefill: Prefill, group: str, table: np.ndarray, pool: BlockPool
) -> None:
    ids, positions = prefill.checkpoints[group], prefill.checkpoint_positions
    if not ids.any() and not positions.any():
        return
    used = ids != NULL
    if (used != (positions > 0)).any():
        raise PlanError(
            "a checkpoint is kept in every group",
            f"group {group!r}: blocks {ids.tolist()} for positions {positions.tolist()}",
        )
    if ids.min() < 0 or ids.max() >= len(pool.refs[group]):
        raise PlanError("ids are in range", f"group {group!r}: checkpoints go to {ids.tolist()}")
    blocks = ids[used]
    if len(np.unique(blocks)) < len(blocks) or np.isin(blocks, table).any():
        raise PlanError(
            "each block is written once", f"group {group!r}: checkpoints go to {blocks.tolist()}"
        )
    if not np.isin(blocks, plan.zero[group]).all():
        raise PlanError(
            "blocks are zeroed when handed out", f"group {group!r}: checkpoints {blocks.tolist()}"
        )
    lengths = np.diff(prefill.offsets)[:, None]
    off_grid = used & ((prefill.starts[:, None] + positions) % CHUNK != 0)
    if (used & (positions > lengths)).any() or off_grid.any():
        raise PlanError(
            "checkpoints lie on the grid of what is read",
            f"positions {positions.tolist()} of rows with {lengths[:, 0].tolist()} tokens",
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
