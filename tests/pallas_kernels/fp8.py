"""8-bit pages in NumPy, for comparison; see `pallas_kernels.fp8_pages`."""

import ml_dtypes
import numpy as np

NAN, FIRST_BINADE = 0x7F, 2


def exponents(first):
    """u8[...] of first tokens [..., head_dim]; 255 where they are no numbers."""
    with np.errstate(invalid="ignore", divide="ignore"):
        exponent = np.floor(np.log2(np.abs(first.astype(np.float32)).max(-1))) - FIRST_BINADE
    return np.where(np.isnan(exponent), 255, np.maximum(exponent + 127, 123)).astype(np.uint8)


def quantized(x, exponent):
    """u8[..., head_dim] of numbers and their pages' exponents."""
    scale = 2.0 ** (exponent.astype(np.float64)[..., None] - 127)
    scaled = np.clip(x.astype(np.float64) / scale, -448, 448)
    bits = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(scaled), NAN, bits)


def pool_of(plain):
    """8-bit pages of plain ones [num_pages, 2, kv_heads, page_size, head_dim]. What is no number there isn't
    one here, and what is never read of the scale's row isn't, either."""
    exponent = exponents(plain[..., 0, :])
    pool = np.full((*plain.shape[:3], plain.shape[3] + 1, plain.shape[4]), 0xFF, np.uint8)
    pool[..., :-1, :] = quantized(plain, exponent[..., None])
    pool[..., -1, 0] = exponent
    return pool


def plain_of(pool):
    """f32: the numbers that 8-bit pages hold."""
    with np.errstate(over="ignore", invalid="ignore"):  # what nobody reads may be anything
        scale = np.exp2(pool[..., -1:, :1].astype(np.float32) - 127)
        return pool[..., :-1, :].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def written(pool, k, v, pages, slots):
    """The pool after tokens [num_tokens, kv_heads, head_dim], one after the other."""
    pool = pool.copy()
    for page, slot, kv in zip(pages, slots, np.stack([k, v], axis=1), strict=True):
        if page < len(pool):
            if slot == 0:
                pool[page, :, :, -1, 0] = exponents(kv)
            pool[page, :, :, slot] = quantized(kv, pool[page, :, :, -1, 0])
    return pool
