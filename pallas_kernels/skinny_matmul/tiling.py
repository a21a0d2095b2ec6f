"""How a product is cut: tiles of output features, and stretches of the contracted axis. Pure Python."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pallas_kernels.mosaic_support import NUM_SMS

CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""Ways in which CTAs work together: (that split a tile, that share activations)."""
ROWS = 64
"""Tokens of a consumer warpgroup: the rows of one Hopper matrix instruction."""
MAX_TOKENS = 2 * ROWS
BLOCK_K = 64
"""Elements of the contracted axis in a slot of the ring: one line of 128 bytes of the swizzled layout."""
ALIGN = 8
"""Features of a tile are a multiple of it, and tokens as well."""
MAX_TILE = 256
"""Features of a tile at most: the columns of one matrix instruction, 128 accumulator registers a thread."""
CHUNK = 64
"""Output features that are stored at once, at most."""
SHARED_BYTES = 212 * 1024
"""Shared memory of a CTA. The rest of a multiprocessor's 228 KB is left to the small kernel before this one,
so that both are there at once."""
MAX_SLOTS = 12
MIN_SLOTS = 3
MEMORY_BYTES_PER_S = 4.28e12
"""What an H200 reads from its memory: the rate of a copy."""
CTA_BYTES_PER_S = 43e9
"""What one multiprocessor draws of it at most, about."""
CACHE_BYTES_PER_S = 16e12
"""At what rate all multiprocessors read activations again and again, about; weights don't flow meanwhile."""
STEP_S = {1: 0.175e-6, 2: 0.6e-6}
"""What a slot of the ring takes at least, about, by how many CTAs share activations: each waits for all."""
EXCHANGE_S = 0.06e-6
"""What exchanging sums takes for each column that a CTA keeps, about."""
FIXED_S = 1e-6
"""What a launch takes beside, about, while the next one's weights are on their way; and as much again where
CTAs share activations, since the first slot waits for all of them, too."""
LIBRARY_BYTES_PER_S = 2.9e12
"""At what rate one of XLA's products of 64 to 128 tokens reads weights, about: where the kernel wouldn't be
faster, they stay. With fewer tokens XLA's are faster, but not faster than the kernel."""
LIBRARY_FIXED_S = 4e-6
"""What one of them takes beside, about: its weights wait for the kernel before it."""


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
    """

    features: int
    splits: int
    num_slots: int
    num_tiles: int
    consumers: int
    chunk: int
    shares: int = 1


def plan_tiling(
    *, tokens: int, sizes: Sequence[int], contracted: int, together: int, out_bytes: int, adds: bool
) -> Tiling | None:
    """The tiling that should take the least time, or None where none fits or would be faster than XLA.

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
    ]
    if not found:
        return None
    seconds, tiling = min(found, key=lambda pair: pair[0])
    library_s = 2 * sum(sizes) * contracted / LIBRARY_BYTES_PER_S + len(sizes) * LIBRARY_FIXED_S
    return tiling if seconds < library_s else None


def candidates(
    *, tokens: int, sizes: Sequence[int], contracted: int, together: int, out_bytes: int, adds: bool
) -> Iterator[Tiling]:
    """All tilings that divide evenly and fit, all CTAs at once; the arguments are `plan_tiling`'s."""
    consumers = -(-tokens // ROWS)
    common = math.gcd(*sizes)
    for splits, shares in CLUSTERS:
        if contracted % (splits * BLOCK_K) or tokens % (shares * ALIGN):
            continue
        for features in range(ALIGN * splits, MAX_TILE // together + 1, ALIGN * splits):
            num_tiles = sum(sizes) // features // together
            if common % features or num_tiles * splits > NUM_SMS or num_tiles % shares:
                continue
            own = features // splits
            chunk = own if adds else max(c for c in range(ALIGN, CHUNK + 1, ALIGN) if own % c == 0)
            fixed = consumers * ROWS * (chunk * out_bytes + (splits - 1) * own * together * 4)
            slot = (features * together + consumers * ROWS) * BLOCK_K * 2
            steps = contracted // splits // BLOCK_K
            num_slots = min(MAX_SLOTS, steps, (SHARED_BYTES - fixed) // slot)
            if num_slots >= MIN_SLOTS:
                yield Tiling(
                    features=features,
                    splits=splits,
                    num_slots=num_slots,
                    num_tiles=num_tiles,
                    consumers=consumers,
                    chunk=chunk,
                    shares=shares,
                )


def _seconds(tokens: int, contracted: int, together: int, tiling: Tiling) -> float:
    """An estimate: bytes at their rates, or the ring's slots one after the other, whichever is slower."""
    num_ctas, stretch = tiling.num_tiles * tiling.splits, contracted // tiling.splits
    columns = tiling.features * together
    weights_s = 2 * num_ctas * columns * stretch / min(MEMORY_BYTES_PER_S, num_ctas * CTA_BYTES_PER_S)
    activations_s = 2 * num_ctas * tokens * stretch / tiling.shares / CACHE_BYTES_PER_S
    steps_s = stretch // BLOCK_K * STEP_S[tiling.shares]
    exchange_s = EXCHANGE_S * columns / 2 if tiling.splits > 1 else 0.0
    return max(weights_s + activations_s, steps_s) + exchange_s + FIXED_S * tiling.shares
