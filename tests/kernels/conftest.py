"""What the tests of kernels share."""

import jax
import pytest

INTERPRETED = ("test_matmul", "test_mosaic", "test_projected_conv")


@pytest.fixture(autouse=True)
def quick_to_compile(request):
    """Interpreted kernels are large programs that run once: XLA takes longer to optimize them than they run.

    What is compared with them is compiled alike. Portable implementations elsewhere are compiled as users have them.
    """
    interpreted = request.module.__name__.rpartition(".")[2].startswith(INTERPRETED)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or interpreted)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
