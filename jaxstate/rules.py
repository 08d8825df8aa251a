"""What a plan may not do, checked on the host before the step is dispatched.

Every refusal names its rule. Compiled code relies on these: kernels run concurrently, cannot look at one another's ids,
and have no way to fail.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from jaxstate.errors import CapacityError, PlanError
from jaxstate.plan import Holders, HostTables, PlanShape, Prefill, StepPlan, apply_cells
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import NULL, CacheSpec
from pallas_kernels.rows import CHUNK

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, and from which token to which each of them reads in a step."""


def check_plan(
    plan: StepPlan, shape: PlanShape, tables: HostTables, pool: BlockPool, holders: SequenceOf[str | None],
    spans: Spans | None = None,
) -> HostTables:  # fmt: skip
    """The tables after the plan, once it is known to break no rule; else nothing has changed.

    `tables` are the host's tables before the plan; `pool` and `holders` are those while it runs. `spans` are what rows
    decode; the device knows that by itself, so a plan does not say it.

    Raises:
      CapacityError: a cell past the end of its row.
      PlanError: any other rule, named in the error.
    """
    spec, holders, null = shape.spec, Holders.of(holders), shape.nulls[plan.prefill is not None]
    # What is everybody's cannot be written to, and so need not be looked at.
    writes = plan.cells is not null.cells or plan.zero is not null.zero
    if writes or plan.copies is not null.copies:
        lists = {group: _Lists.of(plan, group) for group in spec.names}
        for group, listed in lists.items():
            if listed.fresh:
                _check_cells(listed, shape, group, holders)
            _check_blocks(plan, listed, shape, group, pool)
    else:
        lists = dict.fromkeys(spec.names, _NOTHING)
    clears = plan.clear is not null.clear
    after = apply_cells(tables, plan) if writes or clears else tables
    for group, listed in lists.items():
        if listed.zeroed or listed.copied:
            _check_kept(plan, listed, group, tables[group])
        named = _check_owners(plan, listed, group, after[group], pool, holders)
        if plan.prefill is not None:
            _check_checkpoints(plan.prefill, listed, group, named)
    if plan.admission is not null.admission:
        for group in spec.names:
            _check_sources(plan, group, pool, holders)
    if plan.prefill is not None:
        spans = _check_prefill(plan.prefill, shape, holders)
    if spans is not None:
        _check_spans(spans, spec, after, pool, holders)
    return after


class _Lists(NamedTuple):
    """What a plan has of real entries in its lists for a group: they are mostly a few of many."""

    rows: list[int]
    columns: list[int]
    fresh: list[int]  # ids that are written to these cells
    zeroed: list[int]
    source: list[int]
    copied: list[int]

    @classmethod
    def of(cls, plan: StepPlan, group: str) -> _Lists:
        cells, (source, destination) = plan.cells[group], plan.copies[group]
        real = cells.ids.nonzero()[0]
        fresh = cells.ids[real].tolist()
        rows, columns = (
            (cells.rows[real].tolist(), cells.columns[real].tolist()) if fresh else ([], [])
        )
        copied = (_real(source), _real(destination)) if len(source) else ([], [])
        return cls(rows, columns, fresh, _real(plan.zero[group]), *copied)


_NOTHING = _Lists([], [], [], [], [], [])


def _some(values: np.ndarray) -> bool:
    """Whether any is not zero; several times as fast as `any` for what a plan holds."""
    return bool(np.count_nonzero(values))


def _real(ids: np.ndarray) -> list[int]:
    """The ids that are not null; mostly a few of many."""
    return ids[(ids != NULL).nonzero()].tolist() if np.count_nonzero(ids) else []


def _in_range(ids: list[int], size: int) -> bool:
    return min(ids, default=0) >= 0 and max(ids, default=0) < size


def _check_cells(listed: _Lists, shape: PlanShape, group: str, holders: Holders) -> None:
    spec, capacity, written = shape.spec, shape.widths[group], set()
    for row, column in zip(listed.rows, listed.columns, strict=True):
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


def _check_blocks(
    plan: StepPlan, listed: _Lists, shape: PlanShape, group: str, pool: BlockPool
) -> None:
    fresh, zeroed, copied = listed.fresh, listed.zeroed, listed.copied
    size, sealed = shape.sizes[group][2], pool.sealed[group]
    for what, ids in (
        ("cells", fresh),
        ("zero", zeroed),
        ("copies", listed.source),
        ("copies", copied),
    ):
        if ids and not _in_range(ids, size):
            raise PlanError(
                "ids are in range",
                f"group {group!r}: {what} name {ids}; the pool has {size} blocks",
            )
    if listed.source or copied:
        _check_copies(plan, listed, group)
    for what, ids in (("zeroed", zeroed), ("copied to", copied)):
        if any(sealed[block] for block in ids):
            raise PlanError(
                "sealed blocks are never written",
                f"group {group!r}: a block in {ids} would be {what}",
            )
    dirty = set(fresh).difference(zeroed, copied) if fresh else ()
    dirty = [block for block in dirty if not sealed[block]]
    if dirty:
        raise PlanError(
            "blocks are zeroed when handed out",
            f"group {group!r}: blocks {dirty} are new to a row and neither zeroed nor copied to",
        )


