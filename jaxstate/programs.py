"""The programs that an engine compiles: what they run, how they are compiled, and which of them runs a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxstate.plan import PlanShape
from jaxstate.scheduler import Planned
from jaxstate.step import decode_step, prefill_step

CUBLAS_ROWS = 32
"""From so many rows on cuBLAS's products are as fast as XLA's own, and sum over parts within their launch."""


def runs(tree: Any, shape: PlanShape, platform: str, *, poison: bool) -> dict[str, Callable]:
    """Functions of (parameters, state, plan) by the program's name; `tree` is the model's structure.

    A GPU has two programs that decode, and branches in neither: there a branch makes the device wait for the host at
    every token, see `sampling.sample`.
    """
    common = {"tree": tree, "spec": shape.spec, "poison": poison}
    decode = functools.partial(_run_decode, steps=shape.decode_steps, **common)
    prefill = functools.partial(_run_prefill, **common)
    if platform == "cpu":
        return {"prefill": prefill, "decode": decode}
    straight = functools.partial(decode, early_exit=False)
    return {
        "prefill": prefill,
        "decode": functools.partial(straight, filters=False),
        "decode_filtered": functools.partial(straight, filters=True),
    }


def of(planned: Planned, kinds: tuple[str, ...]) -> str:
    """The name of the program that runs a plan, of those that there are."""
    filtered = f"{planned.kind}_filtered"
    if filtered not in kinds:
        return planned.kind
    some = any(r is not None and r.request.sampling.filters for r in planned.serves)
    return filtered if some else planned.kind


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


def _run_prefill(params, state, plan, *, tree, spec, **options):
    return prefill_step(jax.tree.unflatten(tree, params), spec, state, plan, **options)


def _run_decode(params, state, plan, *, tree, spec, **options):
    return decode_step(jax.tree.unflatten(tree, params), spec, state, plan, **options)
