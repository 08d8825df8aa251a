"""The table of faults: what was wrong, how it is put back, and what has to be seen of it.

Most have two guards. Where the host's checks would refuse the plan, a fault is shown twice: refused as things are, and
with `checks_off` as what it was when it was found. Where two mechanisms on the device each suffice, both are taken out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.mutants import faults as f
from tests.mutants import scenarios, storms, uneven
from tests.mutants.faults import Patch, together


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, how it is put back, the scenario that shows it, and the symptoms that have to be seen.

    `guarded` says that the host's checks stop it, so it shows with `checks_off` only; `compiled` names the device's
    programs that it changes; `reshaped` says that it changes the cache's shapes.
    """

    name: str
    patch: Patch
    seen: set[str]
    scenario: Callable[..., dict[str, str]] = scenarios.serve
    guarded: bool = False
    compiled: tuple[str, ...] = ()
    reshaped: bool = False
    poison: bool = True


def row(name: str, patch: Patch, seen: str, **rest: Any) -> Fault:
    return Fault(name, patch, set(seen.split(", ")), **rest)


ALL = ("prepare", "prefill", "decode")

FAULTS = [
    # Stale rows.
    row("a finished row is not cleared", f.never_clears, "tables, active, foreign, text", guarded=True),
    row("the device's rows are not cleared", f.device_keeps_rows, "tables", compiled=ALL),
    row("inactive rows are not masked", f.decode_unmasked, "foreign, text", compiled=("decode",)),
    row("the dummy step: rows neither cleared nor masked", together(f.device_keeps_rows, f.decode_unmasked),
        "tables, foreign, text", compiled=ALL),
    row("the dummy step on an idle rank", together(f.device_keeps_rows, f.decode_unmasked),
        "tables, foreign, text", scenario=uneven.uneven),
    row("blocks are freed before the row is cleared", f.clears_late, "tables, active, text", guarded=True),
    row("a row is handed on a step early", f.leaves_early, "lost"),
    row("a step's tokens go to the row's new tenant", f.credits_new_tenant, "lost"),
    row("a step's tokens go to whoever has the id now", f.credits_by_id, "text"),
    # Dirty blocks.
    row("the zero list misses a group", f.misses_a_group, "dirty", guarded=True),
    row("... and fresh rows read their own block", together(f.misses_a_group, f.starts_from_own_block),
        "dirty, text", guarded=True, compiled=("prefill",), poison=False),
    row("zeroing skips a leaf of a tuple", f.zeroes_first_leaf, "dirty", compiled=ALL),
    row("... and fresh rows read their own block (leaf)", together(f.zeroes_first_leaf, f.starts_from_own_block),
        "dirty, text", compiled=ALL, poison=False),
    row("zeroing runs after copying", f.zeroes_after_copy, "text", scenario=scenarios.fork),
    # Rows too narrow.
    row("one scale factor for all groups", f.one_scale_for_all, "tables", scenario=scenarios.shards, guarded=True),
    row("... in an engine", f.one_scale_for_all, "tables, text", guarded=True, compiled=ALL, reshaped=True),
    row("... and the column is clamped", together(f.one_scale_for_all, f.clamps_columns), "tables, text",
        guarded=True, compiled=ALL, reshaped=True),
    row("a row that is too long is cut", f.truncates_rows, "overflow", scenario=scenarios.values),
    # Ids.
    row("-1 is null and wraps", together(f.null_is_minus_one, f.negative_ids_wrap), "foreign, text", compiled=ALL,
        poison=False),
    row("-1 is null and does not wrap", f.null_is_minus_one, "error", compiled=("prefill", "decode")),
    row("-1 pads the zero list and wraps", together(f.pads_with_minus_one, f.negative_ids_wrap), "text",
        guarded=True, compiled=ALL),
    row("null is read and multiplied by 0", f.null_by_product, "error", compiled=("prefill", "decode")),
    row("null is written", f.null_is_written, "null", compiled=("prefill", "decode")),
    # Owners.
    row("two rows write one block", f.names_anothers_block, "tables, text", guarded=True),
    row("blocks are freed twice", f.frees_twice, "text", guarded=True),
    row("the pool takes a double free", f.no_holder_check, "double free", scenario=scenarios.values),
    row("the pool skips null ids", f.no_null_check, "null", scenario=scenarios.values),
    row("sealed blocks are written", f.seals_nothing, "sealed write", scenario=scenarios.values),
    # Prefixes.
    row("a state is visible when it is planned", storms.publishes_when_planned, "text", scenario=storms.storm,
        guarded=True),
    # Company and ends.
    row("draws are keyed by row", f.draws_by_row, "company", compiled=("prefill", "decode")),
    row("draws are keyed by the batch's step", f.draws_by_step, "company", compiled=("prefill", "decode")),
    row("NaN becomes token 0 for ever", f.takes_nan_for_a_score, "error", compiled=("prefill", "decode")),
    row("prompts are cut anywhere", f.cuts_anywhere, "company", scenario=scenarios.splits),
    row("the device misses stop ids", f.device_misses_stops, "late"),
    row("tokens after the end leak", together(f.device_misses_stops, f.host_keeps_the_tail), "late, text"),
]  # fmt: skip
