"""Recurrences over pools of state blocks: arrays in, arrays out.

All prefill ops share one contract: tokens of several rows packed after one another, a pool leaf
`[layers, blocks, ...]` with the layer's index, and `Rows`, which says what each row reads and writes.
The step ops are the same for one token a row. `implementation` is None (choose), "mosaic", "xla" or
"reference"; `prefer` sets what is chosen from.
"""

from pallas_kernels.blocks import copy_blocks, read_blocks, write_blocks
from pallas_kernels.columns import Columns, sliced, split
from pallas_kernels.dense import rms_norm, rows_matmul
from pallas_kernels.dispatch import prefer
from pallas_kernels.ops import (
    causal_conv,
    conv_step,
    fill_blocks,
    projected_conv_step,
    selective_scan,
    selective_step,
    ssd,
    ssd_step,
)
from pallas_kernels.rows import RowIds, Rows

__all__ = [
    "Columns",
    "RowIds",
    "Rows",
    "causal_conv",
    "conv_step",
    "copy_blocks",
    "fill_blocks",
    "prefer",
    "projected_conv_step",
    "read_blocks",
    "rms_norm",
    "rows_matmul",
    "selective_scan",
    "selective_step",
    "sliced",
    "split",
    "ssd",
    "ssd_step",
    "write_blocks",
]
