"""How a product is cut: tiles of output features, and stretches of the contracted axis. Pure Python."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pallas_kernels.mosaic_support import NUM_SMS

CLUSTERED_SMS = {1: NUM_SMS, 2: NUM_SMS, 4: 120}
"""CTAs in clusters of each size that surely run at once: a cluster lies in one of the chip's eight parts,
which have 14 to 18 multiprocessors each. One that has to wait would double the time."""
CLUSTERS = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))
"""Ways in which CTAs work together: (that split a tile, that share activations)."""
ROWS = 64
"""Tokens of a consumer warpgroup: the rows of one Hopper matrix instruction."""
MAX_TOKENS = 2 * ROWS
BLOCKS_K = (64, 256)
"""Elements of the contracted axis in a slot of the ring: one or several lines of 128 bytes of the swizzled
layout, each a run of bytes of one feature."""
ALIGN = 8
"""Features of a tile are a multiple of it, and tokens as well."""
MAX_TILE = 256
"""Features of a tile at most: the columns of one matrix instruction, 128 accumulator registers a thread."""
CHUNK = 64
"""Output features that are stored at once, at most."""
SHARED_BYTES = {1: 212 * 1024, 2: 108 * 1024}
"""Shared memory of a CTA, by how many a multiprocessor holds. The rest of its 228 KB is left to the small
kernel before this one, so that all are there at once."""
MAX_SLOTS = 12
MIN_SLOTS = 3
MEMORY_BYTES_PER_S = 4.28e12
"""What an H200 reads from its memory: the rate of a copy."""
CACHE_BYTES_PER_S = 7.5e12
"""What all multiprocessors get through the L2 cache, about: weights, and activations again and again."""
CTA_BYTES_PER_S = 66e9
"""What one multiprocessor gets, about."""
FIXED_S = 3e-6
"""What a launch takes beside, about: its beginning and its end."""
EXCHANGE_S = 4e-6
"""What meeting in a cluster costs for each CTA but one, about."""
LIBRARY_BYTES_PER_S = 2.8e12
"""At what rate one of XLA's products of few rows reads weights, about: where the kernel wouldn't be faster,
they stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How one product is cut.

    Attributes:
        features: output features of a tile.
        splits: CTAs (one cluster) that split a tile, each with a stretch of the contracted axis.
        num_slots: slots of the ring.
        num_tiles: tiles of all matrices.
        consumers: warpgroups that compute, each for 64 tokens.
        chunk: output features that are stored at once.
        shares: CTAs (one cluster) that share activations, each with a tile of its own.
        ctas_per_sm: CTAs that a multiprocessor has room for: with two, the next product's weights stream in
            while this one ends, or it has more and smaller tiles.
        block_k: elements of the contracted axis in a slot of the ring.
    """

    features: int
    splits: int
    num_slots: int
    num_tiles: int
    consumers: int
    chunk: int
    shares: int = 1
    ctas_per_sm: int = 1
    block_k: int = BLOCKS_K[0]


def plan_tiling(
    *, tokens: int, sizes: Sequence[int], contracted: int, together: int, out_bytes: int, adds: bool
) -> Tiling | None:
    """The tiling that should take the least time, or None where none fits or would be faster than XLA.

    Clusters that share activations, and those that split tiles for more than `ROWS` tokens, are not chosen:
    no run on a GPU has shown them right. Nor are two CTAs on a multiprocessor and
    long slots, which nobody has timed.

    Args:
        tokens: rows of the product, a multiple of 8, at most `MAX_TOKENS`.
        sizes: output features of each matrix.
        contracted: length of the contracted axis.
        together: matrices of which a CTA has the same tile at once (gate and up).
        out_bytes: of an output element.
        adds: whether something is added to the product, which waits where the output will be staged.
    """
    found = [
        (_seconds(tokens, contracted, together, tiling), tiling)
        for tiling in candidates(
            tokens=tokens,
            sizes=sizes,
            contracted=contracted,
            together=together,
            out_bytes=out_bytes,
            adds=adds,
        )
        if tiling.num_tiles * tiling.splits <= CLUSTERED_SMS[tiling.splits * tiling.shares]
        and tiling.shares == tiling.ctas_per_sm == 1
        and tiling.block_k == BLOCKS_K[0]
        and (tiling.splits == 1 or tiling.consumers == 1)
    ]
    if not found:
        return None
    seconds, tiling = min(found, key=lambda pair: pair[0])
    library_s = 2 * sum(sizes) * contracted / LIBRARY_BYTES_PER_S + len(sizes) * FIXED_S
    return tiling if seconds < library_s else None


def candidates(
    *, tokens: int, sizes: Sequence[int], contracted: int, together: int, out_bytes: int, adds: bool
) -> Iterator[Tiling]:
    """All tilings that divide evenly and fit, all CTAs at once; the arguments are `plan_tiling`'s."""
    consumers = -(-tokens // ROWS)
    common = math.gcd(*sizes)
    ways = itertools.product(CLUSTERS, SHARED_BYTES, BLOCKS_K)
    for (splits, shares), ctas_per_sm, block_k in ways:
        if contracted % (splits * block_k) or tokens % (shares * ALIGN):
            continue
        if ctas_per_sm > 1 and consumers > 1:  # a multiprocessor's registers don't suffice
            continue
        for features in range(ALIGN * splits, MAX_TILE // together + 1, ALIGN * splits):
            num_tiles = sum(sizes) // features // together
            if common % features or num_tiles * splits > NUM_SMS * ctas_per_sm or num_tiles % shares:
                continue
            own = features // splits
            chunk = own if adds else max(c for c in range(ALIGN, CHUNK + 1, ALIGN) if own % c == 0)
            fixed = consumers * ROWS * (chunk * out_bytes + (splits - 1) * own * together * 4)
            slot = (features * together + consumers * ROWS) * block_k * 2
            steps = contracted // splits // block_k
            num_slots = min(MAX_SLOTS, steps, (SHARED_BYTES[ctas_per_sm] - fixed) // slot)
            if num_slots >= MIN_SLOTS:
                yield Tiling(
                    features=features,
                    splits=splits,
                    num_slots=num_slots,
                    num_tiles=num_tiles,
                    consumers=consumers,
                    chunk=chunk,
                    shares=shares,
                    ctas_per_sm=ctas_per_sm,
                    block_k=block_k,
                )


def _seconds(tokens: int, contracted: int, together: int, tiling: Tiling) -> float:
    """An estimate: memory, cache or a multiprocessor's own share of it, whichever is slowest."""
    num_ctas = tiling.num_tiles * tiling.splits
    weights = 2 * tiling.features * together * contracted // tiling.splits
    activations = 2 * tokens * contracted // tiling.splits
    from_cache = weights + activations // tiling.shares
    cta_s = (weights + activations) / CTA_BYTES_PER_S
    cache_s = num_ctas * from_cache / CACHE_BYTES_PER_S
    memory_s = num_ctas * weights / MEMORY_BYTES_PER_S
    return max(cta_s, cache_s, memory_s) + FIXED_S + EXCHANGE_S * (tiling.splits - 1)