def _check_copies(plan: StepPlan, listed: _Lists, group: str) -> None:
    source, destination = plan.copies[group]
    real = destination != NULL
    if (source[real] == NULL).any() or _some(source[~real]):
        raise PlanError(
            "copies go from a block to a block",
            f"group {group!r}: {source.tolist()} to {destination.tolist()}",
        )
    if len(set(listed.copied)) < len(listed.copied):
        raise PlanError(
            "each block is written once", f"group {group!r}: copies go to {listed.copied}"
        )
    if not set(listed.zeroed).isdisjoint(listed.source):
        raise PlanError(
            "nothing fresh is copied from",
            f"group {group!r}: a block in {source.tolist()} is zeroed by this plan",
        )
    if _some(plan.freed[group][listed.source]):
        raise PlanError(
            "nothing freed is copied from",
            f"group {group!r}: a block in {source.tolist()} is freed by this plan",
        )


def _check_kept(plan: StepPlan, listed: _Lists, group: str, before: np.ndarray) -> None:
    made = np.zeros(len(plan.freed[group]), bool)
    made[listed.zeroed + listed.copied] = True
    stays = made[before] & ~plan.clear[:, None]
    if _some(stays):
        raise PlanError(
            "only what is handed out is zeroed or copied to",
            f"group {group!r}: blocks {sorted(set(before[stays].tolist()))} are in use by a row",
        )


def _check_owners(
    plan: StepPlan, listed: _Lists, group: str, table: np.ndarray, pool: BlockPool, holders: Holders
) -> np.ndarray:  # fmt: skip
    """Which blocks are named in a row."""
    cells, sealed, freed = table.ravel(), pool.sealed[group], plan.freed[group]
    named = np.zeros(len(sealed), bool)
    named[cells] = True
    named[NULL] = False
    live, once = cells, named
    if _some(named & sealed):
        live, once = cells[~sealed[cells]], named & ~sealed
    if np.count_nonzero(once) < np.count_nonzero(live):
        ids, counts = np.unique(live[live != NULL], return_counts=True)
        raise PlanError(
            "one owner",
            f"group {group!r}: blocks {ids[counts > 1].tolist()} stand in two cells and are not sealed",
        )
    if _some(freed):
        if _some(once & freed):
            raise PlanError(
                "no freed block in a row",
                f"group {group!r}: a row names a block that this plan frees",
            )
        gone = freed.nonzero()[0]
        if _some(pool.refs[group][gone]):
            raise PlanError(
                "freed blocks are nobody's",
                f"group {group!r}: a block in {gone.tolist()} still has a holder",
            )
    used = cells != NULL if table.shape[1] == 1 else (table != NULL).any(axis=1)
    wrong = used == holders.vacant
    for row in wrong.nonzero()[0].tolist() if _some(wrong) else ():
        if used[row]:
            raise PlanError(
                "finished rows are null",
                f"group {group!r}: row {row} is nobody's and names {table[row].tolist()}",
            )
        raise PlanError(
            "live rows have blocks", f"group {group!r}: row {row} of {holders[row]!r} is null"
        )
    if listed.fresh:
        _check_written(listed, group, table, pool, holders)
    return named


def _check_written(
    listed: _Lists, group: str, table: np.ndarray, pool: BlockPool, holders: Holders
) -> None:
    """Rows that the plan writes to name what their request holds, and all of that but what it starts from."""
    held, sealed, written = pool.held, pool.sealed[group], sorted(set(listed.rows))
    for row, cells in zip(written, table[written].tolist(), strict=True):
        mine = held.get(holders[row] or "", {}).get(group, ())
        if (*mine,) == (*cells,):
            continue
        named = set(cells)
        named.discard(NULL)
        if not named.issubset(mine):
            raise PlanError(
                "one owner",
                f"group {group!r}: row {row} names blocks {sorted(named.difference(mine))}, which {holders[row]!r} "
                "does not hold",
            )
        own = [block for block in mine if not sealed[block]]
        if not named.issuperset(own):
            raise PlanError(
                "rows name all that they hold",
                f"group {group!r}: row {row} names {cells}; {holders[row]!r} holds {own} to write to",
            )


def _check_sources(plan: StepPlan, group: str, pool: BlockPool, holders: Holders) -> None:
    source, admission = plan.admission.source[group], plan.admission
    rows, sealed = source.nonzero()[0].tolist(), pool.sealed[group]
    ids = source[rows].tolist()
    if not _in_range(ids, len(sealed)):
        raise PlanError("ids are in range", f"group {group!r}: sources are {source.tolist()}")
    for row, block in zip(rows, ids, strict=True):
        if not sealed[block]:
            raise PlanError(
                "only published states are started from",
                f"group {group!r}: sources are {source.tolist()}",
            )
        if not admission.rows[row] or holders[row] is None:
            raise PlanError(
                "only new rows have a source",
                f"group {group!r}: row {row} is not admitted here",
            )
    if (admission.position > 0).nonzero()[0].tolist() != rows:
        raise PlanError(
            "a hit is a hit in every group",
            f"group {group!r}: sources {source.tolist()} for positions {admission.position.tolist()}",
        )


