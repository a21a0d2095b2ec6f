"""The same inside Triton kernels. Triton compiles its source text, so it stands in a file of its own."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels.fp8_pages import pages

LARGEST = tl.constexpr(pages.LARGEST)
BIAS = tl.constexpr(pages.BIAS)
FIRST_BINADE = tl.constexpr(pages.FIRST_BINADE)
LEAST_EXPONENT = tl.constexpr(pages.LEAST_EXPONENT)
NAN = tl.constexpr(pages.NAN)


@triton.jit
def exponent_of(largest):
    """i32: see `pages.exponents`; `largest` is f32, the largest magnitude of the first token's head."""
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - FIRST_BINADE, LEAST_EXPONENT)


@triton.jit
def scale_of(exponent):
    """f32 of an exponent of any integer type."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantized(x, exponent):
    """u8[rows, columns] of x [rows, columns] and i32[rows]: see `pages.quantized`."""
    x = x.to(tl.float32)
    scaled = x * scale_of(-(exponent - 2 * BIAS))[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), bits, NAN)


@triton.jit
def dequantized(bits, scale):
    """[rows, columns] of u8[rows, columns] and the rows' scales, in the scales' dtype."""
    return bits.to(tl.float8e4nv, bitcast=True).to(scale.dtype) * scale[:, None]
