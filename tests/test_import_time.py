"""What must work without jax must also import without it, third-party packages included."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def modules_below(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    folder = Path(spec.submodule_search_locations[0])
    names = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    return [
        ".".join((package, *parts)).removesuffix(".__init__") for parts in names if "transfer" not in parts
    ]


@pytest.mark.parametrize(
    "package", ["pensieve_jax.core", "pensieve_jax.scheduler", "pensieve_jax.store", "host_cache"]
)
def test_does_not_import_jax(package):
    modules = modules_below(package)
    assert package in modules
    code = f"import sys, {', '.join(modules)}\nsys.exit('jax was imported' if 'jax' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
