"""How many rows, how long and how large the steps are, unless the user says: chosen from the device's memory."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxstate.errors import SpecError
from jaxstate.plan import PlanShape
from jaxstate.state.spec import CacheSpec, GroupSpec, format_bytes
from jaxstate.typing import Device
from pallas_kernels.rows import CHUNK

CPU_CHECKPOINT_BYTES = 256 * 2**20
"""What checkpoints may take where the device does not say how much memory it has."""

BOUNDS = {
    "rows": (1, 65_536),
    "max_len": (1, 2**31 - 1),
    "chunk_tokens": (CHUNK, 2**20),
    "decode_steps": (1, 1_024),
    "checkpoints": (0, 2**20),
    "data_parallel": (1, 2**16),
    "tensor_parallel": (1, 2**10),
}
"""Least and most of each size; past these a program could not be compiled or would never end."""

MOST_CHECKPOINTS = 4
"""States that one row can leave behind in one step."""

STATE_SHARE = 0.8
"""Share of the memory left beside the weights that the state may take; the rest is for activations."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of an engine; None means chosen for the device.

    Args:
      rows: sequences in flight on each rank.
      max_len: most tokens of one sequence, prompt and generated.
      chunk_tokens: prompt tokens that one step reads, a multiple of the scan chunk (64).
      decode_steps: tokens that each row generates in one dispatch.
      checkpoints: states kept for prompts that begin like earlier ones; 0 turns prefix reuse off.
      data_parallel: ranks, each a device with rows, blocks and checkpoints of its own; None is one.
      tensor_parallel: devices of each rank, which share the model's heads and channels and their state; None is one.

    Raises:
      SpecError: a size that cannot be.
    """

    rows: int | None = None
    max_len: int | None = None
    chunk_tokens: int | None = None
    decode_steps: int | None = None
    checkpoints: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, (least, most) = getattr(self, field.name), BOUNDS[field.name]
            if value is None:
                continue
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (whole and least <= value <= most):
                raise SpecError(
                    f"{field.name} is {value!r}; it must be a whole number from {least:,} to {most:,}"
                )
            object.__setattr__(self, field.name, int(value))
        if self.chunk_tokens is not None and self.chunk_tokens % CHUNK:
            raise SpecError(
                f"chunk_tokens is {self.chunk_tokens}; it must be a multiple of {CHUNK}, the scan chunk"
            )


def free_bytes(device: Device) -> int | None:
    """Bytes that the device can still allocate; None where it does not tell, as CPUs do not."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit - stats.get("bytes_in_use", 0))


def choose(sizes: Sizes, groups: tuple[GroupSpec, ...], *devices: Device) -> PlanShape:
    """The shape of one rank's plans for these groups, which all of these devices have room for.

    Raises:
      SpecError: what is asked for does not fit the device's memory, with what would.
    """
    gpu = devices[0].platform != "cpu"
    max_len = sizes.max_len or (131_072 if all(g.block_size is None for g in groups) else 4_096)
    row = CacheSpec(groups, rows=1, max_len=max_len).bytes_per_sequence
    kept = sum(g.bytes_per_block for g in groups)  # one checkpoint, and as much again for null
    free = min((n for n in map(free_bytes, devices) if n is not None), default=None)
    room = None if free is None else int(free * STATE_SHARE) - kept
    rows = sizes.rows or (8 if room is None else max(1, min(256, (room - room // 4) // row)))
    left = CPU_CHECKPOINT_BYTES if room is None else room - rows * row
    checkpoints = sizes.checkpoints
    if checkpoints is None:
        checkpoints = max(0, min(1024, left // kept))
    if room is not None and left < checkpoints * kept:
        raise SpecError(
            f"{rows} rows of {format_bytes(row)} and {checkpoints} checkpoints of {format_bytes(kept)} do not fit "
            f"the {format_bytes(free or 0)} that the device has free; at most {max(room, 0) // row} rows or "
            f"{max(left, 0) // kept} checkpoints beside these rows do"
        )
    groups = tuple(_with_blocks(g, rows, max_len, checkpoints) for g in groups)
    return PlanShape(
        CacheSpec(groups, rows=rows, max_len=max_len),
        chunk_tokens=sizes.chunk_tokens or (2048 if gpu else 256),
        decode_steps=sizes.decode_steps or (16 if gpu else 8),
        checkpoints=MOST_CHECKPOINTS if checkpoints else 0,
    )


def _with_blocks(group: GroupSpec, rows: int, max_len: int, checkpoints: int) -> GroupSpec:
    if group.blocks is not None:
        return group
    return dataclasses.replace(group, blocks=rows * group.need(max_len, 1) + checkpoints + 1)
