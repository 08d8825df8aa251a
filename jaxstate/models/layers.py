"""The layers that model families share: norms, projections, the short convolution's weights, embedding and head.

Each takes and returns the dtype of the model; sums, norms and gates are float32 inside. Constructors build blueprints
(see `tensors.py`): they take the name of the layer in a published checkpoint.
"""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import pallas_kernels as pk
from jaxstate.models import tensors
from jaxstate.models.shards import total
from jaxstate.models.tensors import Tensor
from jaxstate.typing import Array, BFloat16, Float, Float32, Int
from pallas_kernels.rows import RowIds


def parameter(*args: Any, **kwargs: Any) -> nnx.Param[Array]:
    """A parameter that holds the description of its tensor."""
    return nnx.Param(cast(Array, Tensor(*args, **kwargs)))


def value(parameter: nnx.Param[Array] | None) -> Array | None:
    """A parameter's array; None for a parameter that the model does not have."""
    return None if parameter is None else parameter[...]


FEW_ROWS = 64
"""Up to so many rows a product is bound by reading the matrix, not by arithmetic."""
BATCH_ROWS = 256
"""Up to so many rows there are kernels for norms, and for products with all matrices but a vocabulary's."""


def matmul(
    x: Float[Array, "... n"] | pk.Columns,
    weight: Float[Array, "m n"],
    dtype: Any,
    residual: Float[Array, "... m"] | None = None,
) -> Float[Array, "... m"]:
    """`x @ weight.T` in `dtype`, summed in float32; float32 operands are not rounded, as a GPU would by default.

    A bfloat16 `weight` loses nothing beside a float32 `x`: few rows are split into bfloat16 parts (see `split`), so
    that the matrix is read as it is; for many rows it is widened. A `residual` is added in its own dtype.
    """
    most = BATCH_ROWS if weight.shape[0] < 32768 else FEW_ROWS
    if _few(x, weight, most=most):
        return pk.rows_matmul(x, weight, residual, dtype=dtype)
    y = _many(pk.sliced(x), weight, dtype)
    return y if residual is None else residual + y.astype(residual.dtype)


def _few(x: Array | pk.Columns, weight: Array, dtype: Any = None, most: int = FEW_ROWS) -> bool:
    """Whether the product is one of `pallas_kernels.rows_matmul`, that of `x` as `dtype` if there is one."""
    few = len(x.shape) == 2 and x.shape[0] <= most
    return few and ((dtype or x.dtype) != jnp.float32 or weight.dtype != jnp.bfloat16)


def _many(x: Array, weight: Array, dtype: Any) -> Array:
    if x.dtype != jnp.float32 or weight.dtype != jnp.bfloat16:
        return _product(x, weight, dtype)
    rows = math.prod(x.shape[:-1])
    if rows > FEW_ROWS:
        return _product(x, weight.astype(jnp.float32), dtype)
    y = _product(split(x).reshape((3 * rows, -1)), weight, jnp.float32)
    # The small ones first, which rounds less.
    small, middle, large = y.reshape((3, *x.shape[:-1], -1))
    return (small + middle + large).astype(dtype)


def _product(x: Array, weight: Array, dtype: Any) -> Array:
    exact = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = ((x.ndim - 1,), (1,)), ((), ())
    return lax.dot_general(x, weight, contracted, precision=exact, preferred_element_type=dtype)


def split(x: Float32[Array, "... n"]) -> BFloat16[Array, "3 ... n"]:
    """Three numbers whose sum is `x` to the last of float32's 24 bits, the smallest first.

    Their products with bfloat16 numbers are exact in float32.
    """
    # Made once, not again for each part.
    x = lax.optimization_barrier(x)
    parts = []
    for _ in range(3):
        # Not a cast to and fro, which a compiler may take for superfluous.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(parts[::-1])


def rms_normalise(x: Float[Array, "... d"], eps: float) -> Float32[Array, "... d"]:
    """`x` over its root mean square (Zhang & Sennrich 2019, arXiv:1910.07467), in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, name: str, size: int, eps: float):
        self.weight = parameter(f"{name}.weight", (size,), tensors.ones)
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """The normed input, in the dtype of the scale."""
        weight = self.weight[...]
        if x.ndim == 2 and x.shape[0] <= BATCH_ROWS:
            return pk.rms_norm(x, weight, eps=self.eps)
        return (rms_normalise(x, self.eps) * weight.astype(jnp.float32)).astype(weight.dtype)


class GatedRMSNorm(nnx.Module):
    """Mamba-2's output norm: gate first, then a root mean square norm over each group of channels."""

    def __init__(self, name: str, size: int, groups: int, eps: float):
        self.weight = parameter(f"{name}.weight", (size,), tensors.ones)
        self.groups, self.eps = groups, eps

    def __call__(
        self, x: Float[Array, "... d"], gate: Float[Array, "... d"]
    ) -> Float[Array, "... d"]:
        """The gated and normed input, in the dtype of the scale."""
        return self.normed(self.gated(x, gate))

    def normed(self, gated: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """The norm of an input that was gated before."""
        weight = self.weight[...]
        if gated.ndim == 2 and gated.shape[0] <= BATCH_ROWS and self.groups == 1:
            return pk.rms_norm(gated, weight, eps=self.eps)
        x = gated.astype(jnp.float32)
        split = x.reshape((*x.shape[:-1], self.groups, -1))
        normed = rms_normalise(split, self.eps).reshape(x.shape)
        return (normed * weight.astype(jnp.float32)).astype(weight.dtype)

    def gated(
        self, x: Float[Array, "... d"], gate: Float[Array, "... d"]
    ) -> Float32[Array, "... d"]:
        """The input times the SiLU of the gate, not normed yet."""
        return x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))


