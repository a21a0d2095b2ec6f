"""Random ragged batches over permuted pages, with NaN in every slot and page that isn't used."""

import numpy as np

from pallas_kernels.multi_token_attention import plan_attention
from tests.pallas_kernels import fp8 as fp8_numpy


def ragged_batch(rng, lens, *, heads, kv_heads, head_dim, page_size, dtype, spare=3, fp8=False, **options):
    """(q, pool, plan) for rows of (query tokens, tokens attended to); `spare` more tokens are padding. With
    `fp8` the pool has 8-bit pages."""
    counts = [-(-kv_len // page_size) for _, kv_len in lens]
    num_pages = sum(counts) + 3
    pages = np.split(rng.permutation(num_pages)[: sum(counts)].astype(np.int32), np.cumsum(counts)[:-1])
    pool = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, dtype)
    for (_, kv_len), row_pages in zip(lens, pages, strict=True):
        for i, page in enumerate(row_pages):
            used = min(page_size, kv_len - i * page_size)
            pool[page, :, :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    tokens = sum(q for q, _ in lens) + spare
    plan = plan_attention(
        q_lens=[q for q, _ in lens],
        kv_lens=[kv for _, kv in lens],
        pages=pages,
        max_rows=len(lens) + max(spare, 2),
        max_pages=max(counts) + 1,
        max_tokens=tokens,
        **options,
    )
    if fp8:
        pool = fp8_numpy.pool_of(pool)
    return rng.standard_normal((tokens, heads, head_dim)).astype(dtype), pool, plan


def random_lens(rng, count, longest):
    """Rows of decode, of a few tokens, and of prefill with a history of up to `longest` tokens."""
    kinds = rng.integers(0, 4, count)
    new = [[1, rng.integers(2, 16), rng.integers(16, 300), 64 * rng.integers(1, 4)][kind] for kind in kinds]
    return [(int(n), int(n + rng.integers(0, longest))) for n in new]
