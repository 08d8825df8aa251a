"""How the faults that state caches have had are put back, by replacing a function or two of the finished code."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate import draft, engine, progress, scheduler, step
from jaxstate.page import Page
from jaxstate.schedule import Counts
from jaxstate.state import BlockTables, CacheSpec, StateCache
from jaxstate.state.cache import fill_blocks
from jaxstate.state.ledger import Ledger
from pallas_kernels import blocks

Patch = Callable[[pytest.MonkeyPatch], None]


# -- helpers ---------------------------------------------------------------------------------------


def checks_off(patch: pytest.MonkeyPatch) -> None:
    """Takes out everything by which the host refuses: plan validation, row widths and the pool's guards."""
    let_go = Ledger._let_go

    def apply_only(plan, shape, tables, pool, holders, spans=None):
        after = {}
        for group, table in tables.items():
            after[group] = table = np.where(plan.clear[:, None], 0, table)
            cells = plan.cells[group]
            for row, column, block in zip(cells.rows, cells.columns, cells.ids, strict=True):
                if block and column < table.shape[1]:
                    table[row, column] = block
        return after

    def never_below_zero(self, group, ids):
        for block in ids:
            self._refs[group][block] = max(self._refs[group][block], 1)
        return let_go(self, group, ids)

    patch.setattr(scheduler, "check_plan", apply_only)
    patch.setattr(CacheSpec, "check_row", lambda self, name, need, request="": None)
    patch.setattr(Ledger, "_require_held", lambda self, holder, group, ids: None)
    patch.setattr(Ledger, "_let_go", never_below_zero)


def planner(change: Callable[..., None]) -> Patch:
    """A fault of the planner: `change(plan, tables, pool, holders)` spoils each plan before it is checked."""

    def put(patch: pytest.MonkeyPatch) -> None:
        check = scheduler.check_plan

        def spoiled(plan, shape, tables, pool, holders, spans=None):
            # Most of a plan's arrays are everybody's; those of this one are to be written to.
            plan.__dict__.update(copy.deepcopy(plan).__dict__)
            change(plan, tables, pool, holders)
            return check(plan, shape, tables, pool, holders, spans)

        patch.setattr(scheduler, "check_plan", spoiled)

    return put


