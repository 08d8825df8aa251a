"""Tile sizes and schedules of the kernels, chosen by shape."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp


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
    of the batch in a program, `ahead` of which (0: all) are under way at once.

    Step sizes of low rank are made by the tensor `cores`, of 64 channels or multiples, or by plain
    arithmetic with one channel a thread; there `warpgroups` can divide the rows.
    """

    width: int
    lanes: int = 1
    rows: int = 1
    ahead: int = 0
    warpgroups: int = 1
    cores: bool = False

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return 128 // self.lanes * self.width


@dataclass(frozen=True)
class ScanConfig:
    """`widths` of the blocks of channels that the warpgroups of a program walk; tiles of `tokens`, of
    which `unroll` are read from shared memory ahead of those being walked; one or two `helpers`."""

    widths: tuple[int, ...]
    tokens: int = 16
    unroll: int = 4
    helpers: int = 2

    @property
    def channels(self) -> int:
        """Channels of a program."""
        return sum(self.widths)


@dataclass(frozen=True)
class SsdConfig:
    """A row's `segments`, of `chunks` chunks each, that programs of their own walk."""

    segments: int = 1
    chunks: int = 0


@dataclass(frozen=True)
class StateConfig:
    """`rows` rows of a head's state in a program."""

    rows: int


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles of `features` by `rows`; the inputs in `split` parts, in pieces of `chunk` lines of swizzled
    memory, `stages` of them under way."""

    features: int
    rows: int
    split: int
    stages: int
    chunk: int = 1


@dataclass(frozen=True)
class BatchMatmulConfig:
    """Tiles of `rows` by `features`; the inputs in `split` parts, `stages` lines of them under way."""

    rows: int
    features: int
    split: int
    stages: int


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


def selective_config(
    rows: int, channels: int, size: int, *, low_rank: bool = False
) -> SelectiveConfig:
    """Small batches want many programs; in larger ones two rows share a load of `A`.

    With step sizes of low rank, programs share the matrix's tile, and all run at once.
    """
    if low_rank and rows <= 2:
        return SelectiveConfig(1, lanes=8)
    if low_rank and rows <= 32:
        own, ahead, groups = (8, 0, 4) if rows <= 8 else (4, 0, 2) if rows <= 16 else (4, 2, 1)
        return SelectiveConfig(2, 4, own, ahead, groups, cores=True)
    if low_rank:
        return SelectiveConfig(2, 4, 8, 2, cores=True)
    if size % 4:
        return SelectiveConfig(1)
    if rows < 32:
        return SelectiveConfig(2, lanes=4)
    if rows < 64:
        return SelectiveConfig(4, lanes=4, rows=1 if rows % 2 else 2)
    return SelectiveConfig(largest_divisor(channels // 128, (2, 1)))


def scan_config(rows: int, channels: int, size: int) -> ScanConfig:
    """Programs that leave none of 132 multiprocessors idle, and little work beside the recurrence."""
    # Cycles a token as measured with 16 states a channel: of a program, and of two on one
    # multiprocessor, one after the other where they have no room there together.
    costs = {
        ScanConfig((32, 8)): (89, 178),
        ScanConfig((32,)): (71, 142),
        ScanConfig((32,), unroll=2, helpers=1): (80, 125),
        ScanConfig((64,), unroll=2, helpers=1): (127, 207),
    }

    def cost(config: ScanConfig) -> float:
        pairs, single = divmod(-(-rows * channels // (132 * config.channels)), 2)
        return pairs * costs[config][1] + single * costs[config][0]

    return min(
        (c for c in costs if channels % c.channels == 0 and (c.channels < 64 or size <= 32)),
        key=cost,
    )


def state_config(rows: int, heads: int, width: int, size: int) -> StateConfig:
    """Many small programs: at every batch size at least as fast as taller tiles."""
    return StateConfig(16)


def ssd_config(rows: int, places: int, tokens: int) -> SsdConfig:
    """Segments for as many programs as keep 132 multiprocessors busy, where whole rows do not.

    In times of a chunk: a program takes two more than its chunks, and a chunk of the walk ahead a third.
    """
    length = -(-tokens // (64 * rows))

    def cost(segments: int) -> float:
        chunks, rounds = -(-length // segments), -(-rows * places * segments // 132)
        ahead = 0.33 * length * (segments - 1) / segments * -(-rows * places // 132) + 6
        return rounds * (chunks + 2) + (ahead if segments > 1 else 0)

    if rows > 2:
        return SsdConfig()
    segments = min(range(1, 17), key=cost)
    chunks = -(-length // (4 * segments)) * 4
    return SsdConfig(-(-tokens // (64 * chunks)), chunks) if segments > 1 else SsdConfig()


def matmul_config(rows: int, features: int, inputs: int, reserved: int = 0) -> MatmulConfig:
    """More programs than multiprocessors, all at once, with as much under way as two can hold.

    The inputs are split by the matrix's shape alone, so that a row has the same bits at any number of
    rows. `reserved` are bytes of a program's memory, for each row of its tile, that the product has not.
    """
    line = matmul_line(inputs)
    lines, tiles = inputs // line, -(-features // 64)
    split = next(n for n in (8, 4, 2, 1) if lines % n == 0 and (n == 1 or n * tiles <= 192))
    lines //= split
    most = 32 if tiles * split < 132 else 64
    width = next((n for n in (8, 16, 32) if rows <= n), most)
    if lines <= 6:
        return MatmulConfig(64, width, split, 1, lines)
    if lines <= 10:
        chunk = 2 if width == 8 and lines % 2 == 0 else 1
        return MatmulConfig(64, width, split, lines // chunk, chunk)
    # Many tiles share the reading of the rows.
    tall = 128 if width == 64 and tiles > 528 else 64
    room = 110_000 - reserved * width
    return MatmulConfig(tall, width, split, min(8, room // (2 * line * (tall + width))))


def projected_conv_config(
    rows: int, features: int, inputs: int, taps: int, normed: bool = False
) -> MatmulConfig:
    """That of the product, with room for windows of two bytes a number and for weights."""
    reserved = 2 * 64 * (taps - 1)
    config = matmul_config(rows, features, inputs, reserved)
    if not normed or not norms_within(rows, inputs, config):
        return config
    room = 110_000 - (reserved + 2 * inputs) * config.rows
    return replace(config, stages=min(8, room // (2 * matmul_line(inputs) * config.features)))


def norms_within(rows: int, inputs: int, config: MatmulConfig) -> bool:
    """Whether a program norms its rows: it needs all of their inputs, as lines, and few of them.

    Every program reads all rows, which for one costs less than a launch and for eight more.
    """
    whole = config.rows == 8 and config.split == config.chunk == 1
    return whole and inputs % 512 == 0 and rows * inputs <= 2 * 2560


def batch_matmul_config(
    rows: int, features: int, inputs: int, residual: Any = None
) -> BatchMatmulConfig:
    """As many programs as multiprocessors: one has no room for two, and none waits for a second.

    What of its 227 KB a residual of that dtype does not take is for lines under way, two at least.
    """
    if features <= 512:
        split = next(n for n in (8, 4, 2, 1) if inputs // 64 % n == 0)
        return BatchMatmulConfig(64, 64, split, max(2, min(10, inputs // (64 * split))))
    split = 2 if inputs > features and inputs % 128 == 0 else 1
    places = 132 // (-(-rows // 128) * split)
    width = -(-features // (8 * split * places)) * 8 * split
    kept = 0 if residual is None else jnp.dtype(residual).itemsize * 128 * width // split
    return BatchMatmulConfig(128, width, split, min(8, (225_000 - kept) // (128 * (128 + width))))


def batch_matmul_fits(config: BatchMatmulConfig, residual: Any = None) -> bool:
    """Whether a multiprocessor has room for a program: lines under way, or sums and results, and the residual."""
    own = config.rows * config.features // config.split
    lines = 128 * config.stages * (config.rows + config.features)
    after = 4 * own + (4 * own * config.split if config.split > 1 else 0)  # results of four bytes
    kept = 0 if residual is None else own * jnp.dtype(residual).itemsize
    fits = max(lines, after) + kept <= 230_000
    return fits and config.features <= 256 and config.stages > 1


def matmul_line(inputs: int) -> int:
    """Inputs of a line of swizzled memory."""
    return 64 if inputs % 64 == 0 else 32
