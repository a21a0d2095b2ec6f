"""Multi-token paged attention in plain XLA operations: runs everywhere, and is the path of CPUs.

Tiles of queries walk over their row's KV in blocks of pages with a running softmax, so memory and work
follow the true lengths, not the padded page table.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.multi_token_attention.plan import AttentionPlan

KV_BLOCK_TOKENS = 256
"""Keys of one block. Large enough to make products of it, small enough that short rows waste little."""
TILES_AT_ONCE = 8
"""Tiles computed together; they share the number of blocks of the longest."""


def attention_xla(
    q: jax.Array,
    kv_pages: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
) -> jax.Array:
    """As `multi_token_attention`; any dtype, any sizes. Products accumulate in float32."""
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    max_rows, max_pages = plan.page_table.shape
    block_q, (num_tiles,) = plan.block_q, plan.tile_rows.shape
    group = num_heads // num_kv_heads
    pages_per_block = max(1, min(KV_BLOCK_TOKENS // page_size, max_pages))
    block_kv = pages_per_block * page_size

    row = jnp.minimum(plan.tile_rows, max_rows - 1)
    real = jnp.asarray(plan.tile_rows) < max_rows
    cu_q_lens, kv_lens = jnp.asarray(plan.cu_q_lens), jnp.asarray(plan.kv_lens)
    q_len = cu_q_lens[row + 1] - cu_q_lens[row]
    in_row = plan.tile_starts[:, None] + jnp.arange(block_q)  # [tiles, block_q]: place within the row
    is_query = real[:, None] & (in_row < q_len[:, None])
    tokens = jnp.where(is_query, cu_q_lens[row][:, None] + in_row, num_tokens)
    positions = kv_lens[row][:, None] - q_len[:, None] + in_row
    kv_end = jnp.where(real, jnp.minimum(positions[:, -1] + 1, kv_lens[row]), 0)  # keys any query sees
    kv_begin = jnp.zeros_like(kv_end)
    if sliding_window is not None:
        kv_begin = jnp.maximum(positions[:, 0] - sliding_window + 1, 0)

    table = jnp.asarray(plan.page_table)
    width = -(-max_pages // pages_per_block) * pages_per_block
    table = jnp.pad(table, ((0, 0), (0, width - max_pages)))

    def group_of_tiles(args: tuple[jax.Array, ...]) -> jax.Array:
        tile_row, tile_tokens, tile_positions, begin, end = args
        size = tile_row.shape[0]
        tile_q = q.at[tile_tokens].get(mode="fill", fill_value=0)
        tile_q = tile_q.reshape(size, block_q, num_kv_heads, group, head_dim)

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            pages = lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)[tile_row]
            kv = kv_pages[pages]  # [tiles, pages, 2, kv_heads, page_size, head_dim]
            keys = i * block_kv + jnp.arange(block_kv)
            held = (keys < end[:, None]).reshape(size, pages_per_block, page_size)
            # Slots past the end may hold anything, NaN too: 0 x NaN is NaN, so they are cleared first.
            kv = jnp.where(held[:, :, None, None, :, None], kv, 0)
            k, v = kv[:, :, 0], kv[:, :, 1]
            scores = jnp.einsum("tqhgd,tphsd->thgqps", tile_q, k, preferred_element_type=jnp.float32)
            scores = scores.reshape(size, num_kv_heads, group, block_q, block_kv) * scale
            if logit_soft_cap is not None:
                scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
            distance = tile_positions[:, :, None] - keys
            seen = (distance >= 0) & (keys < end[:, None, None])
            if sliding_window is not None:
                seen &= distance < sliding_window
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(-1))
            safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp(scores - safe_peak[..., None])
            fade = jnp.exp(peak - safe_peak)
            v = v.transpose(0, 2, 1, 3, 4).reshape(size, num_kv_heads, block_kv, head_dim)
            part = jnp.einsum(
                "thgqk,thkd->thgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return acc * fade[..., None] + part, new_peak, total * fade + weights.sum(-1)

        shape = (size, num_kv_heads, group, block_q)
        start = (
            jnp.zeros((*shape, head_dim), jnp.float32),
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
        first = jnp.min(jnp.where(end > 0, begin, jnp.iinfo(jnp.int32).max)) // block_kv
        last = -(-jnp.max(end) // block_kv)
        acc, _, total = lax.fori_loop(first, last, block, start)
        out = acc / jnp.where(total == 0, 1.0, total)[..., None]
        return out.transpose(0, 3, 1, 2, 4).reshape(size, block_q, num_heads, head_dim).astype(q.dtype)

    batch = min(TILES_AT_ONCE, num_tiles)
    padded = -(-num_tiles // batch) * batch

    def grouped(x: jax.Array, fill: int) -> jax.Array:
        x = jnp.pad(x, ((0, padded - num_tiles),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
        return x.reshape(padded // batch, batch, *x.shape[1:])

    work = (
        grouped(row, 0),
        grouped(tokens, num_tokens),
        grouped(positions, 0),
        grouped(kv_begin, 0),
        grouped(kv_end, 0),
    )
    tiles = lax.map(group_of_tiles, work)
    tiles = tiles.reshape(padded * block_q, num_heads, head_dim)[: num_tiles * block_q]
    return jnp.zeros_like(q).at[tokens.reshape(-1)].set(tiles, mode="drop")
