"""Portable implementations of every op, chunked, for any backend that JAX runs on."""

from pallas_kernels.blocks import fill_blocks
from pallas_kernels.xla.conv import causal_conv, conv_step
from pallas_kernels.xla.dense import projected_conv_step, rms_norm, rows_matmul
from pallas_kernels.xla.selective import selective_scan, selective_step
from pallas_kernels.xla.ssd import ssd
from pallas_kernels.xla.step import ssd_step

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
]
