"""The Hopper kernel compiled ahead of time for an H200, on a machine without a GPU."""

import pytest

from pallas_kernels.multi_token_attention.shapes import SHAPES
from tests.programs import lines_of

CASES = [*SHAPES, "d64_odd_group", "page_16", "page_64", "page_128"]
COMMON = [
    "decode_64x4096_h32kv8",
    "prefill_1x16384_h40kv10",
    "mixed_60x2048_4x512_over_4096_h40kv10",
    "d64_odd_group",
]
"""The others differ in sizes; they are compiled among the slow tests."""
SPILLED_BYTES = 256
"""Addresses of barriers and the like, kept in local memory outside the loops over keys."""


@pytest.mark.parametrize(
    "cases", [COMMON, pytest.param([name for name in CASES if name not in COMMON], marks=pytest.mark.slow)]
)
def test_compiles_within_the_limits(cases, compilers):
    results = lines_of("pallas_kernels/compile_for_h200", compilers, *cases)
    assert list(results) == cases
    for result in results.values():
        # Shared memory over the limit would have been refused.
        assert len(result["spilled_bytes"]) == 1 and max(result["spilled_bytes"]) <= SPILLED_BYTES, result
        assert not result["serialized"], result
        assert result["temp_bytes"] < 20e6, result  # the parts; every pool but the smallest is larger
