"""Mamba-2 prefills of other packages, timed like ours, where they are installed.

They take rows of one length, start from zeros, and know no blocks and no checkpoints.
"""

import statistics
import time


def jla_seconds(lengths: tuple[int, ...], heads: int, width: int, size: int) -> float:
    """jax-linear-attention's Mosaic GPU kernels on `dt x` and `dt A` made before: no skip, no softplus."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jla import ops

    rows, tokens = len(lengths), lengths[0]
    sets = []
    for n in range(max(1, 8192 // sum(lengths))):
        keys = jax.random.split(jax.random.key(n), 4)
        v = jax.random.normal(keys[0], (rows, tokens, heads, width), jnp.bfloat16)
        g = -jax.random.uniform(keys[1], (rows, tokens, heads), jnp.float32)
        k, q = (jax.random.normal(key, (rows, tokens, 1, size), jnp.bfloat16) for key in keys[2:])
        sets.append((q, k, v, g))

    @jax.jit
    def once(q, k, v, g, state):
        return ops.linear_attention(
            "simple_gla", q, k, v, g=g, impl="mosaic_gpu", scale=1.0, chunk_size=64,
            segment_ids=None, initial_state=state, output_final_state=True,
        )  # fmt: skip

    state = jnp.zeros((rows, heads, size, width), jnp.float32)
    turns = max(2, round(0.02 / (len(sets) * 2e-8 * sum(lengths))))

    def loop(state, sets):
        def turn(_, state):
            for inputs in sets:
                _, state = once(*inputs, state)
            return state

        return lax.fori_loop(0, turns, turn, state)

    program = jax.jit(loop).lower(state, sets).compile()
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(program(state, sets))
        times.append((time.perf_counter() - begin) / (turns * len(sets)))
    return statistics.median(times[1:])


def mamba_ssm_seconds(lengths: tuple[int, ...], heads: int, width: int, size: int) -> float:
    """mamba_ssm's Triton kernels in a CUDA graph."""
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

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
        for _ in range(max(1, 8192 // sum(lengths)))
    ]

    def once(x, dt, B, C):
        return mamba_chunk_scan_combined(
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


PEERS = {"jax-linear-attention": jla_seconds, "mamba_ssm": mamba_ssm_seconds}
