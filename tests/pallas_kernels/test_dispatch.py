"""Which implementation runs: the named one, or the first that is here and takes the input."""

import pytest

from pallas_kernels.dispatch import RUNS_HERE, run_first
from pallas_kernels.errors import UnsupportedInputError


def small_only(x, *, factor):
    if x > 9:
        raise UnsupportedInputError("mosaic: x: got more than 9")
    return "mosaic", factor * x


IMPLEMENTATIONS = {
    "mosaic": small_only,
    "triton": lambda x, *, factor: ("triton", factor * x),
    "xla": lambda x, *, factor: ("xla", factor * x),
}


@pytest.fixture
def with_mosaic(monkeypatch):
    for name, here in {"mosaic": True, "triton": False}.items():
        monkeypatch.setitem(RUNS_HERE, name, lambda here=here: here)


@pytest.mark.usefixtures("with_mosaic")
def test_the_first_that_is_here_and_takes_the_input_runs():
    assert run_first(IMPLEMENTATIONS, None, 9, factor=2) == ("mosaic", 18)
    assert run_first(IMPLEMENTATIONS, None, 10, factor=2) == ("xla", 20)


@pytest.mark.usefixtures("with_mosaic")
def test_a_named_one_runs_or_says_why_not():
    assert run_first(IMPLEMENTATIONS, "triton", 10, factor=3) == ("triton", 30)
    with pytest.raises(UnsupportedInputError, match="more than 9"):
        run_first(IMPLEMENTATIONS, "mosaic", 10, factor=3)
    with pytest.raises(ValueError, match="implementation: got cuda, expected mosaic, triton, xla"):
        run_first(IMPLEMENTATIONS, "cuda", 1, factor=3)
