"""Copies of pages by one Triton kernel, which reads and writes pinned host memory like the GPU's own."""

import math
from collections.abc import Callable

import jax
import numpy as np

from pallas_kernels.triton_support import triton_call

try:
    from pallas_kernels.page_move.triton_kernel import copy_pages_kernel, read_pages_kernel
except ImportError:
    copy_pages_kernel = read_pages_kernel = None

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
    return _run(
        copy_pages_kernel,
        (source, source_pages, target_pages, target),
        (source.shape[0], target.shape[0]),
        compute_capability=compute_capability,
        program_bytes=program_bytes,
        num_warps=num_warps,
    )


def read_pages_triton(
    target: jax.Array,
    addresses: Array,
    layer: int,
    target_pages: Array,
    source_pages: Array,
    *,
    num_source: int,
    compute_capability: int | None = None,
    program_bytes: int = PROGRAM_BYTES,
    num_warps: int = 4,
) -> jax.Array:
    """As `read_pages`; the other arguments are `copy_pages_triton`'s.

    Raises:
        UnsupportedInputError: jax-triton is not installed.
    """
    return _run(
        read_pages_kernel,
        (addresses, source_pages, target_pages, target),
        (layer, num_source, target.shape[0]),
        compute_capability=compute_capability,
        program_bytes=program_bytes,
        num_warps=num_warps,
    )


def _run(
    kernel: Callable | None,
    arrays: tuple[Array, ...],
    numbers: tuple[int, ...],
    *,
    compute_capability: int | None,
    program_bytes: int,
    num_warps: int,
) -> jax.Array:
    """The last array with the pages written; the third tells how many."""
    target, target_pages = arrays[3], arrays[2]
    page_numbers = math.prod(target.shape[1:])
    block = program_bytes // target.dtype.itemsize
    return triton_call(
        *arrays,
        *numbers,
        kernel=kernel,
        outputs=[jax.ShapeDtypeStruct(target.shape, target.dtype)],
        aliases={3: 0},
        grid=(-(-page_numbers // block), target_pages.shape[0]),
        name="copy_pages",
        compute_capability=compute_capability,
        num_warps=num_warps,
        constants={"page_numbers": page_numbers, "block": block},
    )[0]
