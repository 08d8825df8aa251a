"""What differs between the jax releases that these kernels support, and nothing else."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref, layout=None) -> Any:
    """The value of a ref in registers, in any layout."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, value) -> None:
    """Stores `value`, in whatever layout it is, to a ref."""
    # jax 0.12 checks that an assignment is coalesced and has `store` for those that are not.
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
