"""Counting what XLA compiles, and keeping it for the next process."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax

_count = 0


def _listen(event: str, duration_secs: float, **_: object) -> None:
    global _count
    if event == "/jax/core/compile/backend_compile_duration":
        _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def count() -> int:
    """Programs that this process compiled (or took from the cache) since jaxstate was imported."""
    return _count


@functools.cache
def instructions() -> str:
    """A short name for the instructions that this processor has; XLA's code for CPUs, and so its bits, follow them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split()))
    return f"{platform.machine()} {hashlib.blake2b(words.encode(), digest_size=4).hexdigest()}"


def use_persistent_cache(folder: str | os.PathLike | None = None) -> Path | None:
    """Keeps compiled programs in a folder of the user's own, so that the next process need not compile them.

    The folder is `folder`, or JAX_COMPILATION_CACHE_DIR, or `~/.cache/jaxstate/xla`; one that is made here is private,
    because whoever can write there can run code as its owner. A folder that cannot be made is warned of and done
    without, and None returned.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(
        folder or os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache_home / "jaxstate" / "xla"
    )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path
