"""How the scan of Mamba lays out tokens, states and checkpoints."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.rows import Rows, writes

GROUPS = 4  # of a channel's states, each in a thread's registers or next to each other in a warp
NEVER = 2**30  # a checkpoint position that no row reaches


def token_layout(width: int):
    """Layout of `[tokens, width]` outside the scan: eight threads hold up to 32 channels of a token."""
    vector = min(4, width // 8)
    tiles = (16, 8 * vector), (4, 8 * vector), (vector,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-5,), (-3, -2), -1)


def state_layout(size: int, width: int):
    """Layout of `[GROUPS, size / GROUPS, width]`: a warp holds a group, with 32 channels in its lanes.

    Where there are fewer channels, several lanes share out the states of a group.
    """
    lanes = max(1, 32 // width)
    states = min(4, size // GROUPS // lanes)
    tile = GROUPS, lanes * states, min(width, 32)
    if states == 1:
        return plgpu.Layout.TILED(plgpu.Tiling((tile, (1,))), (-4,), (-3, -2), -1)
    tiles = plgpu.Tiling((tile, (states, 1)))
    return plgpu.Layout.TILED(tiles, (-5,), (-4, -3) if lanes > 1 else (-3,), -2)


def sorted_checkpoints(rows: Rows) -> tuple[Int[Array, "R M+1"], Int[Array, "R M+1"]]:
    """Positions and ids of each row's checkpoints in order, with one at the end that never comes."""
    ids = writes(rows)[1]
    positions = jnp.where(ids == 0, NEVER, rows.checkpoint_positions)
    positions, ids = lax.sort((positions, ids), num_keys=1)
    return jnp.pad(positions, ((0, 0), (0, 1)), constant_values=NEVER), jnp.pad(
        ids, ((0, 0), (0, 1))
    )
