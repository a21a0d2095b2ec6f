"""The public functions: check their arguments and pick an implementation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import run_first, runs_here
from pallas_kernels.page_move.triton import copy_pages_triton, read_pages_triton

type Array = jax.Array | np.ndarray


def gather_pages(kv_pages: jax.Array, pages: jax.Array) -> jax.Array:
    """Copy pages out of the pool.

    Args:
        kv_pages: [num_pages, ...].
        pages: i32[n]: pages to copy; num_pages or more gives zeros.

    Returns:
        [n, ...] in the order of `pages`.
    """
    return kv_pages.at[pages].get(mode="fill", fill_value=0)


def gather_layers(pools: Sequence[jax.Array], pages: jax.Array) -> jax.Array:
    """Copy the same pages out of several pools into one array.

    Args:
        pools: one for each layer, [num_pages, *page].
        pages: i32[n]: pages to copy; num_pages or more gives zeros.

    Returns:
        [num_layers, n, *page] in the order of `pages`.
    """
    if not runs_here("triton"):
        return jnp.stack([gather_pages(pool, pages) for pool in pools])
    # Of a stack XLA makes one kernel, which picks the pool anew for each number that it copies.
    page, count = pools[0].shape[1:], pages.shape[0]
    staged = jnp.zeros((len(pools) * count, *page), pools[0].dtype)
    for layer, pool in enumerate(pools):
        places = np.arange(layer * count, (layer + 1) * count, dtype=np.int32)
        staged = copy_pages_triton(staged, pool, places, pages)
    return staged.reshape(len(pools), count, *page)


def scatter_pages(kv_pages: jax.Array, staged: jax.Array, pages: jax.Array) -> jax.Array:
    """Copy staged pages into the pool. In place where the pool is donated.

    Args:
        kv_pages: [num_pages, ...].
        staged: [n, ...].
        pages: i32[n]: where each goes, all different; num_pages or more goes nowhere.

    Returns:
        the pool with the pages written.
    """
    if runs_here("triton"):  # XLA's scatter reaches an eighth of the rate
        return copy_pages_triton(kv_pages, staged, pages, jnp.arange(pages.shape[0], dtype=jnp.int32))
    return _scatter_pages_xla(kv_pages, staged, pages)


def copy_pages(
    target: jax.Array,
    source: jax.Array,
    target_pages: Array,
    source_pages: Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Copy pages from one pool to another. In place where the target is donated.

    With Triton, either pool may be pinned host memory (memory kind "pinned_host"), which the kernel reads and
    writes over the link, page by page, without a staging buffer. Call it inside `jax.jit`, with the target's
    sharding as `out_shardings`.

    Args:
        target: [num_target, *page].
        source: [num_source, *page], of the same dtype.
        target_pages: i32[n], all different; num_target or more: not copied.
        source_pages: i32[n]: where each comes from; num_source or more: not copied.
        implementation: one of `IMPLEMENTATIONS`; None: the first that runs on the default device.

    Returns:
        the target with the pages written.

    Raises:
        ValueError: shapes or dtypes don't fit together, or the implementation is unknown.
        UnsupportedInputError: the named implementation isn't installed.
    """
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(
            f"source: got pages {source.dtype}{source.shape[1:]}, "
            f"expected {target.dtype}{target.shape[1:]} as in target"
        )
    if target_pages.ndim != 1 or target_pages.shape != source_pages.shape:
        shapes = f"{target_pages.shape}, {source_pages.shape}"
        raise ValueError(f"target_pages, source_pages: got shapes {shapes}, expected [n] twice")
    return run_first(IMPLEMENTATIONS, implementation, target, source, target_pages, source_pages)


def address_halves(addresses: Sequence[int]) -> np.ndarray:
    """i32[2 n]: the lower and the upper half of each address, as `read_pages` takes them.

    Raises:
        ValueError: an address isn't a multiple of 16.
    """
    if any(address % 16 for address in addresses):
        raise ValueError(f"addresses: got {list(addresses)}, expected multiples of 16")
    return np.array(addresses, np.uint64).astype("<u8").view("<i4")


def read_pages(
    kv_pages: jax.Array,
    addresses: Array,
    layer: int,
    pages: Array,
    host_pages: Array,
    *,
    num_host_pages: int,
) -> jax.Array:
    """Copy pages from host memory that is registered with the device, wherever they lie, into the pool: by a
    kernel that reads over the link. In place where the pool is donated. For GPUs with Triton alone.

    XLA knows nothing of that memory: it has to hold what is read until the device is done.

    Args:
        kv_pages: [num_pages, *page].
        addresses: i32[2 num_layers]: `address_halves` of arrays [num_host_pages, *page] of the same dtype.
        layer: which of them is read.
        pages: i32[n], all different: where each page goes; num_pages or more: it isn't copied.
        host_pages: i32[n]: where each comes from.
        num_host_pages: pages of each array; a page beyond them isn't copied.

    Returns:
        the pool with the pages written.

    Raises:
        UnsupportedInputError: jax-triton is not installed.
    """
    return read_pages_triton(kv_pages, addresses, layer, pages, host_pages, num_source=num_host_pages)


def _scatter_pages_xla(kv_pages: jax.Array, staged: jax.Array, pages: Array) -> jax.Array:
    return kv_pages.at[pages].set(staged, mode="drop")


def _copy_pages_xla(
    target: jax.Array, source: jax.Array, target_pages: Array, source_pages: Array
) -> jax.Array:
    exists = (source_pages >= 0) & (source_pages < source.shape[0])
    return _scatter_pages_xla(
        target,
        gather_pages(source, jnp.asarray(source_pages)),
        jnp.where(exists, target_pages, target.shape[0]),
    )


IMPLEMENTATIONS = {"triton": copy_pages_triton, "xla": _copy_pages_xla}
"""Name -> implementation of `copy_pages`, in the order in which they are tried."""
