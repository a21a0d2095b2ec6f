"""The public function: checks its arguments and picks an implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import fp8_pages
from pallas_kernels.dispatch import run_first
from pallas_kernels.multi_token_attention.mosaic import attention_mosaic
from pallas_kernels.multi_token_attention.plan import AttentionPlan
from pallas_kernels.multi_token_attention.triton import attention_triton
from pallas_kernels.multi_token_attention.xla import attention_xla

IMPLEMENTATIONS = {"mosaic": attention_mosaic, "triton": attention_triton, "xla": attention_xla}
"""Name -> implementation."""


TIMED_HEAD_DIMS = (64, 128)
"""Head sizes at which the Hopper kernel ran on a GPU: others are neither shown to be right nor timed."""


def in_order(*, decode: bool, head_dim: int = 128) -> tuple[str, ...]:
    """Implementations in the order in which they are tried.

    Args:
        decode: for batches whose rows all have one query, and whose rows may be cut as the batch wants it.
            The Triton kernel begins and ends such a batch faster, and reads as fast in between
            (`benchmarks/results/kernels-h200.jsonl`).
        head_dim: of the heads.
    """
    triton_first = decode or head_dim not in TIMED_HEAD_DIMS
    return ("triton", "mosaic", "xla") if triton_first else ("mosaic", "triton", "xla")


def multi_token_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of ragged rows over paged KV, causal mask fused (paper, section 4.4).

    Query i of row r stands at position kv_lens[r] - q_len[r] + i and sees all positions up to its own. A
    decode row is a row of one query.

    Args:
        q: [num_tokens, num_heads, head_dim], rows one after the other.
        kv_pages: [num_pages, 2, num_kv_heads, page_size, head_dim]: K (0) and V (1). Slots past a row's
            kv_len may hold anything. Or 8-bit pages (`fp8_pages`).
        plan: rows, page table and tiles, from `plan_attention`.
        scale: factor of the scores; None: head_dim ** -0.5.
        sliding_window: positions each query sees, its own included; None: all.
        logit_soft_cap: c in c * tanh(score / c); None: no cap.
        implementation: one of `IMPLEMENTATIONS`; None: the first `in_order` that runs on the default device
            and takes the input. A named one is compiled for whatever device the call is lowered for.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype; zeros for tokens that belong to no row.

    Raises:
        ValueError: shapes, dtypes or numbers don't fit together, or the implementation is unknown.
        UnsupportedInputError: the named implementation doesn't take the input.
    """

    def check(ok: bool, name: str, got: object, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name}: got {got}, expected {expected}")

    check(q.ndim == 3, "q", f"shape {q.shape}", "[num_tokens, num_heads, head_dim]")
    pool = "[num_pages, 2, num_kv_heads, page_size, head_dim]"
    check(kv_pages.ndim == 5 and kv_pages.shape[1] == 2, "kv_pages", f"shape {kv_pages.shape}", pool)
    check(
        kv_pages.shape[4] == q.shape[2], "kv_pages", f"head_dim {kv_pages.shape[4]}", f"{q.shape[2]} as in q"
    )
    heads = f"a divisor of q's {q.shape[1]} heads"
    check(q.shape[1] % kv_pages.shape[2] == 0, "kv_pages", f"{kv_pages.shape[2]} kv heads", heads)
    check(jnp.issubdtype(q.dtype, jnp.floating), "q", f"dtype {q.dtype}", "a floating dtype")
    fits = kv_pages.dtype == q.dtype or fp8_pages.is_fp8(kv_pages)
    check(fits, "kv_pages", f"dtype {kv_pages.dtype}", f"{q.dtype} as in q, or 8-bit pages")
    check(
        sliding_window is None or sliding_window >= 1, "sliding_window", sliding_window, "None or at least 1"
    )
    check(logit_soft_cap is None or logit_soft_cap > 0, "logit_soft_cap", logit_soft_cap, "None or above 0")
    order = in_order(decode=plan.block_q == 1 and not plan.batch_invariant, head_dim=q.shape[2])
    return run_first(
        {name: IMPLEMENTATIONS[name] for name in order},
        implementation,
        q,
        kv_pages,
        plan,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
    )
