"""What a plan may not do, checked on the host before the step is dispatched.

Every refusal names its rule. Compiled code relies on these: kernels run concurrently, cannot look at one another's ids,
and have no way to fail.
"""

from __future__ import annotations

import itertools
import operator

import numpy as np

from jaxstate.errors import CapacityError, PlanError
from jaxstate.plan import Holders, HostTables, PlanShape, Prefill, StepPlan, apply_cells
from jaxstate.state.pool import BlockPool
from jaxstate.state.spec import NULL, CacheSpec
from pallas_kernels.rows import CHUNK

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, and from which token to which each of them reads in a step."""


def check_plan(
    plan: StepPlan, shape: PlanShape, tables: HostTables, pool: BlockPool, holders: Holders,
    spans: Spans | None = None,
) -> HostTables:  # fmt: skip
    """The tables after the plan, once it is known to break no rule; else nothing has changed.

    `tables` are the host's tables before the plan; `pool` and `holders` are those while it runs. `spans` are what rows
    decode; the device knows that by itself, so a plan does not say it.

    Raises:
      CapacityError: a cell past the end of its row.
      PlanError: any other rule, named in the error.
    """
    spec, vacant = shape.spec, _nobodys(holders)
    for group in spec.names:
        _check_cells(plan, spec, group, holders)
        _check_blocks(plan, spec, group, pool)
    after = apply_cells(tables, plan)
    for group in spec.names:
        _check_kept(plan, spec, group, tables[group])
        _check_owners(plan, group, after[group], pool, holders, vacant)
        _check_sources(plan, group, pool, holders)
    if plan.prefill is not None:
        _check_prefill(plan.prefill, shape, after, pool, holders, vacant)
        for group in spec.names:
            _check_checkpoints(plan, plan.prefill, spec, group, after[group], pool)
    if spans is not None:
        _check_spans(spans, spec, after, pool, holders)
    return after


def _nobodys(holders: Holders) -> np.ndarray:
    """Which rows are; no Python is run for a row, since there are many and this is asked of every plan."""
    if all(holders):
        return np.zeros(len(holders), bool)
    return np.frombuffer(bytes(map(operator.is_, holders, itertools.repeat(None))), bool)


def _some(values: np.ndarray) -> bool:
    """Whether any is not zero; several times as fast as `any` for what a plan holds."""
    return bool(np.count_nonzero(values))


def _real(ids: np.ndarray) -> list[int]:
    """The ids that are not null; mostly a few of many."""
    return ids[ids.nonzero()].tolist() if ids.size else []


def _mask(ids: np.ndarray, size: int) -> np.ndarray:
    """Which of so many blocks these ids name; null is none."""
    mask = np.zeros(size, bool)
    mask[ids] = True
    mask[NULL] = False
    return mask


def _check_cells(plan: StepPlan, spec: CacheSpec, group: str, holders: Holders) -> None:
    cells, capacity = plan.cells[group], spec.capacity(group)
    if not _some(cells.ids):
        return
    written, real = set(), cells.ids.nonzero()[0]
    for row, column in zip(cells.rows[real].tolist(), cells.columns[real].tolist(), strict=True):
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
    zero, (source, destination) = plan.zero[group], plan.copies[group]
    size, sealed = spec.blocks(group), pool.sealed[group]
    fresh, zeroed = _real(plan.cells[group].ids), _real(zero)
    copied, copies = _real(destination), _some(source) or _some(destination)
    for what, ids in (
        ("cells", fresh),
        ("zero", zeroed),
        ("copies", _real(source)),
        ("copies", copied),
    ):
        if ids and (min(ids) < 0 or max(ids) >= size):
            raise PlanError(
                "ids are in range",
                f"group {group!r}: {what} name {ids}; the pool has {size} blocks",
            )
    if copies:
        real = destination != NULL
        if (source[real] == NULL).any() or _some(source[~real]):
            raise PlanError(
                "copies go from a block to a block",
                f"group {group!r}: {source.tolist()} to {destination.tolist()}",
            )
        if len(np.unique(destination[real])) < real.sum():
            raise PlanError(
                "each block is written once",
                f"group {group!r}: copies go to {destination[real].tolist()}",
            )
        if not set(zeroed).isdisjoint(_real(source)):
            raise PlanError(
                "nothing fresh is copied from",
                f"group {group!r}: a block in {source.tolist()} is zeroed by this plan",
            )
        if plan.freed[group][source[real]].any():
            raise PlanError(
                "nothing freed is copied from",
                f"group {group!r}: a block in {source.tolist()} is freed by this plan",
            )
    for what, ids in (("zeroed", zeroed), ("copied to", copied)):
        if any(sealed[block] for block in ids):
            raise PlanError(
                "sealed blocks are never written",
                f"group {group!r}: a block in {ids} would be {what}",
            )
    made = {*zeroed, *copied}
    dirty = [block for block in fresh if block not in made and not sealed[block]]
    if dirty:
        raise PlanError(
            "blocks are zeroed when handed out",
            f"group {group!r}: blocks {dirty} are new to a row and neither zeroed nor copied to",
        )


def _check_kept(plan: StepPlan, spec: CacheSpec, group: str, before: np.ndarray) -> None:
    made = _real(plan.zero[group]) + _real(plan.copies[group][1])
    if not made:
        return
    stays = _mask(before[~plan.clear] if _some(plan.clear) else before, spec.blocks(group))
    wiped = sorted({block for block in made if stays[block]})
    if wiped:
        raise PlanError(
            "only what is handed out is zeroed or copied to",
            f"group {group!r}: blocks {wiped} are in use by a row",
        )


def _check_owners(
    plan: StepPlan, group: str, table: np.ndarray, pool: BlockPool, holders: Holders, vacant: np.ndarray
) -> None:  # fmt: skip
    named, sealed = table != NULL, pool.sealed[group]
    live = table[named]
    shared = sealed[live]
    live = live[~shared] if _some(shared) else live
    once = np.zeros(len(pool.refs[group]), bool)
    once[live] = True
    if np.count_nonzero(once) < len(live):
        ids, counts = np.unique(live, return_counts=True)
        raise PlanError(
            "one owner",
            f"group {group!r}: blocks {ids[counts > 1].tolist()} stand in two cells and are not sealed",
        )
    freed = plan.freed[group].nonzero()[0]
    if freed.size and _some(once[freed]):
        raise PlanError(
            "no freed block in a row", f"group {group!r}: a row names a block that this plan frees"
        )
    if freed.size and _some(pool.refs[group][freed]):
        raise PlanError(
            "freed blocks are nobody's",
            f"group {group!r}: a block in {freed.tolist()} still has a holder",
        )
    used = named[:, 0] if named.shape[1] == 1 else named.any(axis=1)
    for row in (used == vacant).nonzero()[0].tolist():
        if used[row]:
            raise PlanError(
                "finished rows are null",
                f"group {group!r}: row {row} is nobody's and names {table[row].tolist()}",
            )
        raise PlanError(
            "live rows have blocks", f"group {group!r}: row {row} of {holders[row]!r} is null"
        )
    cells = plan.cells[group]
    written = sorted(set(cells.rows[cells.ids.nonzero()].tolist()))
    for row, named in zip(written, table[written].tolist() if written else (), strict=True):
        mine = pool.held.get(holders[row] or "", {}).get(group, ())
        foreign = set(named).difference(mine, (NULL,))
        if foreign:
            raise PlanError(
                "one owner",
                f"group {group!r}: row {row} names blocks {sorted(foreign)}, which {holders[row]!r} does not hold",
            )
        own = [block for block in mine if not sealed[block]]
        if not set(own).issubset(named):
            raise PlanError(
                "rows name all that they hold",
                f"group {group!r}: row {row} names {named}; {holders[row]!r} holds {own} to write to",
            )


def _check_sources(plan: StepPlan, group: str, pool: BlockPool, holders: Holders) -> None:
    source, admission = plan.admission.source[group], plan.admission
    if not _some(source) and not _some(admission.position):
        return
    ids, size, sealed = _real(source), len(pool.refs[group]), pool.sealed[group]
    if ids and (min(ids) < 0 or max(ids) >= size):
        raise PlanError("ids are in range", f"group {group!r}: sources are {source.tolist()}")
    if not all(sealed[block] for block in ids):
        raise PlanError(
            "only published states are started from",
            f"group {group!r}: sources are {source.tolist()}",
        )
    for row in source.nonzero()[0].tolist():
        if not admission.rows[row] or holders[row] is None:
            raise PlanError(
                "only new rows have a source",
                f"group {group!r}: row {row} is not admitted here",
            )
    placed = admission.position > 0
    if _some(placed != (source != NULL)):
        raise PlanError(
            "a hit is a hit in every group",
            f"group {group!r}: sources {source.tolist()} for positions {admission.position.tolist()}",
        )


def _check_checkpoints(
    plan: StepPlan, prefill: Prefill, spec: CacheSpec, group: str, table: np.ndarray, pool: BlockPool
) -> None:  # fmt: skip
    ids, positions = prefill.checkpoints[group], prefill.checkpoint_positions
    if not _some(ids) and not _some(positions):
        return
    rows, slots = ids.nonzero()
    if _some((ids != NULL) != (positions > 0)):
        raise PlanError(
            "a checkpoint is kept in every group",
            f"group {group!r}: blocks {ids.tolist()} for positions {positions.tolist()}",
        )
    if ids.min() < 0 or ids.max() >= len(pool.refs[group]):
        raise PlanError("ids are in range", f"group {group!r}: checkpoints go to {ids.tolist()}")
    blocks, named = ids[rows, slots].tolist(), _mask(table, spec.blocks(group))
    if len(set(blocks)) < len(blocks) or any(named[block] for block in blocks):
        raise PlanError(
            "each block is written once", f"group {group!r}: checkpoints go to {blocks}"
        )
    if not set(blocks).issubset(_real(plan.zero[group])):
        raise PlanError(
            "blocks are zeroed when handed out", f"group {group!r}: checkpoints {blocks}"
        )
    places = positions[rows, slots]
    lengths = prefill.offsets[rows + 1] - prefill.offsets[rows]
    if _some(places > lengths) or _some((prefill.starts[rows] + places) % CHUNK):
        raise PlanError(
            "checkpoints lie on the grid of what is read",
            f"positions {places.tolist()} of rows with {lengths.tolist()} tokens",
        )


def _check_prefill(
    prefill: Prefill, shape: PlanShape, tables: HostTables, pool: BlockPool, holders: Holders, vacant: np.ndarray
) -> None:  # fmt: skip
    spec, lengths = shape.spec, prefill.offsets[1:] - prefill.offsets[:-1]
    if prefill.offsets[0] < 0 or _some(lengths < 0) or prefill.offsets[-1] > shape.chunk_tokens:
        raise PlanError(
            "tokens fit the step",
            f"offsets are {prefill.offsets.tolist()} for {shape.chunk_tokens} tokens",
        )
    if prefill.tokens.min(initial=0) < 0:
        raise PlanError("tokens are ids", "a prompt token is negative")
    rows = np.flatnonzero(lengths)
    starts = prefill.starts[rows].astype(np.int64)
    ends = starts + lengths[rows]
    for row in rows[(starts < 0) | vacant[rows]].tolist():
        raise PlanError(
            "only live rows read tokens", f"row {row} has {lengths[row]} tokens and no request"
        )
    _check_spans((rows, starts, ends), spec, tables, pool, holders)
    if _some(prefill.sample[lengths == 0]):
        raise PlanError(
            "only rows with tokens are sampled",
            f"rows {np.flatnonzero(prefill.sample & (lengths == 0)).tolist()}",
        )


def _check_spans(
    spans: Spans, spec: CacheSpec, tables: HostTables, pool: BlockPool, holders: Holders
) -> None:
    """Every row has a block of its own wherever it reads and writes; nothing sealed is written."""
    rows, starts, ends = spans
    if not len(rows):
        return
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
