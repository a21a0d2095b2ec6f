"""One Triton kernel for the whole pass: NVIDIA GPUs from Ampere on."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_pages
from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.kv_write.rotary import Rotary
from pallas_kernels.triton_support import compute_capability_here, power_of_two, triton_call

try:
    from pallas_kernels.kv_write.triton_kernel import rotate_and_write_kernel
except ImportError:
    rotate_and_write_kernel = None

ROW_BYTES = 4096
"""Bytes of heads that one program takes: 16 heads of 128 bfloat16 numbers."""

type Array = jax.Array | np.ndarray


def rotate_and_write_triton(
    kv_pages: jax.Array,
    qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
    pages: Array,
    slots: Array,
    rotary: Rotary,
    *,
    compute_capability: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `rotate_and_write`.

    Args:
        kv_pages: see there, as are `qkv`, `pages`, `slots` and `rotary`.
        compute_capability: compile for this GPU, 90 for one; None: for the one that is here.

    Raises:
        UnsupportedInputError: no Triton, or a dtype that it doesn't compute.
    """
    fused = not isinstance(qkv, tuple)
    q, k, v = (qkv, qkv, qkv) if fused else qkv
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise UnsupportedInputError(f"qkv: got {q.dtype}, expected bfloat16, float16 or float32")
    fp8_pages.check_capability(kv_pages, compute_capability or compute_capability_here())
    num_pages, _, num_kv_heads, page_rows, head_dim = kv_pages.shape
    num_tokens = q.shape[0]
    num_heads = q.shape[1] - 2 * num_kv_heads if fused else q.shape[1]
    half = rotary.cos.shape[1]
    rest = head_dim - 2 * half
    rows = max(1, ROW_BYTES // (power_of_two(head_dim) * q.dtype.itemsize))
    queries, pool = triton_call(
        q,
        k,
        v,
        rotary.cos,
        rotary.sin,
        rotary.cos if rotary.q_norm is None else rotary.q_norm,
        rotary.cos if rotary.k_norm is None else rotary.k_norm,
        pages,
        slots,
        kv_pages,
        num_tokens,
        num_pages,
        kernel=rotate_and_write_kernel,
        outputs=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        aliases={9: 1},
        grid=(-(-num_tokens * num_heads // rows) + 2 * -(-num_tokens * num_kv_heads // rows),),
        name="rotate_and_write",
        num_warps=4,
        compute_capability=compute_capability,
        constants={
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "half": half,
            "page_size": fp8_pages.page_size(kv_pages),
            "page_rows": page_rows,
            "fused": fused,
            "has_norm": rotary.q_norm is not None,
            "epsilon": rotary.epsilon,
            "block_half": power_of_two(half),
            "block_rest": power_of_two(rest) if rest else 0,
            "rows": rows,
        },
    )
    return queries, pool
