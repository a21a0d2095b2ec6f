"""The Hopper kernel compiled ahead of time for an H200, on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ROOT / ".cache" / "aot"
NAMED = [
    "decode_64x4096_h32kv8",
    "decode_64x4096_h40kv40",
    "prefill_1x16384_h40kv10",
    "mixed_60x2048_4x512_over_4096_h40kv10",
]
"""Of each choice of heads: the other named shapes differ only in sizes."""
OTHERS = ["d64_odd_group", "page_16", "page_64", "page_128"]
SPILLED_BYTES = 256
"""Addresses of barriers and the like, kept in local memory outside the loops over keys."""

pytestmark = pytest.mark.skipif(
    not (PARTS / "jax_plugins").is_dir(),
    reason="needs the compiler: pip install --no-deps --target .cache/aot -r requirements/aot.txt",
)


@pytest.mark.parametrize("half", [0, 1])
def test_compiles_within_the_limits(half):
    cases = [*NAMED, *OTHERS][half::2]
    script = Path(__file__).parent / "compile_for_h200.py"
    done = subprocess.run(
        [sys.executable, script, PARTS, *cases], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == cases
    for result in results:
        # Shared memory over the limit would have been refused.
        assert len(result["spilled_bytes"]) == 1 and max(result["spilled_bytes"]) <= SPILLED_BYTES, result
        assert not result["serialized"], result
        assert result["temp_bytes"] < 20e6, result  # the parts; every pool but the smallest is larger
