"""Whole steps compiled ahead of time for H200s: pools in place, few launches, on one GPU and on two."""

import pytest

from tests.programs import lines_of

LAYERS = 2


@pytest.fixture(scope="module")
def compiled(compilers):
    return lines_of("worker/compile_step_for_h200", compilers)


def test_pools_are_written_in_place(compiled):
    assert len(compiled) == 3
    for line in compiled.values():
        assert line["in_place_bytes"] == line["pool_bytes"], line
        # A copy of one layer's pool would show.
        if line["case"].startswith("decode"):
            assert line["temp_bytes"] < line["pool_bytes"] / LAYERS / 4, line


def test_a_decode_step_is_few_launches(compiled):
    """A layer: norm, q k v, rotation and writing, attention, product, norm, gate and up, product. Where
    attention cuts rows into parts, joining them is one more."""
    one, two = compiled["decode 64, 13B"], compiled["decode 64, 70B on two"]
    assert one["kernels"] == 9 * LAYERS + 2
    assert two["kernels"] == 8 * LAYERS + 2
    assert one["launches"] <= 9 * LAYERS + 7
    assert two["launches"] <= 14 * LAYERS + 7


def test_a_prefill_step_is_few_launches(compiled):
    """A layer: norm, q, k, v, rotation and writing, attention, product and residual, norm, gate, up, what
    joins them, product and residual."""
    line = compiled["prefill 2048, 13B"]
    assert line["kernels"] == 2 * LAYERS + 2
    assert line["launches"] <= 12 * LAYERS + 5
