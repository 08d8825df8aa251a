"""Tile sizes and schedules of the kernels, chosen by shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvConfig:
    """`width` channels a thread."""

    width: int


@dataclass(frozen=True)
class SelectiveConfig:
    """`width` channels a thread, `lanes` states of a channel side by side in a warp, and `rows` rows
    of the batch in a program."""

    width: int
    lanes: int = 1
    rows: int = 1

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return 128 // self.lanes * self.width


@dataclass(frozen=True)
class StateConfig:
    """`rows` rows of a head's state a tile.

    Without `stages`, a program loads one tile into registers. With them, `programs` persistent
    programs walk over the tiles with `stages` of them in shared memory.
    """

    rows: int
    stages: int = 0
    programs: int = 0


def largest_divisor(size: int, choices: tuple[int, ...]) -> int:
    """The first of `choices` that divides `size`."""
    return next(choice for choice in choices if size % choice == 0)


def conv_config(rows: int, channels: int) -> ConvConfig:
    """Small batches want many programs, large ones wide accesses."""
    return ConvConfig(largest_divisor(channels // 128, (2, 1)))


def selective_config(rows: int, channels: int, size: int) -> SelectiveConfig:
    """Small batches want many programs; in large ones two rows share a load of `A`."""
    lanes = 4 if size % 4 == 0 else 1
    if rows <= 4:
        return SelectiveConfig(1, lanes)
    if lanes == 1:
        return SelectiveConfig(1)
    return SelectiveConfig(4, lanes, rows=2 if rows >= 64 and rows % 2 == 0 else 1)


def state_config(rows: int, heads: int, width: int, size: int) -> StateConfig:
    """Many small programs: at every batch size at least as fast as taller tiles and pipelines."""
    return StateConfig(16)
