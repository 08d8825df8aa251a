"""Of which model and layout a state is: what a file says, so that it is read back there or not at all."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np

from jaxstate.errors import SnapshotError
from jaxstate.state.spec import GroupSpec
from jaxstate.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which model a state is of: its name, a hash of its config and of all its weights, their dtype."""

    model: str
    fingerprint: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """A group's state layout as a file tells it; `leaves` are the shape and dtype of one block by path."""

    name: str
    kind: str
    layers: int
    block_size: int | None
    leaves: dict[str, tuple[tuple[int, ...], str]]

    @classmethod
    def of(cls, group: GroupSpec) -> Layout:
        leaves = {
            path: (tuple(x.shape), np.dtype(x.dtype).name) for path, x in named_leaves(group.leaves)
        }
        return cls(group.name, group.kind, group.layers, group.block_size, leaves)


def check_same(
    what: str,
    theirs: tuple[Identity, tuple[Layout, ...]],
    ours: tuple[Identity, tuple[Layout, ...]],
) -> None:
    """Raises SnapshotError, with both sides of every difference, unless both are of one model and layout."""
    problems = []
    for field in ("model", "dtype"):
        there, here = getattr(theirs[0], field), getattr(ours[0], field)
        if there != here:
            problems.append(f"its {field} is {there}, this one's is {here}")
    if theirs[1] != ours[1]:
        problems.append(f"its layout is {_told(theirs[1])}, this model's is {_told(ours[1])}")
    if not problems and theirs[0].fingerprint != ours[0].fingerprint:
        problems.append(
            f"its model has the fingerprint {theirs[0].fingerprint}, this one {ours[0].fingerprint}: "
            "another config or other weights"
        )
    if problems:
        raise SnapshotError(
            f"{what} is not of this model: {'; '.join(problems)}; load the model that it was taken with"
        )


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a state with the names that files give them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]


def versions() -> dict[str, str]:
    """Versions that a state was made with."""
    try:
        ours = metadata.version("jaxstate")
    except metadata.PackageNotFoundError:
        ours = "unknown"
    return {"jaxstate": ours, "jax": jax.__version__}


def _told(layout: tuple[Layout, ...]) -> str:
    return " and ".join(f"{g.name} ({g.layers} layers, {g.leaves})" for g in layout)
