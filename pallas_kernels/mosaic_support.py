"""What the kernels for Hopper GPUs in Pallas Mosaic GPU share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132
"""Streaming multiprocessors of an H100 or H200 (SXM)."""
SWIZZLED_ROWS = 8


def runs_here() -> bool:
    """Whether the default device is a Hopper GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def interpreter(interpret: Any) -> dict[str, Any]:
    """The arguments of `plgpu.kernel` that choose the interpreter; none for None."""
    return {} if interpret is None else {"interpret": interpret}


def swizzled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """Transforms of an array in shared memory: tiles of 8 rows of at most 128 bytes, as the matrix unit and
    the copy engine want them.

    Args:
        dtype: of the array.
        columns: of the array.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return (
        plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
