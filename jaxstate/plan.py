"""Everything that one step will do, made on the host in numpy and checked there before anything is dispatched.

A `StepPlan` has one shape for the life of an engine: lists are padded with the null id, row settings are dense and
masked. What a step may not do is refused by `rules.check_plan`, with the rule that it breaks; compiled code has nothing
left that can fail. A row without work is null in an ordinary plan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxstate.request import MAX_STOP_IDS
from jaxstate.sampling import Sampling
from jaxstate.state.spec import NULL, CacheSpec, format_leaves, has_values
from jaxstate.state.tables import Cells
from jaxstate.typing import Bool, Int32
from jaxstate.values import changed

HostTables = dict[str, np.ndarray]
"""The host's copy of the block tables, `int32[rows, capacity]` per group."""


class Holders(tuple[str | None, ...]):
    """Whose each row is; None for a null row. Which rows are null is kept as an array, and not worked out by plan."""

    vacant: np.ndarray

    @classmethod
    def of(cls, names: Iterable[str | None]) -> Holders:
        """The names as they are if they are such a value already."""
        if isinstance(names, cls):
            return names
        made = cls(names)
        return made._with(np.array([name is None for name in made], bool))

    def put(self, changes: Mapping[int, str | None]) -> Holders:
        """The same but for the rows in `changes`."""
        if not changes:
            return self
        names, vacant = list(self), self.vacant.copy()
        for row, name in changes.items():
            names[row], vacant[row] = name, name is None
        return type(self)(names)._with(vacant)

    def _with(self, vacant: np.ndarray) -> Holders:
        vacant.setflags(write=False)
        self.vacant = vacant
        return self


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """The static sizes of an engine's plans.

    `chunk_tokens` is how many prompt tokens one prefill step takes, `decode_steps` how many tokens a row generates in
    one decode step, `copies` how many block copies per group a plan can hold, `checkpoints` how many states a row can
    leave behind in one prefill step for others to start from. The cell list holds a full row, or for every row what it
    grows by in a decode step, whichever is more; the zero list has room for all checkpoints beside that.
    """

    spec: CacheSpec
    chunk_tokens: int
    decode_steps: int = 1
    copies: int = 0
    checkpoints: int = 0

    def width(self, group: str) -> int:
        """Entries in a plan's cell list of this group."""
        per_block = self.spec.group(group).tokens_per_block(self.spec.context_shards)
        growth = 1 if per_block is None else -(-self.decode_steps // per_block)
        return max(self.spec.rows * growth, self.spec.capacity(group))

    def zeros(self, group: str) -> int:
        """Entries in a plan's zero list of this group."""
        return self.width(group) + self.spec.rows * self.checkpoints

    @functools.cached_property
    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """By group: entries in the cell list and in the zero list, and blocks; worked out once."""
        return {g: (self.width(g), self.zeros(g), self.spec.blocks(g)) for g in self.spec.names}

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """By group: block ids in a row."""
        return {g: self.spec.capacity(g) for g in self.spec.names}

    @functools.cached_property
    def grows(self) -> bool:
        """Whether sequences take more blocks while they decode."""
        spec = self.spec
        return any(g.tokens_per_block(spec.context_shards) is not None for g in spec.groups)

    @functools.cached_property
    def one(self) -> dict[str, int]:
        """A block of every group: what a checkpoint takes. Not to be written to."""
        return dict.fromkeys(self.spec.names, 1)

    def need(self, tokens: int, request: str = "") -> dict[str, int]:
        """`CacheSpec.need` of one token or more, which is worked out only where it depends on their number."""
        if self.grows or tokens > self.spec.max_len:
            return self.spec.need(tokens, request)
        return self.one

    @functools.cached_property
    def nulls(self) -> tuple[StepPlan, StepPlan]:
        """Plans that do nothing, to decode and to read prompts, in arrays that cannot be written to."""
        return _null(self, prefill=False), _null(self, prefill=True)


class Admission(struct.PyTreeNode):
    """Settings of the rows that start with this plan; rows not marked in `rows` keep theirs."""

    rows: Bool[Any, "rows"]
    budget: Int32[Any, "rows"]  # tokens to generate
    stop_ids: Int32[Any, "rows n"]  # padded with -1, which is no token
    sampling: Sampling
    source: dict[str, Int32[Any, "rows"]]  # sealed block that the row starts from; 0 for none
    position: Int32[Any, "rows"]  # tokens that are in the source


class Prefill(struct.PyTreeNode):
    """Prompt tokens of this step, packed row after row."""

    tokens: Int32[Any, "chunk_tokens"]
    offsets: Int32[Any, "rows+1"]  # row r has tokens offsets[r]:offsets[r + 1]
    starts: Int32[Any, "rows"]  # position of the row's first token in its text
    sample: Bool[Any, "rows"]  # the row's prompt ends here
    checkpoints: dict[str, Int32[Any, "rows m"]]  # blocks for states on the way; 0 for none
    checkpoint_positions: Int32[Any, "rows m"]  # after how many tokens of this step


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
    forced: Int32[Any, "rows steps"]  # tokens that are known already; -1 where one is to be drawn
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
    """The plan that does nothing: every row null. What builds a plan may fill in these arrays, which are its own."""
    return _copied(shape.nulls[prefill])


def _copied(value: Any) -> Any:
    """A plan, or part of one, with arrays of its own."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple([_copied(part) for part in value])
    if value is None:
        return None
    return changed(value, **{name: _copied(part) for name, part in value.__dict__.items()})


def _null(shape: PlanShape, *, prefill: bool) -> StepPlan:
    sizes, rows = shape.sizes, shape.spec.rows

    def zeros(*size: int) -> np.ndarray:
        return np.zeros(size, np.int32)

    def each(*size: int) -> dict[str, np.ndarray]:
        return {g: zeros(*size) for g in sizes}

    sampling = Sampling(
        temperature=np.zeros(rows, np.float32), top_k=zeros(rows), top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32), seed=np.zeros(rows, np.uint32), request=np.zeros(rows, np.uint32),
    )  # fmt: skip
    cells, zero, freed = {}, {}, {}
    for g, (width, most, blocks) in sizes.items():
        cells[g] = Cells(zeros(width), zeros(width), zeros(width))
        zero[g], freed[g] = zeros(most), np.zeros(blocks, bool)
    plan = StepPlan(
        clear=np.zeros(rows, bool), cells=cells, zero=zero, freed=freed,
        copies={g: (zeros(shape.copies), zeros(shape.copies)) for g in sizes},
        admission=Admission(
            rows=np.zeros(rows, bool), budget=zeros(rows),
            stop_ids=np.full((rows, 2 * MAX_STOP_IDS), -1, np.int32), sampling=sampling,
            source=each(rows), position=zeros(rows),
        ),
        forced=np.full((rows, 1 if prefill else shape.decode_steps), -1, np.int32),
        prefill=Prefill(
            tokens=zeros(shape.chunk_tokens), offsets=zeros(rows + 1), starts=zeros(rows), sample=np.zeros(rows, bool),
            checkpoints=each(rows, shape.checkpoints), checkpoint_positions=zeros(rows, shape.checkpoints),
        ) if prefill else None,
    )  # fmt: skip
    for array in jax.tree.leaves(plan):
        array.setflags(write=False)
    return plan


def apply_cells(tables: HostTables, plan: StepPlan) -> HostTables:
    """The host's tables after the plan's clears and cells; the device's must equal them."""
    after, cleared = {}, plan.clear.nonzero()[0]
    for group, table in tables.items():
        cells = plan.cells[group]
        real = cells.ids.nonzero()[0]
        if len(cleared) or len(real):
            table = table.copy()
            table[cleared] = NULL
        if len(real):
            table[cells.rows[real], cells.columns[real]] = cells.ids[real]
        after[group] = table
    return after
