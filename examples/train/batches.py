"""Which tokens each training step sees: a pure function of the step, so a run can resume anywhere.

Every lane of the batch walks through one passage at a time, a window of ``length`` tokens per step,
and carries its state from window to window. A passage starts at a paragraph, from a zero state.
Half of the passages are led by ``<|endoftext|>``, as a document is; the others start bare, as a
prompt without it does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    tokens: np.ndarray  # int32 [lanes, length + 1]: inputs and, one further, targets
    fresh: np.ndarray  # bool [lanes]: the lane starts a passage, forget its state


class Batches:
    """Batches of a token stream; ``breaks`` are the places where a paragraph starts."""

    def __init__(
        self,
        tokens: np.ndarray,
        breaks: np.ndarray,
        *,
        lanes: int,
        length: int,
        windows: int,
        lead: int = 0,
        seed: int = 0,
    ):
        self.tokens, self.breaks, self.lead, self.seed = tokens, breaks, lead, seed
        self.lanes, self.length, self.windows = lanes, length, windows
        self.passage = length * windows
        self.per_epoch = (len(tokens) - 2) // self.passage
        self._orders: dict[int, np.ndarray] = {}

    def _order(self, epoch: int) -> np.ndarray:
        """Starts of an epoch's passages, shuffled; the cuts move from epoch to epoch."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self.seed, epoch])
            starts = 1 + np.arange(self.per_epoch) * self.passage + rng.integers(self.passage)
            starts = np.minimum(starts, len(self.tokens) - self.passage - 2)
            after = self.breaks[
                np.minimum(np.searchsorted(self.breaks, starts), len(self.breaks) - 1)
            ]
            near = (after - starts < self.length) & (after < len(self.tokens) - self.passage - 2)
            self._orders[epoch] = rng.permutation(np.where(near, after, starts))
            self._orders.pop(epoch - 2, None)
        return self._orders[epoch]

    def __call__(self, step: int) -> Batch:
        """Returns the batch of a step. Lanes are staggered: each step some of them start afresh."""
        lane = np.arange(self.lanes)
        clock = step + lane * self.windows // self.lanes
        place = clock % self.windows
        number = (clock // self.windows) * self.lanes + lane
        epoch, index = np.divmod(number, self.per_epoch)
        starts = np.array([self._order(e)[i] for e, i in zip(epoch, index, strict=True)])
        bare = (number * 2654435761 >> 16) % 2
        first = starts + bare - 1 + place * self.length
        tokens = self.tokens[first[:, None] + np.arange(self.length + 1)].astype(np.int32)
        # At the very first step every lane is fresh, wherever in its passage it stands.
        fresh = (place == 0) | (step == 0)
        tokens[(place == 0) & (bare == 0), 0] = self.lead
        return Batch(tokens, fresh)


def paragraph_breaks(tokens: np.ndarray, ends_paragraph: np.ndarray) -> np.ndarray:
    """Returns where paragraphs start, given which token ids end one."""
    return np.flatnonzero(ends_paragraph[tokens[:-1]]) + 1
