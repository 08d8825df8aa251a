"""Step sizes made from their low-rank form by the kernel that takes the step.

Two ways for a program to multiply its rows of `dt` by its channels of `dt_weight`: few rows by plain
arithmetic, more by the tensor cores. Both begin their loads before the program waits for anything,
sum in float32, and round to the dtype of `dt` as a product in a launch of its own would. No row's
sums depend on another row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic.compat import load, store
from pallas_kernels.mosaic.config import SelectiveConfig, largest_divisor
from pallas_kernels.mosaic.gates import step_size
from pallas_kernels.mosaic.matmul import TRANSPOSED, swizzled


@dataclass(frozen=True)
class Registers:
    """Each thread has a part of one channel's row of the matrix; `lanes` threads add up theirs."""

    rank: int
    first: int  # column of dt's array at which it begins
    config: SelectiveConfig

    def __post_init__(self):
        assert self.config.width == 1

    @property
    def layout(self):
        """Layout of `[channels, rank]`."""
        lanes, across = self.config.lanes, 32 // self.config.lanes
        vector = largest_divisor(self.rank // lanes, (8, 4, 2, 1))
        tiles = (4 * across, vector * lanes), (across, vector * lanes), (vector,)
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-2, -3), -1)

    def scratch(self) -> dict[str, Any]:
        return {}

    def begin(self, refs, shared, channel, rows: list[Any], by_channel):
        """Loads what the step sizes of these rows, in channels from `channel` on, are made of."""
        matrix, columns = self.layout, pl.ds(self.first, self.rank)
        lanes = pl.ds(channel, self.config.channels)
        bias = None if refs["dt_bias"] is None else load(refs["dt_bias"].at[lanes], by_channel)
        dt = [load(refs["dt"].at[row, columns], matrix.reduce(0)) for row in rows]
        return load(refs["dt_weight"].at[lanes, :], matrix), dt, bias

    def finish(self, begun, shared, by_channel) -> list[Callable]:
        """For each row what gives its step sizes."""
        matrix, dt, bias = begun
        matrix = matrix.astype(jnp.float32)
        bias = None if bias is None else bias.astype(jnp.float32)

        def steps(row):
            factor = lax.broadcast_in_dim(row.astype(jnp.float32), matrix.shape, (1,))
            total = jnp.sum(matrix * plgpu.layout_cast(factor, self.layout), axis=1)
            total = plgpu.layout_cast(total, by_channel).astype(row.dtype)
            return step_size(total.astype(jnp.float32), bias)

        return [lambda row=row: steps(row) for row in dt]


@dataclass(frozen=True)
class TensorCores:
    """Channels are the rows of the tensor cores' product and rows its columns, eight at least.

    Every warpgroup multiplies all of the program's rows, and so waits for no other.
    """

    rank: int
    first: int
    config: SelectiveConfig
    interpreted: bool

    @property
    def line(self) -> int:
        """Numbers of a line of swizzled memory."""
        return largest_divisor(self.rank, (64, 32, 16))

    @property
    def columns(self) -> int:
        return -(-self.config.rows // 8) * 8

    def padded(self, dt: Array) -> Array:
        """`dt`, if interpreted with NaN after its rows: copies clip what lies past an array's end."""
        more = (0, self.columns + self.config.rows), (0, 0)
        return jnp.pad(dt, more, constant_values=jnp.nan) if self.interpreted else dt

    def scratch(self) -> dict[str, Any]:
        """Both factors, the step sizes, and the barrier that says that the factors are there."""
        channels, lines = self.config.channels, self.rank // self.line
        tiled = swizzled(16, self.line)

        def factors(transforms):
            return [
                plgpu.SMEM((lines, count, self.line), jnp.bfloat16, transforms=transforms)
                for count in (channels, self.columns)
            ]

        # Views of one memory, of the tensor cores and of copies.
        views = [factors(tiled)] * 2 if self.interpreted else [factors(tiled), factors(tiled[1:])]
        steps = (self.config.warpgroups, self.columns, channels)
        return {
            "factors": views[0] if self.interpreted else plgpu.RefUnion(*views),
            "steps": plgpu.SMEM(steps, jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2 * lines),
        }

    def begin(self, refs, shared, channel, rows: list[Any], by_channel):
        """Starts the copies of both factors."""
        dt, weight, bias = refs["dt"], refs["dt_weight"], refs["dt_bias"]
        lanes = pl.ds(channel, self.config.channels)
        first = pl.ds(lax.axis_index("rows") * self.config.rows, self.columns)
        views = shared["factors"] if self.interpreted else shared["factors"][1]

        def copy():
            for line in range(self.rank // self.line):
                at = line * self.line
                sources = (
                    weight.at[lanes, pl.ds(at, self.line)],
                    dt.at[first, pl.ds(self.first + at, self.line)],
                )
                for source, target in zip(sources, views, strict=True):
                    plgpu.copy_gmem_to_smem(source, target.at[line], shared["loaded"])

        if self.config.warpgroups == 1:
            copy()
        else:
            pl.when(lax.axis_index("thread") == 0)(copy)
        return None if bias is None else load(bias.at[lanes], TRANSPOSED.reduce(1))

    def finish(self, bias, shared, by_channel) -> list[Callable]:
        """For each row of the warpgroup what gives its step sizes."""
        weights, dt = shared["factors"] if self.interpreted else shared["factors"][0]
        thread = lax.axis_index("thread") if self.config.warpgroups > 1 else 0
        count = self.config.rows // self.config.warpgroups
        plgpu.barrier_wait(shared["loaded"])

        def multiply(total):
            for line in range(self.rank // self.line):
                plgpu.wgmma(total, weights.at[line], dt.at[line].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return total[...]

        shape = (self.config.channels, self.columns)
        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        total = plgpu.layout_cast(total, TRANSPOSED).astype(dt.dtype).astype(jnp.float32)
        if bias is not None:
            bias = lax.broadcast_in_dim(bias.astype(jnp.float32), shape, (0,))
            bias = plgpu.layout_cast(bias, TRANSPOSED)
        steps = shared["steps"].at[thread]
        # Here each thread has other numbers than all others; those that follow share channels.
        store(steps.transpose((1, 0)), step_size(total, bias))
        plgpu.commit_smem()
        return [lambda n=n: load(steps.at[thread * count + n], by_channel) for n in range(count)]
