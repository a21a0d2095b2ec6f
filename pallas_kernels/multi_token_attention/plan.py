"""The host-side plan: ragged rows cut into query tiles, once per step, for all layers. Pure NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pallas_kernels.multi_token_attention.schedule import Schedule, plan_schedule

BLOCK_Q = 32
"""Query tokens of a tile in a batch that has a row of more than one."""
TILE_LINES = 128
"""Pairs of token and head, all of one group, that fill a tile on a GPU."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cu_q_lens", "kv_lens", "page_table", "tile_rows", "tile_starts", "schedule"],
    meta_fields=["block_q", "batch_invariant"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Rows and tiles of one batch. Row r owns query tokens cu_q_lens[r] .. cu_q_lens[r + 1] - 1."""

    cu_q_lens: jax.Array | np.ndarray
    """i32[max_rows + 1]: where each row's query tokens start; padding rows repeat the last value."""
    kv_lens: jax.Array | np.ndarray
    """i32[max_rows]: tokens each row's last query attends to; 0 for padding rows."""
    page_table: jax.Array | np.ndarray
    """i32[max_rows, max_pages]: pages of each row in order; entries past its kv_len are never used."""
    tile_rows: jax.Array | np.ndarray
    """i32[max_tiles]: the row of each tile, the one that sees the most keys first; max_rows for padding."""
    tile_starts: jax.Array | np.ndarray
    """i32[max_tiles]: the first query token of each tile, counted within its row; of padding tiles, counted
    from the end of the last row: together they hold the padding tokens."""
    block_q: int
    """Most query tokens of a tile."""
    batch_invariant: bool = False
    """Whether a row's output may not depend on what else is in the batch."""
    schedule: Schedule | None = None
    """Work items of the Hopper kernel; None: this plan serves the other implementations alone."""


def plan_attention(
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[np.ndarray],
    max_rows: int,
    max_pages: int,
    max_tokens: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    batch_invariant: bool = False,
    block_q: int = BLOCK_Q,
) -> AttentionPlan:
    """Lay out a batch of rows for the kernels.

    Args:
        q_lens: query tokens of each row, at least 1. All 1 makes a decode batch with tiles of one token.
        kv_lens: tokens each row's last query attends to, itself included.
        pages: i32[>= ceil(kv_len / page_size)] per row: its pages in order.
        max_rows: rows of the padded batch.
        max_pages: width of the page table.
        max_tokens: query tokens of the padded batch; with the rows it fixes the number of tiles.
        num_heads: query heads on one device, for the Hopper kernel's schedule; None: no schedule.
        num_kv_heads: KV heads on one device; given with num_heads.
        batch_invariant: a row's output doesn't depend on what else is in the batch (`plan_schedule`).
        block_q: query tokens of a tile where a row has more than one (`tile_tokens`).

    Returns:
        NumPy arrays of fixed shapes for these maxima.

    Raises:
        ValueError: more rows, tokens or pages than the maxima, or a row with more queries than keys.
    """
    num_rows, total = len(q_lens), sum(q_lens)
    if num_rows > max_rows or total > max_tokens:
        raise ValueError(f"rows, tokens: got {num_rows}, {total}, expected at most {max_rows}, {max_tokens}")
    if all(n == 1 for n in q_lens) and max_tokens <= max_rows:
        block_q = 1
    max_tiles = max_rows if block_q == 1 else -(-max_tokens // block_q) + max_rows
    cu_q_lens = np.full(max_rows + 1, total, np.int32)
    cu_q_lens[0] = 0
    cu_q_lens[1 : num_rows + 1] = np.cumsum(q_lens)
    lens = np.zeros(max_rows, np.int32)
    table = np.zeros((max_rows, max_pages), np.int32)
    rows = np.full(max_tiles, max_rows, np.int32)
    starts = np.zeros(max_tiles, np.int32)
    tile = 0
    for row, (q_len, kv_len, row_pages) in enumerate(zip(q_lens, kv_lens, pages, strict=True)):
        if not 1 <= q_len <= kv_len:
            raise ValueError(f"q_lens[{row}]: got {q_len}, expected 1 to kv_lens[{row}] = {kv_len}")
        if len(row_pages) > max_pages:
            raise ValueError(f"pages[{row}]: got {len(row_pages)} pages, expected at most {max_pages}")
        lens[row] = kv_len
        table[row, : len(row_pages)] = row_pages
        count = -(-q_len // block_q)
        rows[tile : tile + count] = row
        starts[tile : tile + count] = np.arange(count) * block_q
        tile += count
    order = np.argsort(-_keys_seen(rows[:tile], starts[:tile], block_q, q_lens, kv_lens), kind="stable")
    rows[:tile], starts[:tile] = rows[order], starts[order]
    starts[tile:] = np.arange(max_tiles - tile) * block_q
    schedule = None
    if num_heads is not None and num_kv_heads is not None:
        schedule = plan_schedule(
            q_lens=q_lens,
            kv_lens=kv_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_rows=max_rows,
            max_tokens=max_tokens,
            batch_invariant=batch_invariant,
        )
    return AttentionPlan(
        cu_q_lens=cu_q_lens,
        kv_lens=lens,
        page_table=table,
        tile_rows=rows,
        tile_starts=starts,
        block_q=block_q,
        batch_invariant=batch_invariant,
        schedule=schedule,
    )


def tile_tokens(group: int) -> int:
    """Query tokens of a tile for the Triton kernel, where `group` query heads share a KV head."""
    return max(1, TILE_LINES // group)


def _keys_seen(
    rows: np.ndarray, starts: np.ndarray, block_q: int, q_lens: Sequence[int], kv_lens: Sequence[int]
) -> np.ndarray:
    """Keys that the last query of each tile sees."""
    q_len, kv_len = np.asarray(q_lens)[rows], np.asarray(kv_lens)[rows]
    return np.minimum(kv_len - q_len + starts + block_q, kv_len)
