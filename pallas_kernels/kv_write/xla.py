"""Plain XLA operations: run everywhere, and are what the kernels are compared with."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.rotary import Rotary

type Array = jax.Array | np.ndarray


def kv_write_xla(kv_pages: jax.Array, k: jax.Array, v: jax.Array, pages: Array, slots: Array) -> jax.Array:
    """As `kv_write`."""
    kv = jnp.stack([k, v], axis=1)  # [num_tokens, 2, num_kv_heads, head_dim]
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
