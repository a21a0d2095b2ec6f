"""Multi-token paged attention in plain XLA operations: runs everywhere, and is the path of CPUs.

Tiles of queries walk over their row's KV in blocks of pages with a running softmax, so memory and work
follow the true lengths, not the padded page table.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp8_pages
from pallas_kernels.multi_token_attention.plan import AttentionPlan

KV_BLOCK_TOKENS = 256
"""Keys of one block. Large enough to make products of it, small enough that short rows waste little."""
DECODE_TILES_AT_ONCE = 8
"""Tiles of one query that are computed together; they share the number of blocks of the longest. Larger
tiles fill a product by themselves and go one at a time, so that padding tiles cost nothing."""


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
    num_kv_heads, page_size = kv_pages.shape[2], fp8_pages.page_size(kv_pages)
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
        # All queries that share a kv head are the rows of one matrix: [tiles, kv_heads, group * q, head_dim].
        tile_q = q.at[tile_tokens].get(mode="fill", fill_value=0)
        tile_q = tile_q.reshape(size, block_q, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        tile_q = tile_q.reshape(size, num_kv_heads, group * block_q, head_dim)
        row_positions = jnp.tile(tile_positions, (1, group))[:, None, :, None]

        def block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            pages = lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)[tile_row]
            keys = i * block_kv + jnp.arange(block_kv)
            # Slots past the end may hold anything, NaN too: 0 x NaN is NaN, so they are cleared first.
            held = (keys < end[:, None])[:, None, :, None]
            kv = kv_pages[pages]
            if fp8_pages.is_fp8(kv_pages):
                kv = fp8_pages.dequantized(kv, q.dtype)
            kv = kv.transpose(2, 0, 3, 1, 4, 5)  # [2, tiles, kv_heads, pages, page_size, head_dim]
            k, v = jnp.where(held, kv.reshape(2, size, num_kv_heads, block_kv, head_dim), 0)
            scores = jnp.einsum("thmd,thkd->thmk", tile_q, k, preferred_element_type=jnp.float32) * scale
            if logit_soft_cap is not None:
                scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
            distance = row_positions - keys
            seen = (distance >= 0) & (keys < end[:, None, None, None])
            if sliding_window is not None:
                seen &= distance < sliding_window
            scores = jnp.where(seen, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(-1))
            safe_peak = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp(scores - safe_peak[..., None])
            fade = jnp.exp(peak - safe_peak)
            part = jnp.einsum(
                "thmk,thkd->thmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return acc * fade[..., None] + part, new_peak, total * fade + weights.sum(-1)

        shape = (size, num_kv_heads, group * block_q)
        start = (
            jnp.zeros((*shape, head_dim), jnp.float32),
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
        first = jnp.min(jnp.where(end > 0, begin, jnp.iinfo(jnp.int32).max)) // block_kv
        last = -(-jnp.max(end) // block_kv)
        acc, _, total = lax.fori_loop(first, last, block, start)
        out = acc / jnp.where(total == 0, 1.0, total)[..., None]
        out = out.reshape(size, num_kv_heads, group, block_q, head_dim).transpose(0, 3, 1, 2, 4)
        return out.reshape(size, block_q, num_heads, head_dim).astype(q.dtype)

    batch = min(DECODE_TILES_AT_ONCE, num_tiles) if block_q == 1 else 1
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
