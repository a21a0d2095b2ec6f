"""The Triton kernels of attention. Triton compiles its source text, so they stand in a file of their own."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.fp8_pages.triton_kernel import dequantized, scale_of

NEVER = tl.constexpr(-1e30)
"""Start of a running maximum: finite, so that a query that sees no key yet stays free of NaN."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scales(scales_of_head, page, held, side: tl.constexpr, dtype: tl.constexpr):
    """Of 8-bit pages: of the keys and of the values of each key's page, 0 for keys that aren't held."""
    place = scales_of_head + page.to(tl.int64) * (2 * side)
    k = tl.load(place, mask=held, other=0)
    v = tl.load(place + side, mask=held, other=0)
    return scale_of(k).to(dtype), scale_of(v).to(dtype)


@triton.jit
def _over_keys(
    state,
    queries,
    positions,  # of the queries
    keys_of_head,  # address of this KV head in page 0
    table,  # address of the row's page table
    begin,
    end,
    kv_end,  # keys from here on hold nothing of the row
    masked: tl.constexpr,
    num_kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    page_rows: tl.constexpr,  # of a head: its tokens; and the scale's, in 8-bit pages
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_kv: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,  # 0: none
    soft_cap: tl.constexpr,  # 0: none
    precision: tl.constexpr,
):
    """Softmax and products over keys begin .. end - 1, a block at a time, into (output, peaks, totals)."""
    acc, peak, total = state
    column = tl.arange(0, block_dim)
    side: tl.constexpr = num_kv_heads * page_rows * head_dim
    in_block = tl.arange(0, block_kv)
    first = begin + in_block
    page = tl.load(table + first // page_size, mask=first < kv_end, other=0)
    if page_rows > page_size:
        scales_of_head = keys_of_head + page_size * head_dim
        k_scale, v_scale = _scales(scales_of_head, page, first < kv_end, side, queries.dtype)
        next_page = tl.load(table + (first + block_kv) // page_size, mask=first + block_kv < kv_end, other=0)
    for start in range(begin, end, block_kv):
        key = start + in_block
        held = key < kv_end
        place = (page.to(tl.int64) * (2 * side) + (key % page_size) * head_dim)[:, None] + column[None, :]
        # A block ahead, so that loads of keys don't wait for the page table; two where scales wait for it.
        if page_rows > page_size:
            page, ahead = next_page, key + 2 * block_kv
            next_page = tl.load(table + ahead // page_size, mask=ahead < kv_end, other=0)
        else:
            page = tl.load(table + (key + block_kv) // page_size, mask=key + block_kv < kv_end, other=0)
        # Slots past the end may hold anything, NaN too: 0 x NaN is NaN, so they are never loaded.
        if masked or block_dim != head_dim:
            exists = (column < head_dim)[None, :]
            if masked:
                exists &= held[:, None]
            k = tl.load(keys_of_head + place, mask=exists, other=0.0)
            v = tl.load(keys_of_head + side + place, mask=exists, other=0.0)
        else:
            k = tl.load(keys_of_head + place)
            v = tl.load(keys_of_head + side + place)
        if page_rows > page_size:
            k, v = dequantized(k, k_scale), dequantized(v, v_scale)
            k_scale, v_scale = _scales(scales_of_head, page, key + block_kv < kv_end, side, queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision=precision)
        if soft_cap > 0:
            raised = tl.exp2(scores * (2 * LOG2E * scale / soft_cap))
            scores = (1 - 2 / (raised + 1)) * (soft_cap * LOG2E)
            factor: tl.constexpr = 1.0
        else:
            factor: tl.constexpr = scale * LOG2E
        if masked:
            distance = positions[:, None] - key[None, :]
            seen = (distance >= 0) & held[None, :]
            if window > 0:
                seen &= distance < window
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=precision)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _attend(
    queries,
    positions,
    keys_of_head,
    table,
    begin,
    full,  # keys from here on need a mask
    end,
    num_kv_heads: tl.constexpr,
    page_size: tl.constexpr,
    page_rows: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_kv: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,
    soft_cap: tl.constexpr,
    precision: tl.constexpr,
):
    """Attention over keys begin .. end - 1: the output, and the peak and total of its weights."""
    lines: tl.constexpr = queries.shape[0]
    state = (
        tl.zeros((lines, block_dim), tl.float32),
        tl.full((lines,), NEVER, tl.float32),
        tl.zeros((lines,), tl.float32),
    )
    for masked in tl.static_range(0, 2):
        state = _over_keys(
            state,
            queries,
            positions,
            keys_of_head,
            table,
            full if masked else begin,
            end if masked else full,
            end,
            masked,
            num_kv_heads,
            page_size,
            page_rows,
            head_dim,
            block_dim,
            block_kv,
            scale,
            window,
            soft_cap,
            precision,
        )
    acc, peak, total = state
    return acc / tl.where(total == 0, 1.0, total)[:, None], peak, total


@triton.jit
def wide_kernel(
    q,
    kv,
    cu_q_lens,
    kv_lens,
    page_table,
    tile_rows,
    tile_starts,
    max_rows,
    max_pages,
    num_tokens,
    out,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_rows: tl.constexpr,
    block_q: tl.constexpr,
    tile_heads: tl.constexpr,  # query heads of a tile, all of one group
    head_chunks: tl.constexpr,  # tiles that make up a group
    lines: tl.constexpr,  # power of two that holds block_q * tile_heads
    block_dim: tl.constexpr,
    block_kv: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,
    soft_cap: tl.constexpr,
    precision: tl.constexpr,
):
    """A tile of a row of more than one token: some tokens, some heads of a group. Padding gives zeros."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // head_chunks
    chunk = tl.program_id(1) % head_chunks
    group: tl.constexpr = num_heads // num_kv_heads
    row = tl.load(tile_rows + tile)
    start = tl.load(tile_starts + tile)
    is_padding = row >= max_rows
    row = tl.minimum(row, max_rows - 1)
    first = tl.load(cu_q_lens + row)
    end = tl.load(cu_q_lens + row + 1)
    kv_len = tl.load(kv_lens + row)
    if is_padding:  # the tokens past the last row, from `start` on
        first = tl.load(cu_q_lens + max_rows)
        end = num_tokens
        kv_len = 0
    q_len = end - first
    if is_padding | (q_len > 1):
        line = tl.arange(0, lines)
        column = tl.arange(0, block_dim)
        token = start + line // tile_heads
        head = chunk * tile_heads + line % tile_heads
        real = (line < block_q * tile_heads) & (token < q_len) & (head < group)
        place = ((first + token).to(tl.int64) * num_heads + kv_head * group + head) * head_dim
        places = place[:, None] + column[None, :]
        exists = real[:, None] & (column < head_dim)[None, :]
        queries = tl.load(q + places, mask=exists, other=0.0)
        positions = kv_len - q_len + token
        first_position = kv_len - q_len + start
        kv_end = tl.maximum(tl.minimum(first_position + block_q, kv_len), 0)  # 0 for padding
        begin = 0
        full = tl.maximum(first_position + 1, 0) // block_kv * block_kv
        if window > 0:
            begin = tl.maximum(first_position - window + 1, 0) // block_kv * block_kv
            full = begin
        keys_of_head = kv + kv_head * (page_rows * head_dim)
        table = page_table + row.to(tl.int64) * max_pages
        result, _, _ = _attend(
            queries,
            positions,
            keys_of_head,
            table,
            begin,
            full,
            kv_end,
            num_kv_heads,
            page_size,
            page_rows,
            head_dim,
            block_dim,
            block_kv,
            scale,
            window,
            soft_cap,
            precision,
        )
        tl.store(out + places, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def narrow_kernel(
    q,
    kv,
    cu_q_lens,
    kv_lens,
    page_table,
    out_in,  # the same memory as `out`
    max_pages,
    num_tokens,
    out,
    part_out,
    part_lse,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_rows: tl.constexpr,
    decode_only: tl.constexpr,  # row i is token i, and token i is padding where there is no row i
    splits: tl.constexpr,
    lines: tl.constexpr,  # power of two that holds a group
    block_dim: tl.constexpr,
    block_kv: tl.constexpr,
    least_blocks: tl.constexpr,  # of a split
    scale: tl.constexpr,
    window: tl.constexpr,
    soft_cap: tl.constexpr,
    precision: tl.constexpr,
):
    """The group of heads of a row of one token, over one stretch of its keys."""
    row = tl.program_id(2)
    kv_head = tl.program_id(1)
    split = tl.program_id(0)
    group: tl.constexpr = num_heads // num_kv_heads
    first = tl.load(cu_q_lens + row)
    q_len = tl.load(cu_q_lens + row + 1) - first
    kv_len = tl.load(kv_lens + row)
    token = first
    if decode_only:
        token = row
    if (q_len == 1) | (decode_only & (token < num_tokens)):
        kv_len = tl.where(q_len == 1, kv_len, 0)
        line = tl.arange(0, lines)
        column = tl.arange(0, block_dim)
        place = (token.to(tl.int64) * num_heads + kv_head * group + line) * head_dim
        places = place[:, None] + column[None, :]
        exists = (line < group)[:, None] & (column < head_dim)[None, :]
        queries = tl.load(q + places, mask=exists, other=0.0)
        begin = 0
        if window > 0:
            begin = tl.maximum(kv_len - window, 0) // block_kv
        blocks = tl.cdiv(kv_len, block_kv) - begin
        each = tl.maximum(tl.cdiv(blocks, splits), least_blocks)
        begin = (begin + split * each) * block_kv
        end = tl.minimum(begin + each * block_kv, kv_len)
        full = tl.maximum(end // block_kv * block_kv, begin)
        if window > 0:
            full = begin
        keys_of_head = kv + kv_head * (page_rows * head_dim)
        table = page_table + row.to(tl.int64) * max_pages
        positions = tl.full((lines,), 0, tl.int32) + kv_len - 1
        result, peak, total = _attend(
            queries,
            positions,
            keys_of_head,
            table,
            begin,
            full,
            end,
            num_kv_heads,
            page_size,
            page_rows,
            head_dim,
            block_dim,
            block_kv,
            scale,
            window,
            soft_cap,
            precision,
        )
        if splits == 1:
            tl.store(out + places, result.to(out.dtype.element_ty), mask=exists)
        else:
            part = (row.to(tl.int64) * num_heads + kv_head * group + line) * splits + split
            tl.store(part_out + (part * head_dim)[:, None] + column[None, :], result, mask=exists)
            lse = tl.where(total == 0, NEVER, peak + tl.log2(total))
            tl.store(part_lse + part, lse, mask=line < group)


@triton.jit
def merge_kernel(
    part_out,
    part_lse,
    cu_q_lens,
    out_in,  # the same memory as `out`
    num_tokens,
    out,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    decode_only: tl.constexpr,
    splits: tl.constexpr,
    block_splits: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Joins the stretches of one head of a row of one token, each weighted by its share of the total."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(cu_q_lens + row)
    is_narrow = tl.load(cu_q_lens + row + 1) - token == 1
    if decode_only:
        token = row
        is_narrow = token < num_tokens
    if is_narrow:
        split = tl.arange(0, block_splits)
        column = tl.arange(0, block_dim)
        line = row.to(tl.int64) * num_heads + head
        lse = tl.load(part_lse + line * splits + split, mask=split < splits, other=NEVER)
        weights = tl.exp2(lse - tl.max(lse, 0))
        places = (line * splits + split)[:, None] * head_dim + column[None, :]
        exists = (split < splits)[:, None] & (column < head_dim)[None, :]
        parts = tl.load(part_out + places, mask=exists, other=0.0)
        result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        place = (token.to(tl.int64) * num_heads + head) * head_dim
        tl.store(out + place + column, result.to(out.dtype.element_ty), mask=column < head_dim)
