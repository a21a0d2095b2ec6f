"""Which implementation of an operation runs."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pallas_kernels import mosaic_support, triton_support
from pallas_kernels.errors import UnsupportedInputError

RUNS_HERE: dict[str, Callable[[], bool]] = {
    "mosaic": mosaic_support.runs_here,
    "triton": triton_support.runs_here,
    "xla": lambda: True,
}


def runs_here(implementation: str) -> bool:
    """Whether the default device and what is installed suit it: "mosaic" wants a Hopper GPU."""
    return RUNS_HERE[implementation]()


def run_first[T](
    implementations: Mapping[str, Callable[..., T]], implementation: str | None, /, *args: Any, **kwargs: Any
) -> T:
    """Run an operation.

    Args:
        implementations: by name, in the order in which they are tried; the last takes every input.
        implementation: the one that has to run; None: the first that runs on the default device and takes
            the input.
        args: the operation's.
        kwargs: the operation's.

    Returns:
        what it returned.

    Raises:
        ValueError: the named implementation is unknown.
        UnsupportedInputError: the named implementation doesn't take the input.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation: got {implementation}, expected {', '.join(implementations)}")
        return implementations[implementation](*args, **kwargs)
    for name in filter(runs_here, implementations):
        with suppress(UnsupportedInputError):
            return implementations[name](*args, **kwargs)
    raise AssertionError("the last implementation takes every input")
