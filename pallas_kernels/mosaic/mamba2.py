"""Mamba-2's one-token step: the convolution, then the state."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.columns import Columns
from pallas_kernels.mosaic.config import ConvConfig, StateConfig
from pallas_kernels.mosaic.conv import conv_step
from pallas_kernels.mosaic.gates import NO_LIMIT
from pallas_kernels.mosaic.state import state_step


def mamba2_step(
    xbc: Float[Array, "R DC"] | Columns,
    dt: Float[Array, "R H"] | Columns,
    conv_weight: Float[Array, "K DC"],
    conv_bias: Float[Array, "DC"] | None,
    A: Float[Array, "H"],
    skip: Float[Array, "H"] | None,
    dt_bias: Float[Array, "H"] | None,
    windows: Float[Array, "layers blocks K-1 DC"],
    states: Float[Array, "layers blocks H P N"],
    layer: int | Int[Array, ""],
    read_ids: Int[Array, "R"],
    write_ids: Int[Array, "R"],
    gate: Float[Array, "R HP"] | Columns | None = None,
    *,
    n_groups: int,
    dt_limit: tuple[float, float] = NO_LIMIT,
    activation: str | None = "silu",
    conv_config: ConvConfig | None = None,
    config: StateConfig | None = None,
    interpret: Any = None,
) -> tuple[
    Float[Array, "R H P"],
    Float[Array, "layers blocks K-1 DC"],
    Float[Array, "layers blocks H P N"],
]:
    """`pallas_kernels.mamba2_step` in two launches.

    Every head reads the windows of the channels of B and C that its group shares, and one program
    would write them. Programs of one launch run in no order, so when read and write block are the
    same, writing the windows is a launch of its own.
    """
    ids = (layer, read_ids, write_ids)
    xbc, windows = conv_step(
        xbc,
        conv_weight,
        conv_bias,
        windows,
        *ids,
        activation=activation,
        config=conv_config,
        interpret=interpret,
    )
    y, states = state_step(
        xbc,
        dt,
        A,
        skip,
        dt_bias,
        states,
        *ids,
        gate,
        n_groups=n_groups,
        dt_limit=dt_limit,
        config=config,
        interpret=interpret,
    )
    return y, windows, states
