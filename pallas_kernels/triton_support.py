"""Triton kernels through jax-triton, which is installed with the CUDA extras alone."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.errors import UnsupportedInputError

try:
    import jax_triton  # pyright: ignore[reportMissingImports]
except ImportError:
    jax_triton = None

OLDEST_CAPABILITY = 8.0
"""Ampere: the first with bfloat16 products."""


def runs_here() -> bool:
    """Whether jax-triton is installed and the default device is a GPU that it compiles for."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return (
        jax_triton is not None
        and device.platform == "gpu"
        and capability is not None
        and float(capability) >= OLDEST_CAPABILITY
    )


def triton_call(*arguments: Any, kernel: Callable, out_shape: Any, **options: Any) -> Any:
    """`jax_triton.triton_call`, refused where it isn't installed.

    Raises:
        UnsupportedInputError: jax-triton is not installed.
    """
    if jax_triton is None:
        raise UnsupportedInputError("implementation: got triton, expected jax-triton to be installed")
    return jax_triton.triton_call(*arguments, kernel=kernel, out_shape=out_shape, **options)
