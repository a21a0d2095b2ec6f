"""Sizes and thresholds of the cache."""

from dataclasses import dataclass

CHUNK_TOKENS = 32
"""Tokens of one chunk, hence of one page (paper, section 4.3.1)."""
SWAP_OUT_BELOW = 0.25
"""Share of free device pages under which chunks are copied to the host ahead of time (paper 4.3.2)."""
RUNNING_RESERVE = 0.10
"""Share of device pages kept for requests that already run (paper 4.3.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFaults:
    """How often copies between the tiers are made to go wrong (`host_cache.transfer.FaultyMover`).

    Raises:
        ValueError: a share is out of range.
    """

    seed: int = 0
    """Draws what happens to which copy."""
    fail: float = 0.1
    """Share of copies that fail, in either direction. At most 0.9, so that something succeeds."""
    delay: float = 0.3
    """Share of copies that come late: those to the host by some steps."""
    reorder: float = 0.5
    """Share of steps in which copies to the host end in another order than they began."""

    def __post_init__(self) -> None:
        for name, most in (("fail", 0.9), ("delay", 1), ("reorder", 1)):
            share = getattr(self, name)
            if not 0 <= share <= most:
                raise ValueError(f"{name}: got {share!r}, expected a share in [0, {most}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes of the tiers and when chunks move.

    Raises:
        ValueError: a size or share is out of range.
    """

    device_pages: int
    """Pages of the device tier, each of `page_tokens` tokens. At least 1."""
    host_pages: int = 0
    """Pages of the host tier; 0 leaves the device tier alone (the paper's GPU-cache variant)."""
    page_tokens: int = CHUNK_TOKENS
    """Tokens of one page, hence of one chunk."""
    swap_out_below: float = SWAP_OUT_BELOW
    """Copy chunks to the host while less than this share of device pages is free or reclaimable."""
    running_reserve: float = RUNNING_RESERVE
    """Share of device pages that an admission leaves to the requests that already run."""
    max_swap_outs_per_step: int = 64
    """Most chunks copied ahead of time in one step; bounds the staging memory."""
    share_prefixes: bool = True
    """Let conversations that begin alike share chunks, found by their content."""
    load_s_per_page: float | None = None
    """Time to move one page between the tiers. If given, a chunk that is cheaper to recompute than that is
    neither copied to the host nor loaded from it, and no step waits for copies to the host
    (`max_swap_outs_under_way`). None: the paper's way, always copy and load."""
    max_swap_outs_under_way: int = 128
    """With `load_s_per_page`: while so many copies to the host have not ended, chunks that have to leave the
    device are dropped. More would fill the worker's staging memory and hold up a step, which is sure to cost
    time, for a chunk that perhaps nobody asks for again."""
    identity: bytes = b""
    """Distinguishes models, weights and dtypes in the keys of shared chunks."""
    keep_finished: bool = True
    """Keep the pages of finished turns. False makes the server stateless, for comparison."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        check(self.device_pages >= 1, "device_pages", "at least 1")
        check(self.host_pages >= 0, "host_pages", "at least 0")
        check(self.page_tokens >= 1, "page_tokens", "at least 1")
        check(0 <= self.swap_out_below <= 1, "swap_out_below", "a share in [0, 1]")
        check(0 <= self.running_reserve < 1, "running_reserve", "a share in [0, 1)")
        check(self.max_swap_outs_per_step >= 0, "max_swap_outs_per_step", "at least 0")
        check(self.max_swap_outs_under_way >= 0, "max_swap_outs_under_way", "at least 0")
        load_s = self.load_s_per_page
        check(load_s is None or load_s >= 0, "load_s_per_page", "None or at least 0")

    @property
    def reserve_pages(self) -> int:
        """Device pages that an admission leaves to the requests that already run."""
        return int(self.device_pages * self.running_reserve)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)
