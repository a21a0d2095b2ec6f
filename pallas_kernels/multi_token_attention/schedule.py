"""Work for the Hopper kernel: a batch cut into items, dealt out to a persistent grid. Pure NumPy.

Two kinds of item share one launch. A *wide* item is 64 query tokens under each of two heads that share a
KV head (128 tokens of one head where the group is odd): prefill, bound by arithmetic. A *narrow* item is
the few tokens of a short row under all heads of a group, over a stretch of its keys: decode, bound by
memory. Wide items go whole, by keys that the L2 cache holds and the longest first, to the CTA with the least
work. Narrow items then fill the
loads up to a common level: whole ones in turn as far as there is room, the rest laid out one after the other
and cut where a CTA is full, so that every CTA ends at the same time, whatever the batch. A CTA does its
parts of items before its whole ones; which CTA ends a part last merges the item.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pallas_kernels.mosaic_support import NUM_SMS

BLOCK_KV = 128
"""Keys of one step: four pages of 32 tokens."""
TILE_Q = 64
"""Query rows of a consumer warpgroup: the rows of one Hopper matrix instruction."""
ALIGN = 8
"""Rows that the bulk copy engine moves at once between global and swizzled shared memory; they are aligned to
it in both."""
NARROW_COST = 0.6
"""Time of a narrow block beside that of a wide one, when both kinds run at once: a narrow block is 64 KB of
KV, a wide one besides 8.4 MFLOP."""
ITEM_COST = 0.6
"""Start and end of an item, in wide blocks."""
CACHED_KEYS = 1 << 15
"""Keys, of one KV head each, that wide items read in turn: with their values 16 MB at head size 128. They
stay in the L2 cache (60 MB) while all tiles of their rows come by."""
INVARIANT_SPLIT_BLOCKS = 32
"""Blocks of each stretch of a short row when the cuts may depend on the row alone."""

ITEM_FIELDS = (
    "kind",
    "row",
    "kv_head",
    "head",
    "token",
    "skip",
    "stop",
    "position",
    "begin",
    "full",
    "end",
    "kv_len",
    "part",
    "first_part",
    "parts",
    "merge",
)
"""First columns of `Schedule.items`: kind (WIDE, NARROW or PARTIAL); row of the page table; KV head; first
query head; first query token, of wide items a multiple of 8; tokens to skip, which belong to the row before;
the end of the tokens, counted from the first; position of the first token in the row; first block of keys;
first block that needs a mask; end of the blocks; keys of the row. Of PARTIAL items besides: place among the
parts; the first part of the same tokens and heads and the number of them, side by side; their number among
the merges."""
ITEM_WIDTH = 32
"""Columns of an item: 128 bytes, which the copy engine wants aligned."""
WIDE, NARROW, PARTIAL = 0, 1, 2


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["runs", "items", "arrived"],
    meta_fields=["num_heads", "num_kv_heads", "max_tokens", "max_parts"],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Items of one batch, by CTA. Only the numbers change from step to step, never the shapes."""

    runs: jax.Array | np.ndarray
    """i32[num_ctas, 4]: where each CTA's wide items start, its narrow ones, its other wide ones; the end."""
    items: jax.Array | np.ndarray
    """i32[max_items, ITEM_WIDTH]."""
    arrived: jax.Array | np.ndarray
    """i32[max_merges] of zeros: parts of each item that was cut that are done. The kernel counts here and
    leaves zeros again, so that one plan serves all layers of a step, one after the other."""
    num_heads: int
    num_kv_heads: int
    max_tokens: int
    """Query tokens of the padded batch."""
    max_parts: int
    """Parts of items that the kernel leaves to be merged, at most."""


