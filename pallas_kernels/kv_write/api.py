"""The public function and its XLA path."""

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray


def kv_write(kv_pages: jax.Array, k: jax.Array, v: jax.Array, pages: Array, slots: Array) -> jax.Array:
    """Write the keys and values of a batch's tokens to their places. In place where the pool is donated.

    Args:
        kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim].
        k: [num_tokens, num_kv_heads, head_dim].
        v: [num_tokens, num_kv_heads, head_dim].
        pages: i32[num_tokens]: each token's page; num_pages or more for padding, which writes nowhere.
        slots: i32[num_tokens]: each token's place in its page.

    Returns:
        the pool with the tokens written.

    Raises:
        ValueError: shapes or dtypes don't fit together.
    """
    _, two, num_kv_heads, _, head_dim = kv_pages.shape
    expected = (k.shape[0], num_kv_heads, head_dim)
    if two != 2 or k.shape != expected or v.shape != expected:
        raise ValueError(
            f"k, v: got shapes {k.shape}, {v.shape}, expected {expected} for a pool {kv_pages.shape}"
        )
    if k.dtype != kv_pages.dtype or v.dtype != kv_pages.dtype:
        raise ValueError(f"k, v: got dtypes {k.dtype}, {v.dtype}, expected {kv_pages.dtype} as the pool")
    kv = jnp.stack([k, v], axis=1)  # [num_tokens, 2, num_kv_heads, head_dim]
    return kv_pages.at[pages, :, :, slots].set(kv, mode="drop")
