"""The Triton kernels on a machine without a GPU: interpreted, and compiled ahead of time."""

import numpy as np
import pytest

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.multi_token_attention import multi_token_attention
from pallas_kernels.multi_token_attention.triton import (
    CUT_PROGRAMS,
    LEAST_KEYS,
    MULTIPROCESSORS,
    num_splits,
)
from tests.pallas_kernels.ragged import ragged_batch
from tests.programs import lines_of

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes a block may have, by compute capability (CUDA programming guide, technical specifications)."""
SPILLED_BYTES = {"float32_d96": 1300, "fp8_d256": 800}
FEW_SPILLED_BYTES = 350
"""Where registers are short, some are kept in local memory: a few of them, not the output of a tile. Float32
has no matrix units, and all of a product's operands in registers."""
COMMON = ["decode", "mixed", "kv_write", "kv_write_norm", "copy_pages", "read_pages"]
FP8_COMMON, FP8_OTHERS = ["fp8_decode", "fp8_mixed", "fp8_write"], ["fp8_window_d80", "fp8_d256"]
OTHERS = ["one_head_a_group", "window_d256", "cap_d80", "float32_d96"]


def test_interpreted_kernels_match_the_reference(compilers):
    lines = lines_of("pallas_kernels/interpret_triton", compilers)
    assert len(lines) == 13
    for line in lines.values():
        assert line["error"] < 2e-3, line


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        (90, COMMON + FP8_COMMON),
        pytest.param(90, OTHERS + FP8_OTHERS, marks=pytest.mark.slow),
        pytest.param(80, COMMON + OTHERS, marks=pytest.mark.slow),
        pytest.param(89, COMMON + FP8_COMMON + OTHERS + FP8_OTHERS, marks=pytest.mark.slow),
    ],
)
def test_compiles_within_the_limits(capability, cases, compilers):
    lines = lines_of("pallas_kernels/compile_triton", compilers, capability, *cases)
    assert list(lines) == cases
    for line in lines.values():
        assert line["kernels"], line
        for kernel in line["kernels"]:
            assert kernel["spilled_bytes"] <= SPILLED_BYTES.get(line["case"], FEW_SPILLED_BYTES), line
            assert kernel["shared_bytes"] <= SHARED_MEMORY[capability], line
        if capability == 90:
            assert line["temp_bytes"] < 4e6, line
            if line["case"] in ("kv_write", "kv_write_norm", "copy_pages", "read_pages"):
                assert line["alias_bytes"] > 2 * 2**31, line  # the pool: more than 2**31 numbers of two bytes
            if line["case"] == "fp8_write":
                assert line["alias_bytes"] > 2**31, line


@pytest.mark.parametrize(
    ("match", "heads", "head_dim", "dtype"),
    [
        ("q: got float64", 4, 16, np.float64),
        ("head_dim 512", 4, 512, np.float16),
        ("head_dim 256", 4, 256, np.float32),
        ("17 heads", 17, 16, np.float16),
    ],
)
def test_what_it_does_not_compute_is_refused(match, heads, head_dim, dtype):
    sizes = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "page_size": 16, "dtype": dtype}
    with pytest.raises(UnsupportedInputError, match=match):
        multi_token_attention(
            *ragged_batch(np.random.default_rng(), [(3, 20)], **sizes), implementation="triton"
        )


@pytest.mark.parametrize(
    ("rows", "kv_heads", "keys"), [(64, 10, 4096), (64, 10, 1024), (16, 10, 1024), (1, 10, 131072)]
)
def test_rows_are_cut_so_that_the_last_programs_fill_the_gpu(rows, kv_heads, keys):
    splits = num_splits(rows=rows, num_kv_heads=kv_heads, most_keys=keys)
    assert splits > 1 and keys // splits >= LEAST_KEYS
    waves = rows * kv_heads * splits / (MULTIPROCESSORS * CUT_PROGRAMS)
    assert waves / np.ceil(waves) > 0.9


@pytest.mark.parametrize("kv_heads", [8, 40])
def test_rows_that_fill_the_gpu_stay_whole(kv_heads):
    assert num_splits(rows=64, num_kv_heads=kv_heads, most_keys=4096) == 1
