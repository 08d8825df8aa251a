"""The devices that an engine runs on, as ranks: what is divided over them, and the program that each runs on its share.

A rank has tables, blocks and rows of its own, and ids that mean something to it alone. What the ranks have lies rank
after rank along one axis of every array, so that one device's share has the shape of a whole that has one rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstate.errors import SpecError
from jaxstate.models.shards import MODEL, Cut, Divided
from jaxstate.state.cache import StateCache
from jaxstate.state.spec import CacheSpec, GroupSpec
from jaxstate.step import EngineState
from jaxstate.typing import Array, Device, PyTree

DATA = "data"

_OUTCOME = P(None, DATA)


@dataclasses.dataclass(frozen=True)
class RankMesh:
    """A mesh of devices with a rank on each, or on each few that share a model's heads and channels.

    `leaf_axes` says for the leaves of a block along which axis shards of the model lie; None is for models that are not
    divided.
    """

    mesh: Mesh
    leaf_axes: dict[str, PyTree] | None = None

    @classmethod
    def create(
        cls, ranks: int, shards: int, first: Device, leaf_axes: dict[str, PyTree] | None = None
    ) -> RankMesh:
        """The mesh of this many devices of this process, from `first` on.

        Raises:
          SpecError: there are not as many devices.
        """
        there, need = jax.local_devices(backend=first.platform), ranks * shards
        if need > len(there):
            asked = f"data_parallel is {ranks}" + (
                f", tensor_parallel {shards}" if shards > 1 else ""
            )
            more = (
                f"set XLA_FLAGS=--xla_force_host_platform_device_count={need} to make as many of a CPU"
                if first.platform == "cpu"
                else "let this process see more of them"
            )
            raise SpecError(
                f"{asked}, and of devices ({first.device_kind}) there is {len(there)}; lower it, or {more}"
            )
        devices = np.array([first, *(d for d in there if d != first)][:need])
        return cls(Mesh(devices.reshape(ranks, shards), (DATA, MODEL)), leaf_axes)

    @property
    def ranks(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def shards(self) -> int:
        return self.mesh.shape[MODEL]

    @property
    def devices(self) -> SequenceOf[Device]:
        return self.mesh.devices.ravel().tolist()

    @property
    def _state(self) -> Any:
        cache = P(None, DATA)
        if self.leaf_axes is not None:
            cut = jax.tree.map(lambda axis: P(None, DATA, *[None] * axis, MODEL), self.leaf_axes)
            cache = StateCache(cut)
        return EngineState(tables=P(DATA), cache=cache, rows=P(DATA))  # pyright: ignore

    def place(self, model: Divided) -> list[Array]:
        """The model's arrays where the ranks need them; where they are already nothing is copied.

        What is divided, or not read yet, goes tensor by tensor, and to each device no more than its share.
        """
        specs = [NamedSharding(self.mesh, spec) for spec in _param_specs(model)]
        placed = list(model.params)
        here = [
            i for i, x in enumerate(placed) if model.cuts[i] is None and isinstance(x, jax.Array)
        ]
        for i, there in zip(
            here, jax.device_put([placed[i] for i in here], [specs[i] for i in here]), strict=True
        ):
            placed[i] = there
        for i in sorted({*range(len(placed))} - {*here}):
            placed[i] = self._share(model.params[i], model.cuts[i], specs[i])
        return placed

    def _share(self, value: Any, cut: Cut | None, there: NamedSharding) -> Array:
        if isinstance(value, jax.Array):
            value = np.asarray(value)
        shape, width = list(value.shape), 1
        if cut is not None:
            width = cut.width(self.shards)
            shape[cut.axis] = width * self.shards

        @functools.cache
        def part(shard: int) -> np.ndarray:
            return np.array(value) if cut is None else cut.share(value, shard, self.shards)

        def of(index: Any) -> np.ndarray:
            return part(0 if cut is None else (index[cut.axis].start or 0) // width)

        # One is done with before the next is read.
        return jax.block_until_ready(jax.make_array_from_callback(tuple(shape), there, of))

    def create_state(self, spec: CacheSpec, *, poison: bool) -> EngineState:
        """The state of ranks on which nothing has happened, each made where it stays."""
        create = functools.partial(EngineState.create, spec, poison=poison)
        return jax.jit(self._each(create, (), self._state))()

    def program(self, run: Callable[..., Any], model: Divided) -> Any:
        """`run(params, state, packed plan)`, compiled to run on every rank's share; it donates the state.

        Nothing passes between ranks.
        """
        given, made = (_param_specs(model), self._state, P(DATA)), (self._state, _OUTCOME)
        return jax.jit(self._each(run, given, made), donate_argnums=1)

    def placing(self, place: Callable[..., Any]) -> Any:
        """`place(state, ids, values) -> state`, with ids of each rank's own, compiled; it donates the state."""
        values = P()
        if self.leaf_axes is not None:
            values = jax.tree.map(lambda axis: P(None, None, *[None] * axis, MODEL), self.leaf_axes)
        return jax.jit(
            self._each(place, (self._state, P(DATA), values), self._state), donate_argnums=0
        )

    def joined(self, groups: SequenceOf[GroupSpec]) -> tuple[GroupSpec, ...]:
        """The layout of blocks whose shards lie one after the other, as they do in the state of all devices."""
        axes = self.leaf_axes
        if axes is None:
            return tuple(groups)

        def join(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            shape[axis] *= self.shards
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        return tuple(
            dataclasses.replace(g, leaves=jax.tree.map(join, g.leaves, axes[g.name]))
            for g in groups
        )

    def only(self, rank: int, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """These ids for one rank, and null for the others."""
        mine = np.arange(self.ranks) == rank
        return {
            group: np.outer(mine, given).astype(np.int32).ravel() for group, given in ids.items()
        }

    def _each(self, function: Callable[..., Any], given: Any, made: Any) -> Any:
        # Kernels do not say over which axes their results vary, so that cannot be checked.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False
        )


def _param_specs(model: Divided) -> list[P]:
    return [P() if cut is None else P(*[None] * cut.axis, MODEL) for cut in model.cuts]
