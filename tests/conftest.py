"""Settings that must stand in the environment before JAX is imported; the platform is left to JAX."""

import os
from pathlib import Path

COMPILED_FOLDER = Path(__file__).parents[1] / ".jax_cache" / "tests"

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# Most of the time goes into compiling the same small models again and again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED_FOLDER))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