class Linear(nnx.Module):
    """An affine map."""

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool = False):
        self.weight = parameter(f"{name}.weight", (outputs, inputs), tensors.fan_in, factor=True)
        self.bias = parameter(f"{name}.bias", (outputs,), tensors.zeros) if bias else None

    def __call__(
        self,
        x: Float[Array, "... in"] | pk.Columns,
        shards: int = 1,
        residual: Float[Array, "... out"] | None = None,
    ) -> Float[Array, "... out"]:
        """`W x + b`; where the inputs are divided over shards, summed over them; then a residual is added."""
        if shards == 1 and self.bias is None:
            return matmul(x, self.weight[...], x.dtype, residual)
        if shards == 1:
            y = matmul(x, self.weight[...], x.dtype)
        else:
            y = total(matmul(x, self.weight[...], jnp.float32)).astype(x.dtype)
        y = y if self.bias is None else y + self.bias[...]
        return y if residual is None else residual + y.astype(residual.dtype)


class ShortConv(nnx.Module):
    """The weights of a causal depthwise convolution; the ops of `pallas_kernels` apply them."""

    def __init__(self, name: str, channels: int, taps: int, *, bias: bool):
        self.weight = parameter(f"{name}.weight", (channels, 1, taps), tensors.fan_in, conv=True)
        self.bias = parameter(f"{name}.bias", (channels,), tensors.zeros) if bias else None


def projected_conv_step(
    linear: Linear,
    conv: ShortConv,
    x: Float[Array, "rows d"],
    windows: Float[Array, "layers blocks K-1 D"],
    layer: Any,
    rows: RowIds,
    *,
    first: int,
    norm: RMSNorm | None = None,
) -> tuple[list[pk.Columns], Float[Array, "layers blocks K-1 D"]]:
    """The projection of one token a row: what lies before its column `first`, the channels convolved, the rest.

    With a `norm`, that of the normed rows.
    """
    matrix, weight, bias = linear.weight[...], conv.weight[...], value(conv.bias)
    channels = weight.shape[1]
    sizes = (first, channels, matrix.shape[0] - first - channels)
    ids = windows, layer, rows.read_ids, rows.write_ids
    scale = None if norm is None else norm.weight[...]
    if linear.bias is None and _few(x, matrix, None if scale is None else scale.dtype):
        y, windows = pk.projected_conv_step(
            x, matrix, weight, bias, *ids, scale, first=first, activation="silu",
            eps=0.0 if norm is None else norm.eps,
        )  # fmt: skip
        return pk.split(y, *sizes), windows
    x = x if norm is None else norm(x)
    before, inner, after = pk.split(linear(x), *sizes)
    y, windows = pk.conv_step(inner, weight, bias, *ids, activation="silu")
    return [before, *pk.split(y, channels), after], windows


class Embedding(nnx.Module):
    """A table of token vectors, which may serve as the head too."""

    def __init__(self, name: str, vocab: int, size: int):
        self.weight = parameter(f"{name}.weight", (vocab, size), tensors.embedding, factor=True)

    def __call__(self, tokens: Int[Array, "tokens"]) -> Float[Array, "tokens d"]:
        """The vectors of the tokens; NaN for an id outside the vocabulary, never a neighbour's vector."""
        return self.weight.at[tokens].get(
            mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
        )

    def attend(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... vocab"]:
        """Scores of all tokens, as the head of a model whose head is tied to its embedding."""
        return matmul(hidden, self.weight[...], jnp.float32)


class Head(nnx.Module):
    """The projection to token scores of a model whose head is its own."""

    def __init__(self, name: str, vocab: int, size: int):
        self.weight = parameter(f"{name}.weight", (vocab, size), tensors.fan_in, factor=True)

    def attend(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... vocab"]:
        """Scores of all tokens."""
        return matmul(hidden, self.weight[...], jnp.float32)
