"""A plan in the making: short lists of what it is to hold, which become its arrays once all of them are known.

Most of a plan is what every plan has that does nothing; those arrays are everybody's, and nobody can write to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from jaxstate.plan import Admission, PlanShape, Prefill, StepPlan
from jaxstate.sampling import Sampling, request_hash
from jaxstate.schedule import Running
from jaxstate.state.ledger import Blocks
from jaxstate.state.tables import Cells
from jaxstate.values import changed

_GIVEN, _USUAL = ("temperature", "top_k", "top_p", "min_p", "seed"), (0, 0, 1, 0, 0)
"""Sampling parameters, and what a plan has where nobody asks for anything else."""


class Page:
    """What a step clears, hands out, gives back, admits and reads, in lists that are added to."""

    def __init__(self, shape: PlanShape, extra_stop_ids: SequenceOf[int] = ()):
        self.shape, self.extra = shape, tuple(extra_stop_ids)
        self.clear: list[int] = []
        self.cells: dict[str, tuple[list[int], list[int], list[int]]] = {}  # rows, columns, ids
        self.zero: Blocks = {group: [] for group in shape.sizes}
        self.freed: Blocks = {}
        self.admitted: list[Running] = []
        self.forced: dict[int, SequenceOf[int]] = {}  # tokens that a row makes again
        self.spans: list[tuple[Running, int, int]] = []  # who reads, from where to where
        self.checkpoints: list[
            tuple[int, int, int, dict[str, int]]
        ] = []  # row, slot, place, blocks

    def place(
        self, running: Running, blocks: Blocks, has: Mapping[str, SequenceOf[int]] | None = None
    ) -> None:
        """Writes fresh blocks to the request's row, behind those that it has, and has them zeroed."""
        for group, ids in blocks.items():
            first = len(has.get(group, ())) if has else 0
            if first + len(ids) > self.shape.widths[group]:
                self.shape.spec.check_row(group, first + len(ids), running.request.id)
            rows, columns, cells = self.cells.setdefault(group, ([], [], []))
            rows += [running.row] * len(ids)
            columns += range(first, first + len(ids))
            cells += ids
            self.zero[group] += ids

    def leave(self, row: int, slot: int, place: int, blocks: dict[str, int]) -> None:
        """Has the row leave its state after `place` tokens of this step in these blocks, which are zeroed."""
        self.checkpoints.append((row, slot, place, blocks))
        for group, block in blocks.items():
            self.zero[group].append(block)

    def plan(self, *, prefill: bool) -> StepPlan:
        """The plan with all that was written here."""
        null, fields = self.shape.nulls[prefill], {}
        if self.clear:
            fields["clear"] = _filled(null.clear, self.clear, True)
        if self.cells:
            fields["cells"] = {g: self._cells(null.cells[g], g) for g in null.cells}
        if any(self.zero.values()):
            fields["zero"] = {g: _begun(null.zero[g], ids) for g, ids in self.zero.items()}
        if any(self.freed.values()):
            fields["freed"] = {
                g: _filled(null.freed[g], ids, True) for g, ids in self.freed.items()
            }
        if self.admitted:
            fields["admission"] = self._admission(null.admission)
        if self.forced:
            fields["forced"] = forced = null.forced.copy()
            for row, tokens in self.forced.items():
                forced[row, : len(tokens)] = tokens
        if null.prefill is not None:
            fields["prefill"] = self._prefill(null.prefill)
        return changed(null, **fields)

    def _cells(self, null: Cells, group: str) -> Cells:
        lists = self.cells.get(group)
        if lists is None:
            return null
        rows, columns, ids = lists
        return changed(
            null, rows=_begun(null.rows, rows), ids=_begun(null.ids, ids),
            columns=_begun(null.columns, columns) if any(columns) else null.columns,
        )  # fmt: skip

    def _admission(self, null: Admission) -> Admission:
        admitted, extra = self.admitted, self.extra
        rows = np.array([running.row for running in admitted])
        asked = [running.request.sampling for running in admitted]
        fields: dict[str, Any] = {
            "rows": _filled(null.rows, rows, True),
            "budget": _filled(null.budget, rows, [running.budget for running in admitted]),
        }
        started = [running for running in admitted if running.source is not None]
        if started:
            where = rows if len(started) == len(admitted) else [r.row for r in started]
            fields["position"] = _filled(null.position, where, [r.cached for r in started])
            fields["source"] = {
                group: _filled(source, where, [r.source.blocks[group] for r in started if r.source])
                for group, source in null.source.items()
            }
        stops = [(*a.stop_ids, *(() if a.ignore_eos else extra)) for a in asked]
        if any(stops):
            fields["stop_ids"] = stop_ids = null.stop_ids.copy()
            for running, ids in zip(admitted, stops, strict=True):
                stop_ids[running.row, : len(ids)] = ids
        return changed(null, sampling=_sampling(null.sampling, rows, admitted), **fields)

    def _prefill(self, null: Prefill) -> Prefill:
        tokens, offsets = null.tokens.copy(), null.offsets.copy()
        starts, sample, fields = null.starts.copy(), null.sample.copy(), {}
        before, at = 0, 0
        for running, start, end in sorted(self.spans, key=lambda span: span[0].row):
            row, after = running.row, at + end - start
            offsets[before : row + 1], starts[row] = at, start
            tokens[at:after] = running.tokens[start:end]
            if end == len(running.tokens):
                sample[row] = True
            before, at = row + 1, after
        offsets[before:] = at
        if self.checkpoints:
            fields["checkpoint_positions"] = positions = null.checkpoint_positions.copy()
            fields["checkpoints"] = {g: ids.copy() for g, ids in null.checkpoints.items()}
            for row, slot, place, blocks in self.checkpoints:
                positions[row, slot] = place
                for group, block in blocks.items():
                    fields["checkpoints"][group][row, slot] = block
        return changed(null, tokens=tokens, offsets=offsets, starts=starts, sample=sample, **fields)


def _sampling(null: Sampling, rows: np.ndarray, admitted: SequenceOf[Running]) -> Sampling:
    """What is asked for; arrays that would be as they are when nothing is are everybody's."""
    asked = [running.request.sampling for running in admitted]
    hashes = [request_hash(running.request.id) for running in admitted]
    given = [(a.temperature, a.top_k, a.top_p, a.min_p, a.seed) for a in asked]
    fields = {"request": _filled(null.request, rows, hashes)}
    if given.count(_USUAL) < len(given):
        for name, values in zip(_GIVEN, zip(*given, strict=True), strict=True):
            fields[name] = _filled(getattr(null, name), rows, values)
    return changed(null, **fields)


def _filled(null: np.ndarray, rows: Any, values: Any) -> np.ndarray:
    """The array with these values in these rows."""
    array = null.copy()
    array[rows] = values
    return array


def _begun(null: np.ndarray, values: SequenceOf[int]) -> np.ndarray:
    """The array with these values first."""
    array = null.copy()
    array[: len(values)] = values
    return array
