"""The one compiled step: clear and write tables, zero, copy, forward, sample, in this order by data dependence.

There are two forward passes, a packed prefill chunk and a run of decode tokens, and both begin with the same
preparation from the same plan. Whoever is not live (finished, never admitted, idle) is null: its block ids are 0 by
lookup, so it reads zeros and writes nothing.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxstate.models.base import CausalLM
from jaxstate.plan import Admission, Prefill, StepPlan
from jaxstate.request import MAX_STOP_IDS
from jaxstate.sampling import Sampling, sample
from jaxstate.state.cache import StateCache
from jaxstate.state.spec import NULL, CacheSpec, GroupSpec
from jaxstate.state.tables import BlockTables
from jaxstate.typing import Array, Bool, Float32, Int32, PyTree
from pallas_kernels.rows import RowIds, Rows


class RowState(struct.PyTreeNode):
    """What the device knows of each row: its next input, how far it has come and how it is sampled."""

    token: Int32[Array, "rows"]
    position: Int32[Array, "rows"]
    left: Int32[Array, "rows"]
    active: Bool[Array, "rows"]
    stop_ids: Int32[Array, "rows n"]
    sampling: Sampling
    source: dict[str, Int32[Array, "rows"]]  # read instead of the row's own block, once
    scores: Float32[Array, "rows vocab"] | None = None  # of the next token, where they are kept

    @classmethod
    def empty(cls, spec: CacheSpec) -> RowState:
        """Rows that are all inactive."""
        rows = spec.rows

        def zeros(dtype=jnp.int32):
            return jnp.zeros(rows, dtype)

        return cls(
            token=zeros(), position=zeros(), left=zeros(), active=zeros(jnp.bool_),
            stop_ids=jnp.full((rows, 2 * MAX_STOP_IDS), -1, jnp.int32),
            sampling=Sampling(
                temperature=zeros(jnp.float32), top_k=zeros(), top_p=zeros(jnp.float32),
                min_p=zeros(jnp.float32), seed=zeros(jnp.uint32), request=zeros(jnp.uint32),
            ),
            source={name: zeros() for name in spec.names},
        )  # fmt: skip

    def admit(self, admission: Admission) -> RowState:
        """The rows with the settings of those that the plan admits; they become active when their prompt ends."""
        new = admission.rows

        def pick(ours, theirs):
            mask = new.reshape(new.shape + (1,) * (ours.ndim - 1))
            return jnp.where(mask, theirs, ours)

        return self.replace(
            active=self.active & ~new,
            left=pick(self.left, admission.budget),
            stop_ids=pick(self.stop_ids, admission.stop_ids),
            sampling=jax.tree.map(pick, self.sampling, admission.sampling),
            source=jax.tree.map(pick, self.source, admission.source),
        )


class EngineState(struct.PyTreeNode):
    """All that a step carries to the next: tables, cache and rows."""

    tables: BlockTables
    cache: StateCache
    rows: RowState

    @classmethod
    def create(cls, spec: CacheSpec, *, poison: bool = False) -> EngineState:
        """The state of an engine in which nothing has happened."""
        return cls(
            BlockTables.empty(spec),
            StateCache.create(spec, poison=poison),
            RowState.empty(spec),
        )


class Outcome(struct.PyTreeNode):
    """What a step made: `made` marks the tokens that are real; `bad` the rows whose logits were not finite."""

    token: Int32[Array, "steps rows"]
    logprob: Float32[Array, "steps rows"]
    made: Bool[Array, "steps rows"]
    bad: Bool[Array, "steps rows"]

    def by_row(self) -> list[tuple[list[int], list[float]]]:
        """Each row's tokens and their logprobs; arrays are taken apart once, not row by row."""
        made = np.asarray(self.made).T
        tokens, logprobs = np.asarray(self.token).T[made], np.asarray(self.logprob).T[made]
        ends = np.cumsum(np.count_nonzero(made, axis=1)).tolist()
        tokens, logprobs = tokens.tolist(), logprobs.tolist()
        return [(tokens[a:b], logprobs[a:b]) for a, b in itertools.pairwise([0, *ends])]


