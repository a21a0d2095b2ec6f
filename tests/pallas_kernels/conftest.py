"""Where the compilers for NVIDIA GPUs are."""

import os
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[2] / ".cache" / "aot"


@pytest.fixture(scope="session")
def compilers() -> Path:
    """The folder that `make compiler` makes. Without it a test is skipped, and fails where CI is set."""
    if not (PARTS / "installed").exists():
        problem = "needs the compilers for NVIDIA GPUs: make compiler"
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return PARTS
