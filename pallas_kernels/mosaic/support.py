"""Which calls the kernels can run, and why not the others."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns
from pallas_kernels.mosaic.config import (
    batch_matmul_config,
    batch_matmul_fits,
    projected_conv_config,
)
from pallas_kernels.rows import CHUNK

MOST_TAPS = 8
FEW_ROWS = 64
"""Products of more rows are bound by more than reading the matrix, and have a kernel of their own."""
MOST_ROWS = 256
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def device_reason() -> str | None:
    """Why the default device cannot run Mosaic GPU kernels; None if it can."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, and this is {device.platform}"
    capability = getattr(device, "compute_capability", None)
    if capability is None or float(capability) < 9.0:
        return f"it needs compute capability 9.0 (Hopper) or newer, and this is {capability}"
    return None


def _dtype_reason(operands: Mapping[str, Any]) -> str | None:
    for name, array in operands.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or jnp.issubdtype(dtype, jnp.integer):
            continue
        if dtype not in DTYPES:
            return f"{name} is {dtype}, and it takes float32, bfloat16 and float16"
    return None


def _conv_reason(channels: int, taps: int) -> str | None:
    if taps < 2:
        return "a convolution of one tap has no window"
    if channels % 128:
        return f"it needs a multiple of 128 channels, got {channels}"
    return None


def _ssd_reason(operands: Mapping[str, Any]) -> str | None:
    for name in ("x", "B", "C"):
        if operands[name].dtype != jnp.bfloat16:
            return f"its products are of bfloat16, and {name} is {operands[name].dtype}"
    if operands["states"].dtype == jnp.float16:
        return "states is float16, and it takes float32 and bfloat16"
    _, width, size = operands["states"].shape[2:]
    if width % 64 or size not in (64, 128):
        return f"it needs heads of a multiple of 64 by 64 or 128, got {width} by {size}"
    if operands.get("chunk", CHUNK) % CHUNK:
        return f"its chunks are of {CHUNK} tokens, and {operands['chunk']} is no multiple of it"
    if not operands["x"].shape[0]:
        return "there is no token"
    return None


def matmul_reason(x, weight, residual=None, **_: Any) -> str | None:
    """Why the kernel for products of few rows cannot run one; None if it can."""
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"its operands are bfloat16, and these are {x.dtype} and {weight.dtype}"
    (rows, inputs), features = x.shape, weight.shape[0]
    if not 0 < rows <= MOST_ROWS:
        return f"it is for 1 to {MOST_ROWS} rows, got {rows}"
    if rows > FEW_ROWS:
        kept = None if residual is None else residual.dtype
        if inputs % 64 or not batch_matmul_fits(
            batch_matmul_config(rows, features, inputs, kept), kept
        ):
            return (
                f"of more than {FEW_ROWS} rows it needs a multiple of 64 inputs, and features of which each of"
                f" 132 multiprocessors has room for its part, got {inputs} and {features}"
            )
    if inputs % 32 or features % 8:
        return f"it needs a multiple of 32 inputs and of 8 features, got {inputs} and {features}"
    if isinstance(x, Columns) and x.array.shape[1] % 8:
        return f"it needs inputs of a multiple of 8 columns, and theirs has {x.array.shape[1]}"
    return None


def _norm_reason(rows: int, size: int) -> str | None:
    if not 0 < rows <= MOST_ROWS:
        return f"it is for 1 to {MOST_ROWS} rows, got {rows}"
    if size % 128 or size > 8192:
        return f"it keeps a row in registers, a multiple of 128 to 8192 numbers, got {size}"
    return None


