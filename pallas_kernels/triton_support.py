"""Triton kernels in JAX programs. jax-triton, which compiles them, is installed with the CUDA extras alone.

jax-triton's own call goes through XLA's old interface for custom calls, which stays out of CUDA graphs. The
same compiled kernel is called here through the new one, whose handler says that a graph may hold it.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from pallas_kernels.errors import UnsupportedInputError

try:
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]
except ImportError:
    triton_lib = None

OLDEST_CAPABILITY = 80
"""Ampere: the first with bfloat16 products."""
CALL_TARGET = "triton_kernel_call_ffi"
"""What jaxlib runs."""
ALIGNMENT = 16
"""Bytes: XLA's buffers are aligned to more."""

type Argument = jax.Array | np.ndarray | int


def runs_here() -> bool:
    """Whether jax-triton is installed and the default device is a GPU that it compiles for."""
    if triton_lib is None or jax.devices()[0].platform != "gpu":
        return False
    return compute_capability_here() >= OLDEST_CAPABILITY


def triton_call(
    *arguments: Argument,
    kernel: Callable | None,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    compute_capability: int | None = None,
    constants: dict[str, Any],
) -> list[jax.Array]:
    """Launch a Triton kernel.

    Args:
        arguments: the kernel's first parameters: arrays, and 32-bit numbers that may differ from call to call
            without compiling again.
        kernel: made by `triton.jit`; None where Triton isn't installed.
        outputs: shapes and dtypes of the parameters after those.
        grid: programs along each axis, at most three.
        name: of the launch in profiles.
        num_warps: warps of a program.
        num_stages: steps of a loop whose loads are under way at once.
        aliases: array argument -> output that is the same memory, each counted among its own kind.
        compute_capability: compile for this GPU, 90 for one; None: for the one that is here.
        constants: the kernel's `tl.constexpr` parameters, which come last.

    Returns:
        the outputs.

    Raises:
        UnsupportedInputError: jax-triton is not installed.
    """
    if triton_lib is None or kernel is None:
        raise UnsupportedInputError("implementation: got triton, expected jax-triton to be installed")
    compiled = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend,
        "cuda",
        kernel,
        [_type_of(argument) for argument in (*arguments, *outputs)],
        [(i, _type_of(n), n) for i, n in enumerate(arguments) if isinstance(n, int)],
        num_warps=num_warps,
        num_stages=num_stages,
        num_ctas=1,
        compute_capability=compute_capability,
        enable_fp_fusion=True,
        metaparams=constants,
        dump=False,
    )[0]
    jaxlib_triton = triton_lib.triton_kernel_call_lib
    parameters = [
        jaxlib_triton.create_scalar_parameter(argument, _type_of(argument))
        if isinstance(argument, int)
        else jaxlib_triton.create_array_parameter(0, ALIGNMENT)
        for argument in (*arguments, *outputs)
        # A 1 is compiled in.
        if not (isinstance(argument, int) and argument == 1)
    ]
    launch = jaxlib_triton.TritonKernelCall(compiled, *(*grid, 1, 1)[:3], parameters)
    call = jax.ffi.ffi_call(CALL_TARGET, list(outputs), input_output_aliases=aliases)
    arrays = [argument for argument in arguments if not isinstance(argument, int)]
    return list(call(*arrays, opaque=zlib.compress(launch.to_proto(name, b""))))


def _type_of(argument: Argument | jax.ShapeDtypeStruct) -> str:
    if isinstance(argument, int):
        return "i32"
    assert triton_lib is not None
    return triton_lib.get_triton_type(ShapedArray(argument.shape, argument.dtype))


def compute_capability_here() -> int:
    """Of the default device: 90 for a Hopper GPU; 0 where there is none."""
    return round(10 * float(getattr(jax.devices()[0], "compute_capability", 0)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: what Triton's blocks are made of."""
    return 1 << (n - 1).bit_length()
