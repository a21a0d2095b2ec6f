"""The public functions and their XLA paths."""

import jax


def gather_pages(kv_pages: jax.Array, pages: jax.Array) -> jax.Array:
    """Copy pages out of the pool.

    Args:
        kv_pages: [num_pages, ...].
        pages: i32[n]: pages to copy; num_pages or more gives zeros.

    Returns:
        [n, ...] in the order of `pages`.
    """
    return kv_pages.at[pages].get(mode="fill", fill_value=0)


def scatter_pages(kv_pages: jax.Array, staged: jax.Array, pages: jax.Array) -> jax.Array:
    """Copy staged pages into the pool. In place where the pool is donated.

    Args:
        kv_pages: [num_pages, ...].
        staged: [n, ...].
        pages: i32[n]: where each goes, all different; num_pages or more goes nowhere.

    Returns:
        the pool with the pages written.
    """
    return kv_pages.at[pages].set(staged, mode="drop")
