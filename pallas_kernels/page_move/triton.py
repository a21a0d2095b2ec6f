"""Copies of pages by one Triton kernel, which reads and writes pinned host memory like the GPU's own."""

import math

import jax
import numpy as np

from pallas_kernels.triton_support import triton_call

try:
    from pallas_kernels.page_move.triton_kernel import copy_pages_kernel
except ImportError:
    copy_pages_kernel = None

PROGRAM_BYTES = 16384
"""Bytes that one program copies: 128 for each of its threads."""

type Array = jax.Array | np.ndarray


def copy_pages_triton(
    target: jax.Array,
    source: jax.Array,
    target_pages: Array,
    source_pages: Array,
    *,
    compute_capability: int | None = None,
    program_bytes: int = PROGRAM_BYTES,
    num_warps: int = 4,
) -> jax.Array:
    """As `copy_pages`.

    Args:
        target: see there, as are `source`, `target_pages` and `source_pages`.
        compute_capability: compile for this GPU, 90 for one; None: for the one that is here.
        program_bytes: bytes that one program copies, a power of two.
        num_warps: warps of a program.

    Raises:
        UnsupportedInputError: jax-triton is not installed.
    """
    page_numbers = math.prod(target.shape[1:])
    block = program_bytes // target.dtype.itemsize
    return triton_call(
        source,
        source_pages,
        target_pages,
        target,
        source.shape[0],
        target.shape[0],
        kernel=copy_pages_kernel,
        outputs=[jax.ShapeDtypeStruct(target.shape, target.dtype)],
        aliases={3: 0},
        grid=(-(-page_numbers // block), target_pages.shape[0]),
        name="copy_pages",
        compute_capability=compute_capability,
        num_warps=num_warps,
        constants={"page_numbers": page_numbers, "block": block},
    )[0]
