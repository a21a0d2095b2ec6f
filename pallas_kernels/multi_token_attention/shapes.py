"""Named shapes: the same for compilation tests and benchmarks."""

from dataclasses import dataclass

PAGE_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One batch: rows of (query tokens, tokens attended to), and the heads of one layer."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    page_size: int = PAGE_SIZE
    shared_pages: bool = False
    """Rows 2i and 2i + 1 are parts of one request: the first row's pages begin the second's."""

    @property
    def num_tokens(self) -> int:
        return sum(q for q, _ in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the rows attend to, at two bytes a number."""
        return sum(kv for _, kv in self.rows) * self.num_kv_heads * self.head_dim * 4

    @property
    def flops(self) -> int:
        """Operations of the two products over the pairs of query and key that the causal mask leaves."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in self.rows)
        return 4 * pairs * self.num_heads * self.head_dim


def _decode(batch: int, context: int, num_heads: int, num_kv_heads: int, head_dim: int = 128) -> Shape:
    return _extend(batch, 1, context - 1, num_heads, num_kv_heads, head_dim)


def _extend(batch: int, new: int, past: int, num_heads: int, num_kv_heads: int, head_dim: int = 128) -> Shape:
    return Shape(
        rows=((new, past + new),) * batch, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


DECODE = {
    "decode_64x4096_h32kv8": _decode(64, 4096, 32, 8),
    "decode_64x4096_h40kv10": _decode(64, 4096, 40, 10),
    "decode_64x4096_h40kv40": _decode(64, 4096, 40, 40),
    "decode_8x32768_h40kv10": _decode(8, 32768, 40, 10),
    "decode_1x131072_h40kv10": _decode(1, 131072, 40, 10),
    "decode_16x1024_h40kv10": _decode(16, 1024, 40, 10),
    "decode_64x1024_h40kv10": _decode(64, 1024, 40, 10),
    "decode_128x1024_h40kv10": _decode(128, 1024, 40, 10),
    "decode_64x1024_h32kv32_d80": _decode(64, 1024, 32, 32, 80),
    "decode_64x1024_h16kv8_d256": _decode(64, 1024, 16, 8, 256),
}
PREFILL = {
    "prefill_4x4096_h32kv8": _extend(4, 4096, 0, 32, 8),
    "prefill_1x8192_h40kv10": _extend(1, 8192, 0, 40, 10),
    "prefill_1x16384_h40kv10": _extend(1, 16384, 0, 40, 10),
    "prefill_16x1024_h40kv10": _extend(16, 1024, 0, 40, 10),
    "prefill_4x1024_h32kv32_d80": _extend(4, 1024, 0, 32, 32, 80),
    "prefill_4x1024_h32kv32_d96": _extend(4, 1024, 0, 32, 32, 96),
    "prefill_4x1024_h16kv8_d256": _extend(4, 1024, 0, 16, 8, 256),
    "history_8x256_over_8192_h40kv10": _extend(8, 256, 8192, 40, 10),
}
MIXED = {
    "mixed_60x2048_4x512_over_4096_h40kv10": Shape(
        rows=((1, 2048),) * 60 + ((512, 4608),) * 4, num_heads=40, num_kv_heads=10
    ),
    "gap_512_3000_200": Shape(
        rows=((512, 512), (200, 3712)) * 16, num_heads=40, num_kv_heads=10, shared_pages=True
    ),
}
PAPER = {
    f"paper_32x8_over_{past}_h{heads}kv{kv_heads}": _extend(32, 8, past - 8, heads, kv_heads)
    for heads, kv_heads in ((40, 40), (40, 10))
    for past in (512, 1024, 2048, 4096)
}
"""After the paper's figure 12: a batch of 32 requests, each with a few new tokens over its own context."""
SHAPES = DECODE | PREFILL | MIXED
"""Name -> shape. The heads are those of Llama-3-8B (32, 8), Llama-2-13B with 10 KV heads (40, 10), OPT-13B
(40, 40), OPT-2.7B (32 of 80), Phi-3-mini (32 of 96) and Gemma-2-9B (16, 8, of 256)."""