def _check_checkpoints(prefill: Prefill, listed: _Lists, group: str, named: np.ndarray) -> None:
    """No block is written by a checkpoint and anything else; `named` are the blocks in rows."""
    ids, positions = prefill.checkpoints[group], prefill.checkpoint_positions
    if not ids.size:
        return
    # A few of many: their numbers are looked at one by one.
    slots = (ids.ravel() != NULL).nonzero()[0]
    blocks, places = ids.ravel()[slots].tolist(), positions.ravel()[slots].tolist()
    if np.count_nonzero(positions) != len(places) or min(places, default=1) < 1:
        raise PlanError(
            "a checkpoint is kept in every group",
            f"group {group!r}: blocks {ids.tolist()} for positions {positions.tolist()}",
        )
    if not blocks:
        return
    if not _in_range(blocks, len(named)):
        raise PlanError("ids are in range", f"group {group!r}: checkpoints go to {ids.tolist()}")
    if len(set(blocks)) < len(blocks) or any(named[block] for block in blocks):
        raise PlanError(
            "each block is written once", f"group {group!r}: checkpoints go to {blocks}"
        )
    if not set(blocks).issubset(listed.zeroed):
        raise PlanError(
            "blocks are zeroed when handed out", f"group {group!r}: checkpoints {blocks}"
        )
    rows, offsets = slots // ids.shape[1], prefill.offsets
    starts = prefill.starts[rows].tolist()
    lengths = (offsets[rows + 1] - offsets[rows]).tolist()
    for place, start, length in zip(places, starts, lengths, strict=True):
        if place > length or (start + place) % CHUNK:
            raise PlanError(
                "checkpoints lie on the grid of what is read",
                f"positions {places} of rows with {lengths} tokens",
            )


def _check_prefill(prefill: Prefill, shape: PlanShape, holders: Holders) -> Spans:
    """Rows that read tokens, and from where to where."""
    offsets = prefill.offsets
    lengths = offsets[1:] - offsets[:-1]
    if offsets[0] < 0 or offsets[-1] > shape.chunk_tokens or np.minimum.reduce(lengths) < 0:
        raise PlanError(
            "tokens fit the step",
            f"offsets are {offsets.tolist()} for {shape.chunk_tokens} tokens",
        )
    if np.minimum.reduce(prefill.tokens, initial=0) < 0:
        raise PlanError("tokens are ids", "a prompt token is negative")
    rows = lengths.nonzero()[0]
    starts = prefill.starts[rows].astype(np.int64)
    for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
        if start < 0 or holders[row] is None:
            raise PlanError(
                "only live rows read tokens", f"row {row} has {lengths[row]} tokens and no request"
            )
    if np.count_nonzero(prefill.sample) > np.count_nonzero(prefill.sample[rows]):
        raise PlanError(
            "only rows with tokens are sampled",
            f"rows {np.flatnonzero(prefill.sample & (lengths == 0)).tolist()}",
        )
    return rows, starts, starts + lengths[rows]


def _check_spans(
    spans: Spans, spec: CacheSpec, tables: HostTables, pool: BlockPool, holders: Holders
) -> None:
    """Every row has a block of its own wherever it reads and writes; nothing sealed is written."""
    rows, starts, ends = spans
    if not len(rows):
        return
    if ends.max() > spec.max_len:
        for i in (ends > spec.max_len).nonzero()[0].tolist():
            spec.need(int(ends[i]), holders[rows[i]] or "")
    for group in spec.groups:
        name, ids = group.name, tables[group.name][rows]
        per_block = group.tokens_per_block(spec.context_shards)
        null, written = ids == NULL, pool.sealed[name][ids]
        if per_block is not None:
            columns = np.arange(ids.shape[1])
            # What it starts from, if anything, and all that it leaves its state in.
            read, last = np.maximum(starts - 1, 0) // per_block, (ends - 1) // per_block
            upto = columns <= last[:, None]
            null &= (columns >= read[:, None]) & upto
            written &= (columns >= starts[:, None] // per_block) & upto
        if _some(null):
            i, column = (int(at[0]) for at in null.nonzero())
            raise PlanError(
                "no live row resolves to null",
                f"group {name!r}: {holders[rows[i]]!r} has no block in column {column} for "
                f"positions {starts[i]} to {ends[i] - 1}",
            )
        if _some(written):
            i = int(written.nonzero()[0][0])
            raise PlanError(
                "sealed blocks are never written",
                f"group {name!r}: {holders[rows[i]]!r} would write a block in {ids[i, written[i]].tolist()}",
            )
