"""The whole suite runs with memory that nobody may read filled with NaN, and leaves the user's own caches alone."""

import atexit
import os
import shutil
import tempfile

import hypothesis

os.environ.setdefault("JAXSTATE_POISON", "1")
# One CPU shows as eight devices, for what runs over several; everything else uses the first.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxstate-tests-")
# The interpreter of GPU kernels blocks one of XLA's threads per warpgroup, and there is one thread per core.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# What XLA compiled once, all of a session's workers, commands and notebooks load. The folder is new in every session,
# and a program's key is its code, so that a fault that is put into ours is compiled.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxstate-tests-xla-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# A loaded machine is no fault, and a failure is to be seen again.
hypothesis.settings.register_profile("jaxstate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxstate")
