"""Loading a model for the command line; the one module of this package that imports JAX."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxstate.engine import Engine
from jaxstate.errors import CheckpointError, JaxstateError
from jaxstate.lm import LM
from jaxstate.models.identify import identify
from jaxstate.serve.bounds import max_token_bytes
from jaxstate.sizing import STATE_SHARE, Sizes, free_bytes
from jaxstate.state.spec import GroupSpec, format_bytes
from jaxstate.text import Tokenizer
from pallas_kernels import dispatch


class PlatformError(JaxstateError):
    """JAX has no device of the platform that it was told to use."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its engine, not compiled yet."""

    name: str
    engine: Engine
    tokenizer: Tokenizer | None
    vocab_size: int
    load_s: float
    token_bytes: int | None = None
    """Most bytes of text that one token stands for; None where that is not known."""

    @property
    def rows(self) -> int:
        """Sequences in flight."""
        return self.engine.rows

    @property
    def prompt_bytes(self) -> int | None:
        """Bytes of the longest text that may fit a sequence and leave room for a token."""
        if self.token_bytes is None:
            return None
        return (self.engine.spec.max_len - 1) * self.token_bytes

    def identity(self) -> dict[str, str]:
        """Which model it is, to the last bit of its weights."""
        return dataclasses.asdict(identify(self.engine.model))

    def describe(self) -> list[tuple[str, str]]:
        """Return, as name and text, what a person may want to know before a run."""
        engine, spec, shape = self.engine, self.engine.spec, self.engine.shape
        parameters = jax.tree.leaves(engine._params)
        weights = sum(leaf.addressable_shards[0].data.nbytes for leaf in parameters)
        tokenizer = "none" if self.tokenizer is None else f"{self.tokenizer.vocab_size:,} tokens"
        return [
            ("model", f"{self.name}, {type(engine.model).__name__}, {self.vocab_size:,} token ids"),
            ("tokenizer", tokenizer),
            ("weights", format_bytes(weights)),
            ("device", _describe_devices(engine)),
            *[("group", _describe_group(group)) for group in spec.groups],
            ("sequence", f"{format_bytes(spec.bytes_per_sequence)} of state, however short its text; "
             f"up to {spec.max_len:,} tokens"),
            ("rows", f"{spec.rows:,} in flight ({_fit(engine)})"),
            ("prefixes", _describe_reuse(engine)),
            ("memory", f"{format_bytes(weights + spec.nbytes)} for weights and states; what steps need comes on top"),
            ("kernels", engine.kernels()),
            ("program", f"prefill, {shape.chunk_tokens:,} tokens of up to {spec.rows:,} rows"),
            ("program", f"decode, {spec.rows:,} rows x {engine.steps_per_dispatch} tokens"),
        ]  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return what the engine tells of itself, ready for JSON."""
        engine, spec, stats = self.engine, self.engine.spec, self.engine.stats
        return {
            "model": self.name,
            "device": jax.local_devices()[0].device_kind,
            "jax": jax.__version__,
            "kernels": {op: choice._asdict() for op, choice in dispatch.chosen().items()},
            "sizes": {
                "rows": spec.rows,
                "max_len": spec.max_len,
                "chunk_tokens": engine.shape.chunk_tokens,
                "decode_steps": engine.steps_per_dispatch,
                "checkpoints": _checkpoints(engine),
                "data_parallel": engine.mesh.ranks,
                "tensor_parallel": engine.mesh.shards,
            },
            "blocks": {
                name: {"peak": stats.peak_blocks[name], "pool": spec.blocks(name) - 1}
                for name in spec.names
            },
            "engine": dataclasses.asdict(stats),
        }


def _describe_devices(engine: Engine) -> str:
    kind, ranks, shards = engine.mesh.devices[0].device_kind, engine.mesh.ranks, engine.mesh.shards
    if shards > 1:
        return f"{ranks * shards} of {kind}, {shards} to a model; what follows is on each"
    return kind if ranks == 1 else f"{ranks} of {kind}; what follows is on each"


def _checkpoints(engine: Engine) -> int:
    """States that can be kept while every row is taken."""
    spec = engine.spec
    kept = min(spec.blocks(g) - 1 - spec.rows * spec.capacity(g) for g in spec.names)
    return kept if engine.shape.checkpoints else 0


def _describe_reuse(engine: Engine) -> str:
    if not engine.shape.checkpoints:
        return "not reused"
    each = sum(group.bytes_per_block for group in engine.spec.groups)
    return (
        f"{_checkpoints(engine):,} states of {format_bytes(each)} kept for prompts that begin alike"
    )


def load(
    name: str, *, dtype: str | None, report: Callable[[str], None], **sizes: int | None
) -> Loaded:
    """Load a model folder, or `demo`; the keywords are the fields of `Sizes`.

    Raises:
      PlatformError: there is no device to load it to.
      CheckpointError: the folder is not a model that jaxstate can load.
      SpecError: sizes that cannot be, or do not fit the device.
    """
    begin = time.monotonic()
    _check_platform()
    try:
        lm = LM.load(name, dtype=dtype, sizes=Sizes(**sizes), report=report)
    except PermissionError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    vocab_size = lm.model.config.vocab_size
    token_bytes = None if lm.tokenizer is None else max_token_bytes(lm.tokenizer)
    load_s = time.monotonic() - begin
    return Loaded(name, lm.engine, lm.tokenizer, vocab_size, load_s, token_bytes)


def _check_platform() -> None:
    # The first to ask JAX for its devices, so that what it says is not the fault of anything else.
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise PlatformError(
            f"JAX cannot use the platform {jax.config.jax_platforms!r} on this machine"  # pyright: ignore[reportAttributeAccessIssue]
            f"{f': {reason}' if reason else ''}; unset JAX_PLATFORMS, or set it to cpu"
        ) from error


def _describe_group(group: GroupSpec) -> str:
    leaves = ", ".join(
        f"{jax.tree_util.keystr(path, simple=True)} {list(leaf.shape)} {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(group.leaves)
    )
    size = "a sequence" if group.block_size is None else f"{group.block_size} tokens"
    return (
        f"{group.name}: {group.kind}, {group.layers} layers, "
        f"{format_bytes(group.bytes_per_block)} a block, one block for {size} ({leaves})"
    )


def _fit(engine: Engine) -> str:
    free = free_bytes(jax.local_devices()[0])
    if free is None:
        return "the device does not tell how many would fit"
    fit = int(free * STATE_SHARE) // engine.spec.bytes_per_sequence - 1
    return f"{format_bytes(free)} free, {max(fit, 0):,} would fit"