def narrow_stride(group: int) -> int:
    """Query rows of one token of a narrow item: the aligned rows that can hold the heads of a group."""
    return -(-(ALIGN - math.gcd(ALIGN, group) + group) // ALIGN) * ALIGN


def plan_schedule(
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    max_rows: int,
    max_tokens: int,
    num_ctas: int = NUM_SMS,
    batch_invariant: bool = False,
) -> Schedule:
    """Cut a batch into items and deal them out.

    Args:
        q_lens: query tokens of each row.
        kv_lens: tokens each row's last query attends to, itself included.
        num_heads: query heads on this device.
        num_kv_heads: KV heads on this device.
        max_rows: rows of the padded batch.
        max_tokens: query tokens of the padded batch.
        num_ctas: CTAs of the grid, one per multiprocessor.
        batch_invariant: cut each short row every `INVARIANT_SPLIT_BLOCKS` blocks, whatever else is in the
            batch, so that its output is the same bits in any batch.

    Returns:
        NumPy arrays whose shapes depend on the maxima alone; with `batch_invariant` a batch of many
        parts doubles them.
    """
    q, kv = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    group = num_heads // num_kv_heads
    tiles = _tiles(q, kv, TILE_Q if group % 2 == 0 else 2 * TILE_Q, max_tokens)
    few = (_column(tiles, "stop") - _column(tiles, "skip") <= TILE_Q // narrow_stride(group)) & (
        _column(tiles, "kv_len") > 0
    )
    wide = _wide_items(tiles[~few], num_heads, group, kv)
    wide_cta, loads = _deal(_column(wide, "end") - _column(wide, "begin") + ITEM_COST, num_ctas)
    narrow = _narrow_items(tiles[few], num_kv_heads, group)
    blocks = _column(narrow, "end")
    room = _level(loads, int(blocks.sum()))
    whole_cta = np.full(len(narrow), num_ctas)
    if not batch_invariant:
        whole_cta, room = _waves(blocks, room)
    is_whole = whole_cta < num_ctas
    whole, rest = narrow[is_whole], narrow[~is_whole]
    edges = np.concatenate([[0], np.cumsum(_column(rest, "end"))])
    if batch_invariant:
        cuts = np.concatenate(
            [np.arange(a, b, INVARIANT_SPLIT_BLOCKS) for a, b in itertools.pairwise(edges)] or [[0]]
        )
    else:
        ends = np.cumsum(room) / max(room.sum(), 1e-9) * edges[-1]
        cuts = np.concatenate([[0], np.rint(ends[:-1])]).astype(np.int64)
        near = edges[np.clip(np.searchsorted(edges, cuts + 1) - 1, 0, None)]
        cuts = np.where(cuts - near <= blocks.sum() // num_ctas // 64, near, cuts)
    bounds = np.unique(np.concatenate([edges, cuts]))
    stretch, num_parts = _cut(rest, edges, bounds)
    if batch_invariant:
        stretch_cta, _ = _deal((bounds[1:] - bounds[:-1]) * NARROW_COST + ITEM_COST, num_ctas, loads)
    else:
        stretch_cta = np.searchsorted(cuts, bounds[:-1], side="right") - 1
    parts_first = np.concatenate([stretch, whole])
    stretch_cta = np.concatenate([stretch_cta, whole_cta[is_whole]])

    # Narrow items come at another point of each CTA's work: while some wait for memory, others compute.
    count = np.bincount(wide_cta, minlength=num_ctas)
    first = np.cumsum(count) - count
    order = np.argsort(wide_cta, kind="stable")
    place = np.empty(len(wide))
    place[order] = (np.arange(len(wide)) - np.repeat(first, count)) / np.repeat(np.maximum(count, 1), count)
    cta = np.concatenate([wide_cta, stretch_cta])
    narrow_when = (np.arange(num_ctas) + 0.5) / num_ctas
    order = np.lexsort((np.arange(len(cta)), np.concatenate([place, narrow_when[stretch_cta]]), cta))
    begin = np.searchsorted(cta[order], np.arange(num_ctas + 1))
    narrow_count = np.bincount(stretch_cta, minlength=num_ctas)
    before = np.bincount(wide_cta[place <= narrow_when[wide_cta]], minlength=num_ctas)
    before = begin[:-1] + np.where(narrow_count > 0, before, count)
    runs = np.stack([begin[:-1], before, before + narrow_count, begin[1:]], axis=1)

    per_token_tile = num_heads // 2 if group % 2 == 0 else num_heads
    tile = TILE_Q if group % 2 == 0 else 2 * TILE_Q
    long_rows = min(max_rows, max_tokens // (TILE_Q // narrow_stride(group) + 1)) + 1  # padding is one more
    max_wide = (-(-max_tokens // tile) + 2 * long_rows) * per_token_tile
    max_items = max_wide + 2 * max_rows * num_kv_heads + num_ctas
    max_parts = 2 * num_ctas
    while max_parts < num_parts or max_items < len(order):
        max_parts, max_items = 2 * max_parts, 2 * max_items
    items = np.zeros((max_items, ITEM_WIDTH), np.int32)
    items[: len(order), : len(ITEM_FIELDS)] = np.concatenate([wide, parts_first])[order]
    return Schedule(
        runs=runs.astype(np.int32),
        items=items,
        arrived=np.zeros(max_parts // 2, np.int32),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_tokens=max_tokens,
        max_parts=max_parts,
    )


def _column(items: np.ndarray, name: str) -> np.ndarray:
    return items[:, ITEM_FIELDS.index(name)]


def _table(size: int, **columns: np.ndarray | int) -> np.ndarray:
    table = np.zeros((size, len(ITEM_FIELDS)), np.int64)
    for name, values in columns.items():
        table[:, ITEM_FIELDS.index(name)] = values
    return table


def _tiles(q: np.ndarray, kv: np.ndarray, tile: int, max_tokens: int) -> np.ndarray:
    """Rows cut at multiples of `tile` from the aligned token at or before their first, as items of no head.

    The padding tokens come last, as tiles before the first of no keys, which give zeros.
    """
    starts = np.append(np.cumsum(q) - q, q.sum())
    q, kv = np.append(q, max_tokens - q.sum()), np.append(kv, 0)
    base = starts // ALIGN * ALIGN
    count = np.where(q > 0, -(-(starts + q - base) // tile), 0)
    row = np.repeat(np.arange(len(q)), count)
    token = base[row] + (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * tile
    skip = np.maximum(starts[row] - token, 0)
    stop = np.minimum(starts[row] + q[row] - token, tile)
    real = kv[row] > 0
    position = np.where(real, kv[row] - q[row] + token - starts[row], -tile)
    end = np.where(real, -(-(position + stop) // BLOCK_KV), 1)
    return _table(
        len(row),
        row=np.where(real, row, 0),
        token=token,
        skip=skip,
        stop=stop,
        position=position,
        full=np.clip((position + skip + 1) // BLOCK_KV, 0, end),
        end=end,
        kv_len=kv[row],
    )


def _wide_items(tiles: np.ndarray, num_heads: int, group: int, kv: np.ndarray) -> np.ndarray:
    """Tiles under each pair of heads (each head of an odd group), by sections of keys that fit in the cache.

    The sections of the longest rows come first, and in a section the items of the most blocks.
    """
    heads = np.arange(0, num_heads, 2 if group % 2 == 0 else 1)
    items = np.repeat(tiles, len(heads), axis=0)
    head = np.tile(heads, len(tiles))
    items[:, ITEM_FIELDS.index("kind")] = WIDE
    items[:, ITEM_FIELDS.index("head")] = head
    items[:, ITEM_FIELDS.index("kv_head")] = head // group
    # Keys before those of a row and KV head, if all that wide items read lay one after the other.
    row, is_padding = _column(items, "row"), _column(items, "kv_len") == 0
    read = np.zeros(len(kv) + 1, np.int64)
    read[: len(kv)][row[~is_padding]] = kv[row[~is_padding]]
    by_length = np.argsort(-read, kind="stable")
    num_kv_heads = num_heads // group
    before = np.empty(len(read), np.int64)
    before[by_length] = np.cumsum(read[by_length]) - read[by_length]
    row = np.where(is_padding, len(kv), row)
    section = (before[row] * num_kv_heads + read[row] * _column(items, "kv_head")) // CACHED_KEYS
    return items[np.lexsort((-_column(items, "end"), section))]


def _narrow_items(tiles: np.ndarray, num_kv_heads: int, group: int) -> np.ndarray:
    """Tiles of few tokens under each KV head; they start at their first token of the row."""
    skip = _column(tiles, "skip")
    items = np.repeat(tiles, num_kv_heads, axis=0)
    items[:, ITEM_FIELDS.index("kind")] = NARROW
    for name, change in (("token", skip), ("position", skip), ("stop", -skip), ("skip", -skip)):
        items[:, ITEM_FIELDS.index(name)] += np.repeat(change, num_kv_heads)
    kv_head = np.tile(np.arange(num_kv_heads), len(tiles))
    items[:, ITEM_FIELDS.index("kv_head")] = kv_head
    items[:, ITEM_FIELDS.index("head")] = kv_head * group
    return items


def _deal(costs: np.ndarray, num_ctas: int, loads: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The CTA of each item, the next always to the one with the least work, and each CTA's work."""
    heap = [(0.0 if loads is None else float(loads[cta]), cta) for cta in range(num_ctas)]
    heapq.heapify(heap)
    chosen = np.zeros(len(costs), np.int64)
    for i, cost in enumerate(costs.tolist()):
        load, cta = heap[0]
        chosen[i] = cta
        heapq.heapreplace(heap, (load + cost, cta))
    done = np.zeros(num_ctas)
    for load, cta in heap:
        done[cta] = load
    return chosen, done


def _level(loads: np.ndarray, blocks: int) -> np.ndarray:
    """Narrow blocks that each CTA takes, of `blocks`, for all CTAs to end together."""
    ordered = np.sort(loads)
    # With the k least loaded CTAs filled to the level of the next, this many blocks are placed.
    placed = (
        np.concatenate([np.cumsum(np.diff(ordered) * np.arange(1, len(ordered))), [np.inf]]) / NARROW_COST
    )
    k = int(np.searchsorted(placed, blocks))
    level = (ordered[: k + 1].sum() + blocks * NARROW_COST) / (k + 1)
    return np.maximum(level - loads, 0) / NARROW_COST


def _waves(blocks: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole items dealt out in turn, as far as each CTA has room for them.

    Neighbours among the items are read at the same time so: the heads of a page lie side by side in memory.

    Returns:
        The CTA of each item (the number of CTAs for those left over), and the room left.
    """
    takers = np.flatnonzero(room > 0)
    waves = -(-len(blocks) // max(len(takers), 1))
    table = np.zeros(waves * len(takers), np.int64)
    table[: len(blocks)] = blocks
    table = table.reshape(waves, len(takers))
    fits = np.cumsum(table, axis=0) <= room[takers] + 0.01
    left = room.copy()
    left[takers] -= (table * fits).sum(axis=0)
    return np.where(fits, takers, len(room)).reshape(-1)[: len(blocks)], np.maximum(left, 0)


def _cut(narrow: np.ndarray, edges: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, int]:
    """Stretches of the narrow items between the bounds; the number of parts."""
    if not len(narrow):
        return narrow, 0
    item = np.searchsorted(edges, bounds[:-1], side="right") - 1
    stretch = narrow[item]
    stretch[:, ITEM_FIELDS.index("begin")] = bounds[:-1] - edges[item]
    stretch[:, ITEM_FIELDS.index("end")] = bounds[1:] - edges[item]
    full = np.clip(_column(stretch, "full"), _column(stretch, "begin"), _column(stretch, "end"))
    stretch[:, ITEM_FIELDS.index("full")] = full
    pieces = np.bincount(item, minlength=len(narrow))
    split = pieces > 1
    first = np.cumsum(pieces * split) - pieces * split
    of_split = np.flatnonzero(split[item])
    stretch[of_split, ITEM_FIELDS.index("kind")] = PARTIAL
    stretch[of_split, ITEM_FIELDS.index("part")] = np.arange(len(of_split))
    for name, values in (("first_part", first), ("parts", pieces), ("merge", np.cumsum(split) - 1)):
        stretch[of_split, ITEM_FIELDS.index(name)] = values[item[of_split]]
    return stretch, len(of_split)
