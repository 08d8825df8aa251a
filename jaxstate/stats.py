"""What an engine has done so far, in numbers."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxstate.ranks import Ranks, RankStep
from jaxstate.scheduler import Running


@dataclasses.dataclass
class Stats:
    """Counters of one engine since it was made; times in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    plan_s: float = 0.0
    wait_s: float = 0.0
    compile_s: float = 0.0
    programs: int = 0
    late_compilations: int = 0
    peak_blocks: dict[str, int] = dataclasses.field(default_factory=dict)  # of the fullest rank
    read_ahead: int = 0  # texts read for later requests: answers and pins
    read_ahead_tokens: int = 0  # these are not among `prompt_tokens`
    prefix: dict[str, int] = dataclasses.field(default_factory=dict)  # hits and reasons for misses

    def dispatched(self, step: RankStep, ranks: Ranks) -> None:
        """Counts a step that is on its way; `ranks` is what they are while it runs."""
        self.prefill_steps += step.kind == "prefill"
        self.decode_steps += step.kind == "decode"
        for schedule, planned in zip(ranks.schedules, step.planned, strict=True):
            if planned is None:
                continue
            self.preemptions += len(planned.preempted)
            for group, refs in schedule.pool.refs.items():
                used = len(refs) - 1 - schedule.pool.free_count(group)
                self.peak_blocks[group] = max(self.peak_blocks.get(group, 0), used)
            if planned.plan.prefill is not None:
                lengths = np.diff(planned.plan.prefill.offsets)
                ahead = [row for row, r in enumerate(planned.serves) if r is not None and r.reads]
                self.read_ahead += int(planned.plan.prefill.sample[ahead].sum())
                self.read_ahead_tokens += int(lengths[ahead].sum())
                self.prompt_tokens += int(lengths.sum()) - int(lengths[ahead].sum())

    def admitted(self, running: Running) -> None:
        """Counts a request that got its row for the first time."""
        self.cached_tokens += running.cached
        reason = running.miss or "hit"
        self.prefix[reason] = self.prefix.get(reason, 0) + 1
