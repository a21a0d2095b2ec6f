"""Settings that must stand in the environment before JAX is imported, and where the compilers for GPUs are.

The platform is left to JAX.
"""

import os
from pathlib import Path

import pytest

COMPILED_FOLDER = Path(__file__).parents[1] / ".jax_cache" / "tests"

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# Most of the time goes into compiling the same small models again and again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED_FOLDER))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

PARTS = Path(__file__).parents[1] / ".cache" / "aot"


@pytest.fixture(scope="session")
def compilers() -> Path:
    """The folder that `make compiler` makes. Without it a test is skipped, and fails where CI is set."""
    if not (PARTS / "installed").exists():
        problem = "needs the compilers for NVIDIA GPUs: make compiler"
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return PARTS