def prepare(state: EngineState, plan: StepPlan, *, poison: bool) -> EngineState:
    """Does to tables, blocks and rows what the plan says, in the plan's order."""
    cache = state.cache
    if poison:
        cache = cache.poison(
            {g: jnp.where(m, jnp.arange(m.shape[0]), 0) for g, m in plan.freed.items()}
        )
    tables = state.tables.update(plan.clear, plan.cells)
    cache = cache.zero(plan.zero)
    cache = cache.copy({group: pair for group, pair in plan.copies.items() if pair[0].shape[0]})
    rows = state.rows.replace(active=state.rows.active & ~plan.clear).admit(plan.admission)
    return EngineState(tables, cache, rows)


def prefill_step(
    model: CausalLM, spec: CacheSpec, state: EngineState, plan: StepPlan, *, poison: bool = False
) -> tuple[EngineState, Outcome]:
    """Prepares, runs the plan's prompt tokens through the model, and samples the rows whose prompt ends here."""
    state = prepare(state, plan, poison=poison)
    prefill = plan.prefill
    assert prefill is not None, "a prefill step needs a prefill plan"
    lengths = prefill.offsets[1:] - prefill.offsets[:-1]
    ends = prefill.starts + lengths
    rows = {g.name: packed_rows(spec, g, state, prefill, ends) for g in spec.groups}
    tokens = prefill.tokens.shape[0]
    row = jnp.repeat(jnp.arange(spec.rows), lengths, total_repeat_length=tokens)
    positions = jnp.arange(tokens, dtype=jnp.int32) - prefill.offsets[row] + prefill.starts[row]
    hidden, cache = model.prefill(prefill.tokens, positions, rows, state.cache)
    last = jnp.maximum(prefill.offsets[1:] - 1, 0)
    logits = model.logits(jnp.take(hidden, last, axis=0, mode="clip"))
    live = lengths > 0
    held = _started(state.rows, live)
    held = held.replace(position=jnp.where(live, ends, state.rows.position))
    after, outcome = _advance(held, logits, prefill.sample & live, plan.forced[:, 0])
    return EngineState(state.tables, cache, after), jax.tree.map(lambda x: x[None], outcome)


def resume_step(
    state: EngineState, plan: StepPlan, *, poison: bool = False
) -> tuple[EngineState, Outcome]:
    """Prepares, and samples for every admitted row from the scores that it kept; decoding goes on from there."""
    state = prepare(state, plan, poison=poison)
    scores, new = state.rows.scores, plan.admission.rows
    assert scores is not None, "only rows that kept their scores resume"
    rows, outcome = _advance(state.rows, scores, jnp.asarray(new), plan.forced[:, 0])
    return state.replace(rows=rows), jax.tree.map(lambda x: x[None], outcome)


def decode_step(
    model: CausalLM,
    spec: CacheSpec,
    state: EngineState,
    plan: StepPlan,
    *,
    steps: int,
    early_exit: bool = True,
    filters: bool | None = None,
    poison: bool = False,
) -> tuple[EngineState, Outcome]:
    """Prepares, then generates up to `steps` tokens for every active row without returning to the host.

    With `early_exit` the loop ends when no row is active, which a CPU decides for nothing and a GPU only by asking the
    host; without, steps that have no active row run and change nothing. `filters` is that of `sample`, for the same
    reason. The results are the same.
    """
    state = prepare(state, plan, poison=poison)
    tables, decode = state.tables, model.decoder()

    forced = jnp.asarray(plan.forced).T

    def one(cache: StateCache, rows: RowState, forced: Array):
        ids = {g.name: token_rows(g, tables, rows) for g in spec.groups}
        hidden, cache = decode(rows.token, rows.position, ids, cache)
        rows = _started(rows, rows.active)
        rows = rows.replace(position=rows.position + rows.active)
        # Behind the barrier, so that how tokens are chosen has no say in how scores are computed.
        logits = lax.optimization_barrier(model.logits(hidden))
        rows, outcome = _advance(rows, logits, rows.active, forced, filters)
        return cache, rows, outcome

    n = spec.rows
    blank = Outcome(
        *(jnp.zeros((steps, n), t) for t in (jnp.int32, jnp.float32, jnp.bool_, jnp.bool_))
    )

    def body(carry):
        step, cache, rows, outcome = carry
        here = lax.dynamic_index_in_dim(forced, step, keepdims=False)
        cache, rows, new = one(cache, rows, here)
        outcome = jax.tree.map(
            lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, step, 0), outcome, new
        )
        return step + 1, cache, rows, outcome

    def more(carry):
        return (carry[0] < steps) & carry[2].active.any()

    first = (jnp.int32(0), state.cache, state.rows, blank)
    if early_exit:
        _, cache, rows, outcome = lax.while_loop(more, body, first)
    else:
        _, cache, rows, outcome = lax.fori_loop(0, steps, lambda _, carry: body(carry), first)
    return EngineState(tables, cache, rows), outcome