def everywhere(patch: pytest.MonkeyPatch, function: Any, other: Any) -> None:
    """Replaces a function in every module that has imported it by name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("jaxstate", "pallas_kernels", "tests"):
            if getattr(module, function.__name__, None) is function and module is not blocks:
                patch.setattr(module, function.__name__, other)


def together(*patches: Patch) -> Patch:
    def put(patch: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(patch)

    return put


# -- rows ------------------------------------------------------------------------------------------


@planner
def never_clears(plan, tables, pool, holders):
    plan.clear[:] = False


def clears_late(patch):
    """Blocks return to the pool two plans before the row that names them is cleared."""
    pending = [False, False]

    def delay(plan, tables, pool, holders):
        pending.append(plan.clear.copy())
        vacant = np.array([holder is None for holder in holders])
        plan.clear[:] = pending.pop(0) & vacant

    planner(delay)(patch)


def device_keeps_rows(patch):
    update = BlockTables.update
    patch.setattr(
        BlockTables, "update", lambda self, clear=None, entries=None: update(self, None, entries)
    )


def decode_unmasked(patch):
    token_rows = step.token_rows

    def all_rows(group, tables, rows):
        return token_rows(group, tables, rows.replace(active=jnp.ones_like(rows.active)))

    patch.setattr(step, "token_rows", all_rows)


def leaves_early(patch):
    """The last step of a request is taken for done as soon as the one before it is planned."""

    def early(self):
        return self.ended | ((self.made >= self.budget - 2) & (self.made > 0))

    patch.setattr(Counts, "leaving", property(early))


def credits_new_tenant(patch):
    take = engine.Engine._take

    def by_row(self, rank, planned, outcome):
        serves = self.ranks.schedules[rank].rows
        return take(self, rank, dataclasses.replace(planned, serves=serves), outcome)

    patch.setattr(engine.Engine, "_take", by_row)


def credits_by_id(patch):
    take = engine.Engine._take

    def by_id(self, rank, planned, outcome):
        def now(running):
            known = running and self._progress.get(running.request.id)
            return known and dataclasses.replace(running, request=known.request)

        serves = tuple(now(r) for r in planned.serves)
        return take(self, rank, dataclasses.replace(planned, serves=serves), outcome)

    patch.setattr(engine.Engine, "_take", by_id)


# -- blocks ----------------------------------------------------------------------------------------


@planner
def misses_a_group(plan, tables, pool, holders):
    plan.zero["whole"][:] = 0


def zeroes_first_leaf(patch):
    def first_only(self, ids):
        groups = dict(self.groups)
        for group, given in ids.items():
            leaves, tree = jax.tree.flatten(groups[group])
            leaves[0] = fill_blocks(leaves[0], given, 0)
            groups[group] = jax.tree.unflatten(tree, leaves)
        return self.replace(groups=groups)

    patch.setattr(StateCache, "zero", first_only)


def zeroes_after_copy(patch):
    zero, copy, pending = StateCache.zero, StateCache.copy, []

    def later(self, ids):
        pending.append(ids)
        return self

    patch.setattr(StateCache, "zero", later)
    patch.setattr(StateCache, "copy", lambda self, copies: zero(copy(self, copies), pending.pop()))


def starts_from_own_block(patch):
    """A fresh row reads the block that it is about to write, as engines without a null block do."""
    packed_rows = step.packed_rows

    def own(spec, group, state, prefill, ends):
        rows = packed_rows(spec, group, state, prefill, ends)
        return rows._replace(read_ids=jnp.where(rows.read_ids == 0, rows.write_ids, rows.read_ids))

    patch.setattr(step, "packed_rows", own)


@planner
def names_anothers_block(plan, tables, pool, holders):
    cells = plan.cells["whole"]
    taken = tables["whole"][~plan.clear]
    if cells.ids[0] and taken.any():
        cells.ids[0] = taken[taken != 0][0]


def frees_twice(patch):
    release = scheduler._release

    def twice(step, leaving):
        names = [step.running(row).request.id for row in leaving]
        release(step, leaving)
        for name in names:
            step.ledger.free(name, step.before.pool.held[name])

    patch.setattr(scheduler, "_release", twice)


def no_holder_check(patch):
    patch.setattr(Ledger, "_require_held", lambda self, holder, group, ids: None)


def no_null_check(patch):
    """Null ids are skipped where they have to be refused."""
    checked = Ledger._checked

    def without_null(self, group, ids):
        return checked(self, group, [i for i in np.atleast_1d(ids).tolist() if i != 0])

    patch.setattr(Ledger, "_checked", without_null)


def seals_nothing(patch):
    patch.setattr(Ledger, "seal", lambda self, holder, ids: None)


# -- sizes and ids ---------------------------------------------------------------------------------


def one_scale_for_all(patch):
    """Rows of every group are divided over the context shards, recurrent ones too; what is handed out is not."""

    def capacity(self, name):
        group = self.group(name)
        shards = max(self.context_shards, 2)
        whole = group.block_size is None
        return 1 if whole else -(-self.max_len // (group.block_size * shards))

    patch.setattr(CacheSpec, "capacity", capacity)


def clamps_columns(patch):
    write_cells = blocks.write_cells

    def clamped(table, rows, columns, ids):
        return write_cells(table, rows, jnp.clip(jnp.asarray(columns), 0, table.shape[1] - 1), ids)

    everywhere(patch, write_cells, clamped)


def truncates_rows(patch):
    write = BlockTables.write

    def fitting(self, row, ids, start=0):
        return write(self, row, {g: np.asarray(i)[: self.ids[g].shape[1]] for g, i in ids.items()})

    patch.setattr(BlockTables, "write", fitting)


@planner
def pads_with_minus_one(plan, tables, pool, holders):
    for ids in plan.zero.values():
        ids[ids == 0] = -1


def null_is_minus_one(patch):
    lookup = BlockTables.lookup

    def minus_one(self, group, columns, live):
        ids = lookup(self, group, columns, live)
        return jnp.where(ids == 0, -1, ids)

    patch.setattr(BlockTables, "lookup", minus_one)


def negative_ids_wrap(patch):
    """What numpy does, and `jax.numpy` too unless told otherwise."""

    def wrapping(function):
        def wrap(pool, ids):
            ids = jnp.asarray(ids)
            return jnp.where(ids < 0, ids + pool.shape[1], ids)

        def wrapped(pool, *args, **named):
            if "ids" in named:
                return function(pool, *args, **{**named, "ids": wrap(pool, named["ids"])})
            at = next(i for i, a in enumerate(args) if getattr(a, "ndim", 0) == 1)
            return function(pool, *args[:at], wrap(pool, args[at]), *args[at + 1 :], **named)

        return wrapped

    for name in ("read_blocks", "write_blocks", "gather_blocks", "scatter_blocks", "fill_blocks"):
        everywhere(patch, getattr(blocks, name), wrapping(getattr(blocks, name)))


def null_by_product(patch):
    """The null block is read and multiplied by 0, which is right unless it holds NaN."""

    def masked(ids, values, axis):
        # Not `ids != 0`: XLA makes a select of a product with a truth value.
        mask = jnp.sign(ids).reshape((1,) * axis + (-1,) + (1,) * (values.ndim - axis - 1))
        return values * mask.astype(values.dtype)

    def read(pool, layer, ids):
        return masked(ids, pool[layer, ids], 0)

    def gather(pool, ids):
        return masked(ids, pool[:, ids], 1)

    everywhere(patch, blocks.read_blocks, read)
    everywhere(patch, blocks.gather_blocks, gather)


def null_is_written(patch):
    def write(pool, layer, ids, values):
        return pool.at[layer, ids].set(
            values.astype(pool.dtype), mode="drop", wrap_negative_indices=False
        )

    def scatter(pool, ids, values):
        return pool.at[:, ids].set(
            values.astype(pool.dtype), mode="drop", wrap_negative_indices=False
        )

    everywhere(patch, blocks.write_blocks, write)
    everywhere(patch, blocks.scatter_blocks, scatter)


# -- sampling, prompts and ends --------------------------------------------------------------------


def draws_by_row(patch):
    sample = step.sample

    def by_row(logits, sampling, position, forced, filters=None):
        rows = jnp.arange(logits.shape[0], dtype=jnp.uint32)
        return sample(logits, sampling.replace(request=rows), position, forced, filters)

    patch.setattr(step, "sample", by_row)


def draws_by_step(patch):
    """The draw is keyed by how much is left to do in the batch's first row, not by the token's own position."""
    sample = step.sample

    def by_step(logits, sampling, position, forced, filters=None):
        total = jnp.broadcast_to(position.sum(), position.shape)
        return sample(logits, sampling, total, forced, filters)

    patch.setattr(step, "sample", by_step)


def takes_nan_for_a_score(patch):
    sample = step.sample

    def all_finite(logits, sampling, position, forced, filters=None):
        token, logprob, finite = sample(logits, sampling, position, forced, filters)
        return token, logprob, jnp.ones_like(finite)

    patch.setattr(step, "sample", all_finite)


def cuts_anywhere(patch):
    patch.setattr(draft, "CHUNK", 1)


def device_misses_stops(patch):
    admission = Page._admission

    def without_stops(page, null):
        return admission(page, null).replace(stop_ids=null.stop_ids)

    patch.setattr(Page, "_admission", without_stops)


def host_keeps_the_tail(patch):
    push = progress.Progress.push

    def all_of_it(self, tokens, logprobs, at):
        stopped = self.stop_ids & set(tokens)
        self.stop_ids = frozenset()
        event = push(self, tokens, logprobs, at)
        if stopped and event.completion is None:
            event = self.finish("stop")
        return event

    patch.setattr(progress.Progress, "push", all_of_it)
