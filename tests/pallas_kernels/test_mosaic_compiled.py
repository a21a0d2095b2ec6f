"""The Hopper kernel compiled ahead of time for an H200, on a machine without a GPU."""

import pytest

from pallas_kernels.multi_token_attention.shapes import SHAPES
from tests.programs import lines_of

CASES = [
    *SHAPES,
    "d64_odd_group",
    "page_16",
    "page_64",
    "page_128",
    "d80_page_16",
    "d96_page_64",
    "d256_page_128",
]
COMMON = [
    "decode_64x4096_h32kv8",
    "prefill_1x16384_h40kv10",
    "mixed_60x2048_4x512_over_4096_h40kv10",
    "d64_odd_group",
    "decode_64x1024_h32kv32_d80",
    "prefill_4x1024_h32kv32_d96",
    "prefill_4x1024_h16kv8_d256",
]
"""The others differ in sizes; they are compiled among the slow tests."""
SPILLED_BYTES, SPILLED_BYTES_PAGE_16, SPILLED_BYTES_D256 = 256, 288, 896
"""Addresses of barriers and the like, kept in local memory outside the loops over keys; of eight pages to a
block some more; at head size 256 descriptors of operands, too, which the loops read."""
TEMP_BYTES, TEMP_BYTES_D256 = 20e6, 40e6
"""The parts, and not a copy of the pool besides."""


@pytest.mark.parametrize(
    "cases", [COMMON, pytest.param([name for name in CASES if name not in COMMON], marks=pytest.mark.slow)]
)
def test_compiles_within_the_limits(cases, compilers):
    results = lines_of("pallas_kernels/compile_for_h200", compilers, *cases)
    assert list(results) == cases
    for name, result in results.items():
        most_spilled, most_temp = SPILLED_BYTES, TEMP_BYTES
        if name == "page_16":
            most_spilled = SPILLED_BYTES_PAGE_16
        if "d256" in name:
            most_spilled, most_temp = SPILLED_BYTES_D256, TEMP_BYTES_D256
        # Shared memory over the limit would have been refused.
        assert len(result["spilled_bytes"]) == 1 and max(result["spilled_bytes"]) <= most_spilled, result
        assert not result["serialized"], result
        assert result["temp_bytes"] < most_temp, result
