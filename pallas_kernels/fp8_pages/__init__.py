"""Pages of 8-bit keys and values, which carry their scales."""

from pallas_kernels.fp8_pages.pages import (
    HEADROOM,
    NAN,
    PAGE_DTYPE,
    SCALE_ROWS,
    check_capability,
    dequantized,
    exponents,
    is_fp8,
    page_size,
    quantized,
    scales,
)

__all__ = [
    "HEADROOM",
    "NAN",
    "PAGE_DTYPE",
    "SCALE_ROWS",
    "check_capability",
    "dequantized",
    "exponents",
    "is_fp8",
    "page_size",
    "quantized",
    "scales",
]
