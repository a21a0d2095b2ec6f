"""Random inputs of `rotate_and_write`, and what it gives, in NumPy and one token at a time."""

import numpy as np

from pallas_kernels.kv_write import Rotary
from tests.pallas_kernels import fp8 as fp8_numpy

PAGE_SIZE = 16


def case(
    rng,
    *,
    num_tokens,
    num_heads,
    num_kv_heads,
    head_dim,
    rotary_dim=None,
    norm=False,
    fused=True,
    dtype=np.float32,
    num_pages=None,
    fp8=False,
):
    """Arguments of the function; every fourth token is padding, the others go to places of their own. With
    `fp8`: to 8-bit pages, and a few runs of tokens stand one behind the other."""
    num_pages = num_pages or num_tokens // PAGE_SIZE + 6
    shape = (num_pages, 2, num_kv_heads, PAGE_SIZE, head_dim)
    pool = rng.standard_normal(shape, np.float32).astype(dtype)
    qkv = rng.standard_normal((num_tokens, num_heads + 2 * num_kv_heads, head_dim)).astype(dtype)
    place = rng.permutation(num_pages * PAGE_SIZE)[:num_tokens].astype(np.int32)
    pages, slots = place // PAGE_SIZE, place % PAGE_SIZE
    pages[3::4] = num_pages + rng.integers(0, 3, len(pages[3::4]))
    if fp8:
        pool = rng.integers(0, 256, (*shape[:3], PAGE_SIZE + 1, head_dim), np.uint8)
        pool[..., -1, 0] = rng.integers(124, 130, shape[:3])  # of pages that were begun before
        pages, slots = _runs(rng, num_tokens, num_pages)
    angles = rng.uniform(0, 1000, (num_tokens, (rotary_dim or head_dim) // 2))
    norms = [rng.standard_normal(head_dim).astype(dtype) if norm else None for _ in range(2)]
    rotary = Rotary(
        cos=np.cos(angles, dtype=np.float32),
        sin=np.sin(angles, dtype=np.float32),
        q_norm=norms[0],
        k_norm=norms[1],
        epsilon=1e-5,
    )
    if not fused:
        qkv = tuple(np.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1))
    return pool, qkv, pages, slots, rotary


def _runs(rng, num_tokens, num_pages):
    """Pages and slots of rows that begin within a page or with it and go on over several, and of padding."""
    cuts = np.sort(rng.choice(np.arange(1, num_tokens), 2, replace=False)) if num_tokens > 4 else []
    free = iter(rng.permutation(num_pages))
    pages, slots = [], []
    for n in np.diff([0, *cuts, num_tokens]):
        at = rng.integers(0, 2) * rng.integers(0, PAGE_SIZE) + np.arange(n)
        own = np.array([next(free) for _ in range(at[-1] // PAGE_SIZE + 1)])
        pages.append(own[at // PAGE_SIZE])
        slots.append(at % PAGE_SIZE)
    if num_tokens > 4:
        pages[1][:] = num_pages
    return np.concatenate(pages).astype(np.int32), np.concatenate(slots).astype(np.int32)


def expected(pool, qkv, pages, slots, rotary):
    """In float32, rounded to the pool's dtype."""
    num_pages, _, num_kv_heads, _, _ = pool.shape
    whole = np.concatenate(qkv, axis=1) if isinstance(qkv, tuple) else qkv
    q, k, v = np.split(whole.astype(np.float32), (-2 * num_kv_heads, -num_kv_heads), axis=1)

    def rotated(x, norm):
        if norm is not None:
            mean_square = np.mean(x**2, axis=-1, keepdims=True)
            x = x / np.sqrt(mean_square + rotary.epsilon) * norm.astype(np.float32)
        half = rotary.cos.shape[1]
        turn = (rotary.cos + 1j * rotary.sin)[:, None]
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    if pool.dtype == np.uint8:
        k = rotated(k, rotary.k_norm).astype(whole.dtype)
        return rotated(q, rotary.q_norm).astype(whole.dtype), fp8_numpy.written(pool, k, v, pages, slots)
    pool = pool.copy()
    for token, k_row in enumerate(rotated(k, rotary.k_norm)):
        if pages[token] < num_pages:
            pool[pages[token], 0, :, slots[token]] = k_row
            pool[pages[token], 1, :, slots[token]] = v[token]
    return rotated(q, rotary.q_norm).astype(pool.dtype), pool
