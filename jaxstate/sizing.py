"""How many rows, how long and how large the steps are, unless the user says: chosen from the device's memory."""

from __future__ import annotations

import dataclasses

from jaxstate.errors import SpecError
from jaxstate.plan import PlanShape
from jaxstate.state.spec import CacheSpec, GroupSpec, format_bytes
from jaxstate.typing import Device
from pallas_kernels.rows import CHUNK

STATE_SHARE = 0.8
"""Share of the memory left beside the weights that the state may take; the rest is for activations."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of an engine; None means chosen for the device.

    Args:
      rows: sequences in flight.
      max_len: most tokens of one sequence, prompt and generated.
      chunk_tokens: prompt tokens that one step reads, a multiple of the scan chunk (64).
      decode_steps: tokens that each row generates in one dispatch.
    """

    rows: int | None = None
    max_len: int | None = None
    chunk_tokens: int | None = None
    decode_steps: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise SpecError(
                    f"{field.name} is {value!r}; it must be a whole number of at least 1"
                )
        if self.chunk_tokens is not None and self.chunk_tokens % CHUNK:
            raise SpecError(
                f"chunk_tokens is {self.chunk_tokens}; it must be a multiple of {CHUNK}, the scan chunk"
            )


def free_bytes(device: Device) -> int | None:
    """Bytes that the device can still allocate; None where it does not tell, as CPUs do not."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit - stats.get("bytes_in_use", 0))


def choose(sizes: Sizes, groups: tuple[GroupSpec, ...], device: Device) -> tuple[PlanShape, int]:
    """The plan shape and the decode steps for these groups on this device.

    Raises:
      SpecError: the rows asked for do not fit the device's memory, with the number that would.
    """
    gpu = device.platform != "cpu"
    max_len = sizes.max_len or (131_072 if all(g.block_size is None for g in groups) else 4_096)
    one = CacheSpec(groups, rows=1, max_len=max_len).bytes_per_sequence
    free = free_bytes(device)
    # One more than the rows, for the null block.
    most = None if free is None else int(free * STATE_SHARE) // one - 1
    if free is not None and most is not None and most < (sizes.rows or 1):
        raise SpecError(
            f"{sizes.rows or 1} rows of {format_bytes(one)} of state do not fit the {format_bytes(free)} that "
            f"the device has free; at most {max(most, 0)} do"
        )
    rows = sizes.rows or (8 if most is None else min(256, most))
    spec = CacheSpec(groups, rows=rows, max_len=max_len)
    chunk = sizes.chunk_tokens or (2048 if gpu else 256)
    return PlanShape(spec, chunk_tokens=chunk), sizes.decode_steps or (16 if gpu else 8)
