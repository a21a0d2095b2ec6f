"""The Triton kernel. Triton compiles its source text, so it stands in a file of its own."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.fp8_pages.triton_kernel import exponent_of, quantized


@triton.jit
def _load(source, row, column, in_row, width: tl.constexpr):
    return tl.load(source + row[:, None] * width + column[None, :], mask=in_row, other=0.0)


@triton.jit
def _normalised(x, scale, norm, column, in_half):
    """Rounded before the scale and after it, as the XLA path does."""
    weight = tl.load(norm + column, mask=in_half, other=0.0)
    return (
        ((x * scale[:, None]).to(weight.dtype).to(tl.float32) * weight[None, :].to(tl.float32))
        .to(weight.dtype)
        .to(tl.float32)
    )


@triton.jit
def _head(
    source,
    row,  # of `source`
    token,
    real,
    rotated,
    norm,
    cos,
    sin,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
    epsilon: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    """Heads as they are kept, in three parts: the halves of the rotated pairs, and the rest."""
    left = tl.arange(0, block_half)
    in_half = left < half
    mask = real[:, None] & in_half[None, :]
    x1 = _load(source, row, left, mask, head_dim)
    x2 = _load(source, row, left + half, mask, head_dim)
    x3 = x1
    if block_rest > 0:
        rest = 2 * half + tl.arange(0, block_rest)
        in_rest = rest < head_dim
        x3 = _load(source, row, rest, real[:, None] & in_rest[None, :], head_dim)
    dtype = x1.dtype
    if rotated:
        y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
        if has_norm:
            total = tl.sum(y1 * y1, 1) + tl.sum(y2 * y2, 1)
            if block_rest > 0:
                y3 = x3.to(tl.float32)
                total += tl.sum(y3 * y3, 1)
            scale = tl.rsqrt(total / head_dim + epsilon)
            y1 = _normalised(y1, scale, norm, left, in_half)
            y2 = _normalised(y2, scale, norm, left + half, in_half)
            if block_rest > 0:
                x3 = _normalised(y3, scale, norm, rest, in_rest).to(dtype)
        c = _load(cos, token, left, mask, half)
        s = _load(sin, token, left, mask, half)
        x1 = (y1 * c - y2 * s).to(dtype)
        x2 = (y2 * c + y1 * s).to(dtype)
    return x1, x2, x3


@triton.jit
def _largest(x1, x2, x3, block_rest: tl.constexpr):
    """f32: of each head's magnitudes."""
    largest = tl.maximum(tl.max(tl.abs(x1.to(tl.float32)), 1), tl.max(tl.abs(x2.to(tl.float32)), 1))
    if block_rest > 0:
        largest = tl.maximum(largest, tl.max(tl.abs(x3.to(tl.float32)), 1))
    return largest


@triton.jit
def _store(
    out,  # where each head goes
    x1,
    x2,
    x3,
    keep,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
):
    left = tl.arange(0, block_half)
    mask = keep[:, None] & (left < half)[None, :]
    tl.store(out[:, None] + left[None, :], x1, mask=mask)
    tl.store(out[:, None] + (left + half)[None, :], x2, mask=mask)
    if block_rest > 0:
        rest = 2 * half + tl.arange(0, block_rest)
        tl.store(out[:, None] + rest[None, :], x3, mask=keep[:, None] & (rest < head_dim)[None, :])


@triton.jit
def rotate_and_write_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_norm,
    k_norm,
    pages,
    slots,
    pool_in,  # the same memory as `pool`
    num_tokens,
    num_pages,
    q_out,
    pool,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,  # rotated pairs
    page_size: tl.constexpr,
    page_rows: tl.constexpr,  # of a head: its tokens; and the scale's, in 8-bit pages
    fused: tl.constexpr,  # `q` holds the keys and values too, and `k` and `v` are the same array
    has_norm: tl.constexpr,
    epsilon: tl.constexpr,
    block_half: tl.constexpr,  # powers of two that hold `half` and the rest of a head
    block_rest: tl.constexpr,
    rows: tl.constexpr,
):
    """A program takes `rows` heads: of queries, of keys or of values, in the order of the grid."""
    program = tl.program_id(0)
    q_programs = tl.cdiv(num_tokens * num_heads, rows)
    kv_programs = tl.cdiv(num_tokens * num_kv_heads, rows)
    is_q = program < q_programs
    is_v = program >= q_programs + kv_programs
    first = tl.where(is_q, program, tl.where(is_v, program - q_programs - kv_programs, program - q_programs))
    line = first.to(tl.int64) * rows + tl.arange(0, rows)
    heads = tl.where(is_q, num_heads, num_kv_heads)
    token = line // heads
    head = line - token * heads
    real = token < num_tokens
    # Where the head comes from.
    if fused:
        before = tl.where(is_q, 0, tl.where(is_v, num_heads + num_kv_heads, num_heads))
        source = q
        row = token * (num_heads + 2 * num_kv_heads) + before + head
    else:
        source = q
        if is_v:
            source = v
        elif not is_q:
            source = k
        row = line
    norm = k_norm
    if is_q:
        norm = q_norm
    x1, x2, x3 = _head(
        source,
        row,
        token,
        real,
        not is_v,
        norm,
        cos,
        sin,
        head_dim,
        half,
        has_norm,
        epsilon,
        block_half,
        block_rest,
    )

    # Where it goes.
    if is_q:
        _store(q_out + line * head_dim, x1, x2, x3, real, head_dim, half, block_half, block_rest)
    else:
        page = tl.load(pages + token, mask=real, other=num_pages).to(tl.int64)
        slot = tl.load(slots + token, mask=real, other=0)
        keep = real & (page >= 0) & (page < num_pages)
        side = tl.where(is_v, num_kv_heads, 0)
        page_start = pool + (page * 2 * num_kv_heads + side + head) * (page_rows * head_dim)
        if page_rows > page_size:
            # The token that begins the page stands `slot` tokens before, if this batch brings it.
            begin = token - slot
            brought = keep & (begin >= 0)
            brought &= tl.load(slots + begin, mask=brought, other=1) == 0
            brought &= tl.load(pages + begin, mask=brought, other=num_pages) == page
            apart: tl.constexpr = num_heads + 2 * num_kv_heads if fused else num_kv_heads
            first1, first2, first3 = _head(
                source,
                row - slot * apart,
                begin,
                brought,
                not is_v,
                norm,
                cos,
                sin,
                head_dim,
                half,
                has_norm,
                epsilon,
                block_half,
                block_rest,
            )
            scale_at = page_start + page_size * head_dim
            held = tl.load(scale_at, mask=keep & ~brought, other=0).to(tl.int32)
            exponent = tl.where(brought, exponent_of(_largest(first1, first2, first3, block_rest)), held)
            tl.store(scale_at, exponent.to(tl.uint8), mask=keep & (slot == 0))
            _store(
                page_start + slot * head_dim,
                quantized(x1, exponent),
                quantized(x2, exponent),
                quantized(x3, exponent),
                keep,
                head_dim,
                half,
                block_half,
                block_rest,
            )
        else:
            _store(page_start + slot * head_dim, x1, x2, x3, keep, head_dim, half, block_half, block_rest)