def _projected_conv_reason(
    x, weight, conv_weight, windows, first, norm_weight=None, **_: Any
) -> str | None:
    taps, channels = conv_weight.shape
    if norm_weight is not None:
        reason = _norm_reason(*x.shape)
        if reason:
            return reason
        x = jax.ShapeDtypeStruct(x.shape, norm_weight.dtype)
    if windows.dtype != x.dtype:
        return f"it keeps windows in the dtype of x, {x.dtype}, and these are {windows.dtype}"
    if not 2 <= taps <= MOST_TAPS:
        return f"it keeps windows of 2 to {MOST_TAPS} taps, got {taps}"
    if x.shape[0] > FEW_ROWS:
        return f"it is for 1 to {FEW_ROWS} rows, got {x.shape[0]}"
    reason = matmul_reason(x, weight)
    if reason:
        return reason
    features, inputs = weight.shape
    tile = projected_conv_config(x.shape[0], features, inputs, taps).features
    if first % tile or channels % tile:
        return (
            f"a program's {tile} features are all convolved or none, got {channels} channels from"
            f" {first} on"
        )
    return None


def low_rank_reason(dt, dt_weight, rows: int, channels: int, size: int) -> str | None:
    """Why the step kernel cannot multiply by `dt_weight` on its way, or should not; None if it can."""
    if dt.dtype != jnp.bfloat16 or dt_weight.dtype != jnp.bfloat16:
        return f"its operands are bfloat16, and these are {dt.dtype} and {dt_weight.dtype}"
    rank = dt_weight.shape[1]
    if rank % 16 or rank > 512:
        return f"it needs a rank that is a multiple of 16, at most 512, got {rank}"
    if channels % 64 or size % 8:
        return f"it needs a multiple of 64 channels and of 8 states, got {channels} and {size}"
    # Measured: a launch of its own is faster.
    return None if rows <= FEW_ROWS else f"it is for 1 to {FEW_ROWS} rows, got {rows}"


def shape_reason(op: str, operands: Mapping[str, Any]) -> str | None:
    """Why the shapes do not fit the kernels' tiles; None if they do."""
    if op == "fill_blocks":
        pool = operands["pool"]
        if pool.dtype not in DTYPES:
            return f"pool is {pool.dtype}, and it takes float32, bfloat16 and float16"
        size = math.prod(pool.shape[2:])
        return f"a block holds {size} numbers, not a multiple of 128" if size % 128 else None
    if op == "rows_matmul":
        return matmul_reason(**operands)
    if op == "rms_norm":
        return _norm_reason(*operands["x"].shape)
    if op in ("conv_step", "selective_step", "selective_scan") and not operands["x"].shape[0]:
        return "there is no token"
    if op in ("causal_conv", "conv_step"):
        taps, channels = operands["weight"].shape
        if op == "causal_conv" and taps > MOST_TAPS:
            return f"it keeps a window in registers, at most {MOST_TAPS} taps, got {taps}"
        return _conv_reason(channels, taps)
    if op == "selective_step":
        channels, size = operands["A"].shape
        if channels % 128:
            return f"it needs a multiple of 128 channels, got {channels}"
        if not 2 <= size <= 32:
            return f"it keeps a channel's states in registers, 2 to 32 of them, got {size}"
        return None
    if op == "selective_scan":
        channels, size = operands["A"].shape
        if channels % 32:
            return f"it needs a multiple of 32 channels, got {channels}"
        if size % 16 or size > 64:
            return f"it needs a multiple of 16 states a channel, at most 64, got {size}"
        return None
    if op == "ssd":
        return _ssd_reason(operands)
    if op == "projected_conv_step":
        return _projected_conv_reason(**operands)
    _, width, size = operands["states"].shape[2:]
    if width % 16 or size % 32 or size > 512:
        return (
            f"it needs heads of a multiple of 16 by a multiple of 32 to 512, got {width} by {size}"
        )
    return None


def _columns_reason(operands: Mapping[str, Any]) -> str | None:
    for name, operand in operands.items():
        if isinstance(operand, Columns) and operand.start % 8:
            return f"{name} begins at column {operand.start}, and it needs a multiple of 8"
        if isinstance(operand, Columns) and operand.array.shape[-1] % 8:
            columns = operand.array.shape[-1]
            return f"{name} is part of {columns} columns, and it needs a multiple of 8"
    return None


def supports(op: str, operands: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot run this call; None if they can."""
    return (
        device_reason()
        or _dtype_reason(operands)
        or _columns_reason(operands)
        or shape_reason(op, operands)
    )
