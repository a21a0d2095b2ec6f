"""Pages of 8-bit keys and values: e4m3 numbers, with a scale per page and head for keys and one for values.

A pool of such pages is u8[num_pages, 2, num_kv_heads, page_size + 1, head_dim]. Row t of a page is its token
t, as bits of `float8_e4m3fn` (OCP, 8-bit floating point, 2023). The first byte of the last row is the
exponent of the scale, 2 ** (byte - 127); the rest of that row is never read. So the scale goes wherever
the page goes, and who moves whole pages needn't know of it. A key is a number times its page's scale:
exact in float32, bfloat16 and float16, since scales are powers of two.

The scale is the first token's alone. It is set as that token is written and kept for the page's other tokens,
so it doesn't depend on the batches in which these come: KV that is computed again has the same bits, where
keys and values have. Later tokens may be `HEADROOM` times as large as the first; beyond, they saturate.

The pool is of bytes, and not of `float8_e4m3fn`, because XLA makes a 16-bit copy of a float8 pool to write
to it on a CPU (jaxlib 0.11.2), and because not all bytes are numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.errors import UnsupportedInputError

PAGE_DTYPE = np.dtype(np.uint8)
SCALE_ROWS = 1
"""Rows of a page and head beside its tokens."""
LARGEST = 448.0
"""Of e4m3."""
BIAS = 127
"""Of the exponent of the scale, as of float32's."""
FIRST_BINADE = 2
"""The first token's largest number is brought to 2**this or more, below twice that. Normal numbers of e4m3
reach from 2**-6 to 448, so tokens that are larger and such that are smaller find room
(docs/design/fp8-kv.md)."""
HEADROOM = LARGEST / 2 ** (FIRST_BINADE + 1)
"""56: how much larger than the first token a later one may be, at least."""
LEAST_EXPONENT = BIAS - 4
"""Scales don't fall below 2**-4, which holds numbers of up to 28: the first token of a conversation often has
values near zero, and its page others that haven't. Small numbers lose nothing that counts: steps end at
2**-13."""
NAN = 0x7F
"""A byte that is no number. As an exponent it is that of a scale of 1."""

OLDEST_CAPABILITY = 89
"""Ada: the first GPUs with instructions for 8-bit numbers."""

type Array = jax.Array | np.ndarray


def is_fp8(kv_pages: Array) -> bool:
    """Whether a pool is of such pages."""
    return kv_pages.dtype == PAGE_DTYPE


def check_capability(kv_pages: Array, compute_capability: int) -> None:
    """Refuse such pages on GPUs that don't compute with their numbers.

    Args:
        kv_pages: a pool of any pages.
        compute_capability: of the GPU, 90 for one.

    Raises:
        UnsupportedInputError: it is older than Ada.
    """
    if is_fp8(kv_pages) and compute_capability < OLDEST_CAPABILITY:
        raise UnsupportedInputError(
            f"kv_pages: got 8-bit pages, expected compute capability {OLDEST_CAPABILITY} or newer, "
            f"not {compute_capability}"
        )


def page_size(kv_pages: Array) -> int:
    """Tokens of a page of any pool, of these pages or of plain ones."""
    return kv_pages.shape[3] - SCALE_ROWS if is_fp8(kv_pages) else kv_pages.shape[3]


def exponents(first: jax.Array) -> jax.Array:
    """Exponents of the scales of pages whose first token is given.

    Args:
        first: [..., head_dim]: its keys or values.

    Returns:
        u8[...].
    """
    largest = jnp.abs(first).astype(jnp.float32).max(-1)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - FIRST_BINADE
    return jnp.maximum(exponent, LEAST_EXPONENT).astype(PAGE_DTYPE)


def scales(exponent: Array) -> jax.Array:
    """f32[...] of u8[...]."""
    return lax.bitcast_convert_type(jnp.asarray(exponent).astype(jnp.int32) << 23, jnp.float32)


def quantized(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Numbers as a page holds them: rounded to the nearest, and to the largest where they are beyond it.

    Args:
        x: [..., head_dim].
        exponent: u8[...].

    Returns:
        u8[..., head_dim]. What is not finite becomes `NAN`.
    """
    x = x.astype(jnp.float32)
    scaled = jnp.clip(x * scales(2 * BIAS - exponent)[..., None], -LARGEST, LARGEST)
    bits = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), PAGE_DTYPE)
    return jnp.where(jnp.isfinite(x), bits, NAN)


def dequantized(pages: Array, dtype: np.dtype) -> jax.Array:
    """Whole pages as plain ones.

    Args:
        pages: u8[..., page_size + 1, head_dim].
        dtype: of the result.

    Returns:
        [..., page_size, head_dim]. Exact, up to numbers that are too large for float16.
    """
    pages = jnp.asarray(pages)
    numbers = lax.bitcast_convert_type(pages[..., :-SCALE_ROWS, :], jnp.float8_e4m3fn).astype(jnp.float32)
    return (numbers * scales(pages[..., -SCALE_ROWS:, :1])).astype(dtype)
