"""The decode kernels of mamba_ssm, timed like ours, where that package, torch and triton are installed."""

import statistics
from typing import Any

from benchmarks.kernel_trials import MAMBA, MAMBA2


def make_call(op: str, rows: int, slots: int, torch: Any, update: Any):
    """A call of the peer on one set of slots, and the float64 truth of one call."""
    heads, width, size = (MAMBA2[n] for n in "HPN") if op == "ssd_step" else (1, *MAMBA.values())
    half = {"device": "cuda", "dtype": torch.bfloat16}
    state = torch.randn(slots, heads, width, size, device="cuda")
    x, (B, C) = torch.randn(rows, heads, width, **half), torch.randn(2, rows, 1, size, **half)
    if op == "ssd_step":  # one step size, decay and skip per head
        dt = torch.randn(rows, heads, **half)[..., None].expand(-1, -1, width)
        A = -torch.rand(heads, device="cuda")[:, None, None].expand(-1, width, size)
        bias, skip = (torch.randn(heads, **half)[:, None].expand(-1, width) for _ in range(2))
        z = None
    else:
        dt, z = torch.randn(2, rows, heads, width, **half)
        A = -torch.rand(heads, width, size, device="cuda")
        bias, skip = torch.randn(2, heads, width, **half)

    def call(slots):
        return update(
            state, x, dt, A, B, C, skip, z, bias, dt_softplus=True, state_batch_indices=slots
        )

    def truth(slots):
        step = torch.nn.functional.softplus(dt.double() + bias.double())[..., None]
        h = torch.exp(step * A.double()) * state[slots.long()].double()
        h = h + step * x.double()[..., None] * B.double()[:, :, None]
        y = (h * C.double()[:, :, None]).sum(-1) + skip.double() * x.double()
        return y if z is None else y * torch.nn.functional.silu(z.double())

    return call, truth


def mamba_ssm_seconds(op: str, rows: int, layers: int, blocks: int, repeats: int = 5) -> float:
    """Seconds per call in a CUDA graph, in place, over shuffled slots of a pool as large as ours.

    Raises ImportError where the peer is not installed, ValueError if its result is wrong.
    """
    import torch
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    call, truth = make_call(op, rows, layers * blocks, torch, selective_state_update)
    calls = max(layers, 64)
    order = [torch.randperm(blocks - 1, device="cuda")[:rows] + 1 for _ in range(calls)]
    slots = [(ids + n % layers * blocks).int() for n, ids in enumerate(order)]
    right = truth(slots[0])
    error = ((call(slots[0]).double() - right).abs().max() / right.abs().max()).item()
    if not error <= 2.0**-7:
        raise ValueError(f"mamba_ssm's {op} is off by {error:.1e}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for ids in slots:
            call(ids)
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(-(-200 // calls)):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (-(-200 // calls) * calls))
    return statistics.median(times[1:])
