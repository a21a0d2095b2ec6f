"""Plain XLA operations: run everywhere, and are what the kernels are compared with."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp8_pages
from pallas_kernels.kv_write.rotary import Rotary

type Array = jax.Array | np.ndarray


def kv_write_xla(kv_pages: jax.Array, k: jax.Array, v: jax.Array, pages: Array, slots: Array) -> jax.Array:
    """As `kv_write`."""
    kv = jnp.stack([k, v], axis=1)  # [num_tokens, 2, num_kv_heads, head_dim]
    if fp8_pages.is_fp8(kv_pages):
        scale_row = fp8_pages.page_size(kv_pages)
        begun = jnp.where(slots == 0, pages, kv_pages.shape[0])
        kv_pages = kv_pages.at[begun, :, :, scale_row, 0].set(fp8_pages.exponents(kv), mode="drop")
        kv = fp8_pages.quantized(kv, kv_pages.at[pages, :, :, scale_row, 0].get(mode="fill", fill_value=0))
    return kv_pages.at[pages, :, :, slots].set(kv, mode="drop")


def rotate_and_write_xla(
    kv_pages: jax.Array,
    qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
    pages: Array,
    slots: Array,
    rotary: Rotary,
) -> tuple[jax.Array, jax.Array]:
    """As `rotate_and_write`; any dtype, any sizes."""
    if isinstance(qkv, tuple):
        q, k, v = qkv
    else:
        num_kv_heads = kv_pages.shape[2]
        q, k, v = jnp.split(qkv, (-2 * num_kv_heads, -num_kv_heads), axis=1)
    k = rotary(k, rotary.k_norm)
    return rotary(q, rotary.q_norm), kv_write_xla(kv_pages, k, v, pages, slots)
