"""The public functions: check their arguments and pick an implementation."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_pages
from pallas_kernels.dispatch import run_first
from pallas_kernels.kv_write.rotary import Rotary
from pallas_kernels.kv_write.triton import rotate_and_write_triton
from pallas_kernels.kv_write.xla import kv_write_xla, rotate_and_write_xla

type Array = jax.Array | np.ndarray

IMPLEMENTATIONS = {"triton": rotate_and_write_triton, "xla": rotate_and_write_xla}
"""Name -> implementation of `rotate_and_write`, in the order in which they are tried."""


def kv_write(kv_pages: jax.Array, k: jax.Array, v: jax.Array, pages: Array, slots: Array) -> jax.Array:
    """Write the keys and values of a batch's tokens to their places. In place where the pool is donated.

    Args:
        kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]; or 8-bit pages (`fp8_pages`), whose
            tokens in this batch stand one behind the other, in their order.
        k: [num_tokens, num_kv_heads, head_dim].
        v: [num_tokens, num_kv_heads, head_dim].
        pages: i32[num_tokens]: each token's page; num_pages or more for padding, which writes nowhere.
        slots: i32[num_tokens]: each token's place in its page.

    Returns:
        the pool with the tokens written.

    Raises:
        ValueError: shapes or dtypes don't fit together.
    """
    _check_pool(kv_pages)
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    expected = (k.shape[0], num_kv_heads, head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(
            f"k, v: got shapes {k.shape}, {v.shape}, expected {expected} for a pool {kv_pages.shape}"
        )
    _check_dtypes("k, v", kv_pages, k, v)
    return kv_write_xla(kv_pages, k, v, pages, slots)


def rotate_and_write(
    kv_pages: jax.Array,
    qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
    pages: Array,
    slots: Array,
    rotary: Rotary,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """From the projection to the attention in one pass: rotate queries and keys, write keys and values.

    Args:
        kv_pages: see `kv_write`; in place where it is donated.
        qkv: the projection's output: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], heads of queries,
            keys and values in this order; or these three apart.
        pages: i32[num_tokens]: each token's page; num_pages or more for padding, which writes nowhere.
        slots: i32[num_tokens]: each token's place in its page.
        rotary: norms and rotation.
        implementation: one of `IMPLEMENTATIONS`; None: the first that runs on the default device and takes
            the input.

    Returns:
        the queries [num_tokens, num_heads, head_dim], normalised and rotated, and the pool.

    Raises:
        ValueError: shapes or dtypes don't fit together, or the implementation is unknown.
        UnsupportedInputError: the named implementation doesn't take the input.
    """
    _check_pool(kv_pages)
    _check_projection(kv_pages, qkv)
    num_tokens = (qkv[0] if isinstance(qkv, tuple) else qkv).shape[0]
    if pages.shape != (num_tokens,) or slots.shape != (num_tokens,):
        raise ValueError(
            f"pages, slots: got shapes {pages.shape}, {slots.shape}, expected [{num_tokens}] twice"
        )
    head_dim = kv_pages.shape[4]
    half = rotary.cos.shape[-1]
    if rotary.cos.shape != (num_tokens, half) or rotary.sin.shape != (num_tokens, half):
        raise ValueError(
            f"rotary: got shapes {rotary.cos.shape}, {rotary.sin.shape}, expected [{num_tokens}, "
            "rotary_dim / 2] twice"
        )
    if not 0 < 2 * half <= head_dim:
        raise ValueError(f"rotary: got {half} pairs, expected 1 to {head_dim // 2}")
    _check_norms((qkv[0] if isinstance(qkv, tuple) else qkv).dtype, head_dim, rotary)
    return run_first(IMPLEMENTATIONS, implementation, kv_pages, qkv, pages, slots, rotary)


def _check_pool(kv_pages: jax.Array) -> None:
    if kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        pool = "[num_pages, 2, num_kv_heads, page_size, head_dim]"
        raise ValueError(f"kv_pages: got shape {kv_pages.shape}, expected {pool}")


def _check_dtypes(name: str, kv_pages: jax.Array, *arrays: jax.Array) -> None:
    """All are floating and of one dtype: the pool's, unless that has 8-bit pages."""
    expected = arrays[0].dtype if fp8_pages.is_fp8(kv_pages) else kv_pages.dtype
    if any(array.dtype != expected or not jnp.issubdtype(array.dtype, jnp.floating) for array in arrays):
        got = ", ".join(str(array.dtype) for array in arrays)
        raise ValueError(f"{name}: got dtypes {got}, expected {expected}, a floating one")


def _check_norms(dtype: np.dtype, head_dim: int, rotary: Rotary) -> None:
    norms = [norm for norm in (rotary.q_norm, rotary.k_norm) if norm is not None]
    if len(norms) == 1:
        raise ValueError("rotary: got one of q_norm and k_norm, expected both or none")
    for norm in norms:
        if norm.shape != (head_dim,) or norm.dtype != dtype:
            raise ValueError(f"rotary: got a norm {norm.dtype}{norm.shape}, expected {dtype}({head_dim},)")


def _check_projection(kv_pages: jax.Array, qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array]) -> None:
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    parts = qkv if isinstance(qkv, tuple) else (qkv,)
    shapes = [part.shape for part in parts]
    if any(len(shape) != 3 or shape[2] != head_dim or shape[0] != shapes[0][0] for shape in shapes):
        raise ValueError(f"qkv: got shapes {shapes}, expected [num_tokens, heads, {head_dim}]")
    heads = [shape[1] for shape in shapes]
    if isinstance(qkv, tuple):
        num_heads, expected = heads[0], [heads[0], num_kv_heads, num_kv_heads]
    else:
        num_heads = heads[0] - 2 * num_kv_heads
        expected = heads
    if heads != expected or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"qkv: got heads {heads}, which don't fit a pool of {num_kv_heads} kv heads")
    _check_dtypes("qkv", kv_pages, *parts)
