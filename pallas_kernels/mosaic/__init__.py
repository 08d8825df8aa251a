"""Kernels for NVIDIA GPUs from Hopper on, in Pallas's Mosaic GPU dialect.

The dialect takes a second to import, so that the kernels wait for their first call. A kernel has no
derivative of its own; reverse mode runs its XLA twin.
"""

from typing import Any

import jax

from pallas_kernels import xla
from pallas_kernels.columns import sliced
from pallas_kernels.mosaic.support import FEW_ROWS, supports

__all__ = [
    "causal_conv",
    "conv_step",
    "fill_blocks",
    "projected_conv_step",
    "rms_norm",
    "rows_matmul",
    "selective_scan",
    "selective_step",
    "ssd",
    "ssd_step",
    "supports",
]

TAKES_COLUMNS = True

OPTIONS = frozenset(("activation", "chunk", "dt_limit", "dtype", "eps", "first"))
KERNEL_OPTIONS = frozenset(("config", "interpret"))


def _differentiable(kernel, twin, arguments: dict[str, Any]):
    """What `kernel` gives for the arguments; where it is differentiated, what `twin` does."""
    options = {name: arguments[name] for name in arguments.keys() & OPTIONS}
    own = {name: arguments[name] for name in arguments.keys() & KERNEL_OPTIONS}

    # A custom_vjp, since refs inside a custom_jvp do not lower.
    @jax.custom_vjp
    def step(operands):
        return kernel(**operands, **options, **own)

    def forward(operands):
        def plain(operands):
            return twin(**{name: sliced(value) for name, value in operands.items()}, **options)

        return jax.vjp(plain, operands)

    step.defvjp(forward, lambda backward, cotangents: backward(cotangents))
    names = arguments.keys() - OPTIONS - KERNEL_OPTIONS
    return step({name: arguments[name] for name in names})


def causal_conv(**arguments):
    """`pallas_kernels.mosaic.packed_conv.causal_conv`, differentiable."""
    from pallas_kernels.mosaic.packed_conv import causal_conv

    return _differentiable(causal_conv, xla.causal_conv, arguments)


def conv_step(**arguments):
    """`pallas_kernels.mosaic.conv.conv_step`, differentiable."""
    from pallas_kernels.mosaic.conv import conv_step

    return _differentiable(conv_step, xla.conv_step, arguments)


def fill_blocks(**arguments):
    """`pallas_kernels.mosaic.fill.fill_blocks`."""
    from pallas_kernels.mosaic.fill import fill_blocks

    return fill_blocks(**arguments)


def projected_conv_step(**arguments):
    """`pallas_kernels.mosaic.projected_conv.projected_conv_step`, differentiable."""
    from pallas_kernels.mosaic.projected_conv import projected_conv_step

    return _differentiable(projected_conv_step, xla.projected_conv_step, arguments)


def rms_norm(**arguments):
    """`pallas_kernels.mosaic.norm.rms_norm`, differentiable."""
    from pallas_kernels.mosaic.norm import rms_norm

    return _differentiable(rms_norm, xla.rms_norm, arguments)


def rows_matmul(**arguments):
    """`pallas_kernels.mosaic.matmul.rows_matmul`, or `batch_matmul` of many rows, differentiable."""
    if arguments["x"].shape[0] > FEW_ROWS:
        from pallas_kernels.mosaic.batch_matmul import batch_matmul as rows_matmul
    else:
        from pallas_kernels.mosaic.matmul import rows_matmul

    return _differentiable(rows_matmul, xla.rows_matmul, arguments)


def selective_scan(**arguments):
    """`pallas_kernels.mosaic.scan.selective_scan`, differentiable."""
    from pallas_kernels.mosaic.scan import selective_scan

    return _differentiable(selective_scan, xla.selective_scan, arguments)


def selective_step(**arguments):
    """`pallas_kernels.mosaic.selective.selective_step`, differentiable."""
    from pallas_kernels.mosaic.selective import selective_step

    return _differentiable(selective_step, xla.selective_step, arguments)


def ssd(**arguments):
    """`pallas_kernels.mosaic.ssd_walk.ssd`, differentiable."""
    from pallas_kernels.mosaic.ssd_walk import ssd

    arguments = {**arguments, "dt": sliced(arguments["dt"])}
    return _differentiable(ssd, xla.ssd, arguments)


def ssd_step(**arguments):
    """`pallas_kernels.mosaic.state.ssd_step`, differentiable."""
    from pallas_kernels.mosaic.state import ssd_step

    return _differentiable(ssd_step, xla.ssd_step, arguments)
