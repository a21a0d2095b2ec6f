"""The products of a decode step and the norms compiled ahead of time for an H200, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path


def test_compiles_without_spills_and_copies(compilers):
    script = Path(__file__).parent / "compile_products_for_h200.py"
    done = subprocess.run(
        [sys.executable, script, compilers], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 10
    for result in results:
        # Shared memory over the limit would have been refused.
        assert result["spilled_bytes"] == [0], result
        assert not result["serialized"], result
        assert result["temp_bytes"] == 0, result
