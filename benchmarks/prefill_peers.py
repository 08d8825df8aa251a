"""Prefills of other packages, timed like ours, where they are installed.

They take rows of one length, and know no blocks and no checkpoints.
"""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.prefill import Lengths, start_loop


def start_jla(
    kind: str, make, lengths: Lengths, block: tuple[int, ...], **options: object
) -> Callable[[], float]:
    """A Mosaic GPU kernel of jax-linear-attention; `make(shape, key)` gives its operands by name."""
    from jla import ops  # pyright: ignore[reportMissingImports]

    shape = len(lengths), lengths[0]
    sets = [make(shape, jax.random.key(n)) for n in range(max(2, 8192 // sum(lengths)))]

    @jax.jit
    def once(state, inputs, _):
        options_ = {**options, "initial_state": state, "output_final_state": True}
        return ops.linear_attention(kind, **inputs, impl="mosaic_gpu", **options_)[1]

    state = jnp.zeros((len(lengths), *block), jnp.float32)
    return start_loop(once, state, sets, max(8, round(1e6 / sum(lengths))))


def jla_ssd(lengths: Lengths, heads: int, width: int, size: int) -> Callable[[], float]:
    """On `dt x` and `dt A` made before: without softplus and skip."""

    def make(shape, key):
        keys = jax.random.split(key, 4)
        k, q = (jax.random.normal(key, (*shape, 1, size), jnp.bfloat16) for key in keys[:2])
        v = jax.random.normal(keys[2], (*shape, heads, width), jnp.bfloat16)
        g = -jax.random.uniform(keys[3], (*shape, heads), jnp.float32)
        return {"q": q, "k": k, "v": v, "g": g}

    options = {"scale": 1.0, "chunk_size": 64, "segment_ids": None}
    return start_jla("simple_gla", make, lengths, (heads, size, width), **options)


def jla_scan(lengths: Lengths, channels: int, size: int) -> Callable[[], float]:
    """With softplus, step bias, skip and gate."""

    def make(shape, key):
        keys = jax.random.split(key, 8)
        k, q = (jax.random.normal(key, (*shape, size), jnp.bfloat16) for key in keys[:2])
        v, dt, z = (jax.random.normal(key, (*shape, channels), jnp.bfloat16) for key in keys[2:5])
        d, bias = (jax.random.normal(key, (channels,), jnp.bfloat16) for key in keys[5:7])
        a = -jnp.exp(jax.random.normal(keys[7], (channels, size), jnp.float32))
        return {"q": q, "k": k, "v": v, "dt": dt, "a": a, "d": d, "z": z, "dt_bias": bias}

    return start_jla("mamba1", make, lengths, (channels, size), dt_softplus=True)


def mamba_ssm_ssd(lengths: Lengths, heads: int, width: int, size: int) -> Callable[[], float]:
    """mamba_ssm's Triton kernels in a CUDA graph, from zeros."""
    import mamba_ssm.ops.triton.ssd_combined as package  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    rows, tokens = len(lengths), lengths[0]
    half = {"device": "cuda", "dtype": torch.bfloat16}
    A, skip = -torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda")
    bias = torch.randn(heads, device="cuda")
    sets = [
        (
            torch.randn(rows, tokens, heads, width, **half),
            torch.randn(rows, tokens, heads, **half),
            *torch.randn(2, rows, tokens, 1, size, **half),
        )
        for _ in range(max(2, 8192 // sum(lengths)))
    ]

    def once(x, dt, B, C):
        return package.mamba_chunk_scan_combined(
            x, dt, A, B, C, 256, D=skip, dt_bias=bias, dt_softplus=True, return_final_states=True
        )

    with torch.no_grad():
        for inputs in sets:
            once(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs in sets:
                once(*inputs)

    def seconds() -> float:
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / (10 * len(sets)))
        return statistics.median(times[1:])

    return seconds
