"""The programs that an engine compiles: what they run, how they are compiled, and which of them runs a plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxstate.packing import Packing
from jaxstate.plan import PlanShape
from jaxstate.ranks import RankStep
from jaxstate.step import decode_step, prefill_step
from pallas_kernels import dispatch

CUBLAS_ROWS = 32
"""From so many rows on cuBLAS's products are as fast as XLA's own, and sum over parts within their launch."""


def runs(tree: Any, shape: PlanShape, platform: str, *, poison: bool) -> dict[str, Callable]:
    """Functions of (parameters, state, packed plan) by the program's name; `tree` is the model's structure.

    A GPU has two programs that decode, and branches in neither: there a branch makes the device wait for the host at
    every token, see `sampling.sample`.
    """
    common = {"tree": tree, "spec": shape.spec, "poison": poison}
    own = packing("decode", shape, poison=poison)
    decode = functools.partial(_run_decode, packing=own, steps=shape.decode_steps, **common)
    own = packing("prefill", shape, poison=poison)
    prefill = functools.partial(_run_prefill, packing=own, **common)
    if platform == "cpu":
        return {"prefill": prefill, "decode": decode}
    straight = functools.partial(decode, early_exit=False)
    return {
        "prefill": prefill,
        "decode": functools.partial(straight, filters=False),
        "decode_filtered": functools.partial(straight, filters=True),
    }


def packing(kind: str, shape: PlanShape, *, poison: bool) -> Packing:
    """How a plan is handed to the program of that name."""
    return Packing.of(shape, prefill=kind == "prefill", poison=poison)


def of(step: RankStep, kinds: tuple[str, ...]) -> str:
    """The name of the program that runs a step, of those that there are."""
    filtered = f"{step.kind}_filtered"
    if filtered not in kinds:
        return step.kind
    some = any(r is not None and r.request.sampling.filters for r in step.serves)
    return filtered if some else step.kind


def describe(kind: str, shape: PlanShape) -> str:
    """A program's name and sizes, for a person."""
    rows = shape.spec.rows
    if kind == "prefill":
        return f"prefill, {shape.chunk_tokens} tokens of up to {rows} rows"
    filtered = ", with top-k, top-p or min-p" if kind == "decode_filtered" else ""
    return f"decode, {rows} rows x {shape.decode_steps} tokens{filtered}"


def options(kind: str, shape: PlanShape, platform: str) -> dict[str, Any]:
    """XLA's options for a program."""
    many = platform != "cpu" and kind != "prefill" and shape.spec.rows >= CUBLAS_ROWS
    return {"xla_gpu_enable_triton_gemm": False} if many else {}


def compiled(lowered: Any, options: dict[str, Any]) -> Any:
    """The program, compiled with those options if this release of XLA has them."""
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def compile_all(
    kinds: tuple[str, ...], lower: Callable[[str], Any], shape: PlanShape, platform: str,
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The programs of these kinds, compiled at once, saying so."""

    def finish(kind: str, lowered: Any, started: float) -> Any:
        program = compiled(lowered, options(kind, shape, platform))
        report(f"compiled {describe(kind, shape)}: {time.perf_counter() - started:.1f} s")
        return program

    with ThreadPoolExecutor(max_workers=len(kinds)) as pool:
        pending = {}
        for kind in kinds:
            report(f"compiling {describe(kind, shape)}")
            pending[kind] = pool.submit(finish, kind, lower(kind), time.perf_counter())
        report(f"kernels {dispatch.describe(dispatch.chosen())}")
        return {kind: future.result() for kind, future in pending.items()}


def _run_prefill(params, state, packed, *, packing, tree, spec, **options):
    plan = packing.unpack(packed)
    return prefill_step(jax.tree.unflatten(tree, params), spec, state, plan, **options)


def _run_decode(params, state, packed, *, packing, tree, spec, **options):
    plan = packing.unpack(packed)
    return decode_step(jax.tree.unflatten(tree, params), spec, state, plan, **options)
