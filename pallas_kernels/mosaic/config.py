"""Tile sizes and schedules of the kernels, chosen by shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvConfig:
    """`width` channels a thread."""

    width: int


@dataclass(frozen=True)
class SelectiveConfig:
    """`width` channels a thread, and `rows` rows one after the other in a program."""

    width: int
    rows: int = 1


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
    """Small batches want many programs; in large ones `A` is kept from row to row."""
    lanes = channels // 128
    if rows <= 4:
        return SelectiveConfig(1)
    if rows <= 32:
        return SelectiveConfig(largest_divisor(lanes, (2, 1)))
    return SelectiveConfig(largest_divisor(lanes, (2, 1)), rows=-(-rows // 32))


def state_config(rows: int, heads: int, width: int, size: int) -> StateConfig:
    """Small batches want many programs, large ones several tiles in flight in each."""
    tallest = largest_divisor(width, tuple(n for n in (64, 32, 16) if n * size <= 64 * 128))
    if rows * heads <= 320:
        return StateConfig(16)
    if rows * heads <= 1280:
        return StateConfig(min(tallest, 32))
    return StateConfig(tallest, stages=3, programs=2 * 132)
