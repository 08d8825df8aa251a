"""Kernels for NVIDIA GPUs from Hopper on, in Pallas's Mosaic GPU dialect."""

from pallas_kernels.mosaic.conv_step import conv_step
from pallas_kernels.mosaic.mamba2_step import mamba2_step
from pallas_kernels.mosaic.selective_step import selective_step
from pallas_kernels.mosaic.supports import supports

__all__ = ["conv_step", "mamba2_step", "selective_step", "supports"]
