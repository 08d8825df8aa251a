"""Tile sizes and schedules of the kernels, chosen by shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvConfig:
    """`width` channels a thread."""

    width: int


@dataclass(frozen=True)
class CausalConvConfig:
    """`width` channels a thread; tiles of `tokens`, of which `unroll` are under way at once."""

    width: int
    tokens: int
    unroll: int


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
class ScanConfig:
    """`channels` of a program, whose states are shared out to `groups` of threads; tiles of `tokens`,
    of which `unroll` are read from shared memory ahead of those being walked."""

    channels: int
    groups: int
    tokens: int
    unroll: int


@dataclass(frozen=True)
class StateConfig:
    """`rows` rows of a head's state in a program."""

    rows: int


def largest_divisor(size: int, choices: tuple[int, ...]) -> int:
    """The first of `choices` that divides `size`."""
    return next(choice for choice in choices if size % choice == 0)


def conv_config(rows: int, channels: int) -> ConvConfig:
    """Small batches want many programs, large ones wide accesses."""
    return ConvConfig(largest_divisor(channels // 128, (2, 1)))


def causal_conv_config(tokens: int, channels: int) -> CausalConvConfig:
    """Two channels a thread, and longer tiles where they still keep all multiprocessors busy."""
    width = largest_divisor(channels // 128, (2, 1))
    many = tokens // 64 * (channels // (128 * width)) > 264
    return CausalConvConfig(width, 64 if many else 32, 8)


def selective_config(rows: int, channels: int, size: int) -> SelectiveConfig:
    """Small batches want many programs; in larger ones two rows share a load of `A`."""
    if size % 4:
        return SelectiveConfig(1)
    if rows < 32:
        return SelectiveConfig(2, lanes=4)
    if rows < 64:
        return SelectiveConfig(4, lanes=4, rows=1 if rows % 2 else 2)
    return SelectiveConfig(largest_divisor(channels // 128, (2, 1)))


def scan_config(rows: int, channels: int, size: int, checkpoints: int) -> ScanConfig:
    """Few rows want many programs, many rows little work beside the recurrence."""
    # At least two programs on each of 132 multiprocessors. With checkpoints, 64 channels take 133
    # registers a thread, and more than 128 leave room for one.
    wide = channels % 64 == 0 and rows * channels // 64 > 264 and not checkpoints
    return ScanConfig(64 if wide else 32, 4, 16, 4)


def state_config(rows: int, heads: int, width: int, size: int) -> StateConfig:
    """Many small programs: at every batch size at least as fast as taller tiles."""
    return StateConfig(16)
