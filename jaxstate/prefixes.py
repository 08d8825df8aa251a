"""What an engine keeps for prompts that begin alike, as its user sees it: pins, answers, a folder for later runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxstate import prefix_store, scheduler
from jaxstate.errors import SpecError
from jaxstate.prefix_store import Blocks, PrefixStore, Stored, ids_of
from jaxstate.step import place_step
from pallas_kernels.rows import CHUNK

if TYPE_CHECKING:
    from jaxstate.engine import Engine


class Prefixes:
    """The states that an engine keeps (`engine.prefixes`).

    Example:
      >>> engine.prefixes.pin(tokenizer.encode(instructions))
      >>> engine.prefixes.save("prefixes")
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._place = engine.mesh.placing(place_step)

    def pin(self, tokens: Sequence[int], salt: str = "") -> int:
        """Keeps the state after these tokens, up to the last whole 64, until `unpin`; how many tokens that are.

        It is read once, in its turn, if nobody has read it; requests that begin like it wait for that.

        Raises:
          CapacityError: with it the pins would leave no room for one request, or it is longer than `max_len`.
          RequestError: it has fewer than 64 tokens, or one that the model does not know.
          SpecError: prefix reuse is off.
        """
        self._check()
        engine = self._engine
        engine.check_tokens(tokens)
        engine.ranks = engine.ranks.each(lambda s: scheduler.pin(s, tokens, salt))
        return len(tokens) // CHUNK * CHUNK

    def unpin(self, tokens: Sequence[int], salt: str = "") -> None:
        """Lets the state after these tokens go like any other from now on; RequestError when it is not pinned."""
        ranks = self._engine.ranks
        self._engine.ranks = ranks.each(lambda s: scheduler.unpin(s, tokens, salt))

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        return self._engine.ranks.unsettled

    def settle(self) -> None:
        """Reads the answers that nobody has read, so that a next turn starts after them; what waits is done with first.

        An engine does so by itself in prompt steps that have room, and in every `step` that finds it idle. Nothing
        happens while a request runs.
        """
        engine = self._engine
        while engine.calm and (self.unsettled or not engine.idle):
            engine.step()

    def load(self, folder: str | os.PathLike) -> Stored:
        """Reads back what `save` left, as far as there are free blocks; files that are bad are named.

        Raises:
          SnapshotError: the folder is not there, or has states of another model or layout.
          SpecError: prefix reuse is off.
        """
        engine = self._engine

        store, stored = self._store(folder), Stored()

        def place(rank: int, blocks: Blocks, state: dict[str, Any]) -> None:
            engine.state = self._place(engine.state, engine.mesh.only(rank, ids_of(blocks)), state)

        for rank, schedule in enumerate(engine.ranks.schedules):
            schedule, stored = prefix_store.load(store, schedule, functools.partial(place, rank))
            engine.ranks = engine.ranks.put(rank, schedule)
        return stored

    def save(self, folder: str | os.PathLike, *, most_bytes: int | None = None) -> Stored:
        """Writes the states that are kept to a folder, one file each, the most valuable first.

        Raises:
          SnapshotError: the folder has states of another model or layout, or cannot be written.
          SpecError: prefix reuse is off.
        """
        cache = self._engine.state.cache

        def fetch(blocks: Blocks) -> dict[str, Any]:
            return jax.device_get({g: cache.read(g, i) for g, i in ids_of(blocks).items()})

        store, index = self._store(folder), self._engine.ranks.index
        return prefix_store.save(store, index, fetch, most_bytes)

    def _store(self, folder: str | os.PathLike) -> PrefixStore:
        self._check()
        engine = self._engine
        mesh = engine.mesh
        here = prefix_store.circumstances(engine.shape, mesh.devices[0], mesh.shards)
        return PrefixStore.of(folder, engine.model, mesh.joined(engine.shape.spec.groups), here)

    def _check(self) -> None:
        if not self._engine.shape.checkpoints:
            raise SpecError("prefix reuse is off, so there are no states to keep; checkpoints is 0")

    def __repr__(self) -> str:
        schedule = self._engine.schedule
        return f"Prefixes({schedule.index}, {len(schedule.pins)} pins, {len(schedule.answers)} answers to read)"
