"""Programs of the tests that need settings which JAX or Triton read as they are imported."""

import json
import subprocess
import sys
from pathlib import Path


def lines_of(name, *arguments):
    """Run tests/<name>.py as a process of its own; the JSON that it prints, a line for each case, by case."""
    module = f"tests.{name.replace('/', '.')}"
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}
