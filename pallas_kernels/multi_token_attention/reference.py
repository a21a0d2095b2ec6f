"""The meaning of the operation, in float32 NumPy, one row at a time."""

import numpy as np

from pallas_kernels import fp8_pages
from pallas_kernels.multi_token_attention.plan import AttentionPlan


def reference_attention(
    q: np.ndarray,
    kv_pages: np.ndarray,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
) -> np.ndarray:
    """As `multi_token_attention`, slowly; padding queries give zeros.

    Args:
        q: [num_tokens, num_heads, head_dim].
        kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim], or 8-bit pages.
        plan: rows of the batch.
        scale: factor of the scores; None: head_dim ** -0.5.
        sliding_window: keys each query sees, itself included; None: all.
        logit_soft_cap: c in c * tanh(score / c); None: no cap.

    Returns:
        float32[num_tokens, num_heads, head_dim].
    """
    q, pool = np.asarray(q, np.float32), np.asarray(kv_pages)
    if fp8_pages.is_fp8(pool):
        pool = np.asarray(fp8_pages.dequantized(pool, np.dtype(np.float32)))
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    out = np.zeros(q.shape, np.float32)
    cu = np.asarray(plan.cu_q_lens)
    for row, kv_len in enumerate(np.asarray(plan.kv_lens)):
        begin, end = cu[row], min(cu[row + 1], num_tokens)
        if kv_len == 0 or begin == end:
            continue
        pages = np.asarray(plan.page_table)[row, : -(-kv_len // page_size)]
        kv = pool[pages].astype(np.float32)  # [pages, 2, kv_heads, page_size, head_dim]
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :kv_len]
        k, v = (np.repeat(x, num_heads // num_kv_heads, axis=0) for x in kv)
        scores = np.einsum("qhd,hkd->hqk", q[begin:end], k) * (head_dim**-0.5 if scale is None else scale)
        if logit_soft_cap is not None:
            scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
        distance = (np.arange(begin, end)[:, None] - end + kv_len) - np.arange(kv_len)[None]
        seen = (distance >= 0) & (distance < (sliding_window or kv_len + 1))
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[begin:end] = np.einsum("hqk,hkd->qhd", weights, v)
    return out