def place_step(
    state: EngineState, ids: dict[str, Int32[Array, "n"]], values: dict[str, PyTree]
) -> EngineState:
    """Puts states that were computed elsewhere, leaves `[layers, n, …]`, in free blocks; all other bytes stay."""
    cache = state.cache
    for group, value in values.items():
        cache = cache.write(group, ids[group], value)
    return state.replace(cache=cache)


def packed_rows(
    spec: CacheSpec,
    group: GroupSpec,
    state: EngineState,
    prefill: Prefill,
    ends: Int32[Array, "rows"],
) -> Rows:
    """Where each row's chunk starts from and leaves its state; a group with a block size also stores every boundary."""
    tables, live = state.tables, ends > prefill.starts
    read = tables.lookup(
        group.name, _column(group, prefill.starts - 1), live & (prefill.starts > 0)
    )
    read = _sourced(state.rows, group, read, live)
    write = tables.lookup(group.name, _column(group, ends - 1), live)
    if group.block_size is None:
        ids, positions = prefill.checkpoints[group.name], prefill.checkpoint_positions
        return Rows(prefill.offsets, read, write, ids, positions)
    most = min(spec.capacity(group.name), -(-prefill.tokens.shape[0] // group.block_size))
    first = prefill.starts // group.block_size
    ids, positions = [], []
    for i in range(most):
        boundary = (first + i + 1) * group.block_size
        # The last boundary is the write itself when the chunk ends on it.
        inside = live & (boundary < ends)
        ids.append(tables.lookup(group.name, first + i, inside))
        positions.append(jnp.where(inside, boundary - prefill.starts, 0))
    ids = jnp.concatenate([jnp.stack(ids, 1), prefill.checkpoints[group.name]], 1)
    positions = jnp.concatenate([jnp.stack(positions, 1), prefill.checkpoint_positions], 1)
    return Rows(prefill.offsets, read, write, ids, positions)


def token_rows(group: GroupSpec, tables: BlockTables, rows: RowState) -> RowIds:
    """The blocks that each row's next token reads and writes; null for rows that are not active."""
    started = rows.active & (rows.position > 0)
    read = tables.lookup(group.name, _column(group, rows.position - 1), started)
    read = _sourced(rows, group, read, rows.active)
    return RowIds(read, tables.lookup(group.name, _column(group, rows.position), rows.active))


def _sourced(rows: RowState, group: GroupSpec, read: Array, live: Array) -> Array:
    """The block to read: a row that has a source starts from that, once."""
    source = rows.source[group.name]
    return jnp.where(live & (source != NULL), source, read)


def _started(rows: RowState, ran: Array) -> RowState:
    """The rows after those that ran have left their sources behind."""
    return rows.replace(source={g: jnp.where(ran, NULL, s) for g, s in rows.source.items()})


def _column(group: GroupSpec, position: Array) -> Array:
    if group.block_size is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position, 0) // group.block_size


def _advance(
    rows: RowState, logits: Array, sampled: Array, forced: Array, filters: bool | None = None
) -> tuple[RowState, Outcome]:
    """Samples the next token of the marked rows and ends those that stop; all others stay as they are."""
    token, logprob, finite = sample(logits, rows.sampling, rows.position, forced, filters)
    made, bad = sampled & finite, sampled & ~finite
    left = jnp.where(made, rows.left - 1, rows.left)
    stopped = (token[:, None] == rows.stop_ids).any(axis=1)
    active = jnp.where(sampled, finite & ~stopped & (left > 0), rows.active)
    after = rows.replace(token=jnp.where(made, token, rows.token), left=left, active=active)
    if rows.scores is not None:
        after = after.replace(scores=jnp.where(sampled[:, None], logits, rows.scores))
    return after, Outcome(jnp.where(made, token, 0), jnp.where(made, logprob, 0.0), made, bad)
