"""The products of a decode step and the norms compiled ahead of time for an H200, without a GPU."""

from tests.programs import lines_of


def test_compiles_without_spills_and_copies(compilers):
    results = lines_of("pallas_kernels/compile_products_for_h200", compilers)
    assert len(results) == 13
    for result in results.values():
        # Shared memory over the limit would have been refused.
        assert result["spilled_bytes"] == [0], result
        assert not result["serialized"], result
        assert result["temp_bytes"] == 0, result
