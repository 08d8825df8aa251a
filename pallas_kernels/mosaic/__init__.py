"""Kernels for NVIDIA GPUs from Hopper on, in Pallas's Mosaic GPU dialect.

The dialect takes a second to import, so that the kernels wait for their first call.
"""

from pallas_kernels.mosaic.support import supports

__all__ = ["conv_step", "mamba2_step", "selective_step", "supports"]


def conv_step(*operands, **options):
    """`pallas_kernels.mosaic.conv.conv_step`."""
    from pallas_kernels.mosaic.conv import conv_step

    return conv_step(*operands, **options)


def mamba2_step(*operands, **options):
    """`pallas_kernels.mosaic.mamba2.mamba2_step`."""
    from pallas_kernels.mosaic.mamba2 import mamba2_step

    return mamba2_step(*operands, **options)


def selective_step(*operands, **options):
    """`pallas_kernels.mosaic.selective.selective_step`."""
    from pallas_kernels.mosaic.selective import selective_step

    return selective_step(*operands, **options)
