"""What the cache has done since the start."""

from dataclasses import dataclass, fields

from host_cache.plan import CachePlan


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Sums since the start. Each context token of an admission counts once, when its step has ended well."""

    tokens_from_device: int = 0
    tokens_from_host: int = 0
    tokens_recomputed: int = 0
    """History that was in no tier."""
    tokens_new: int = 0
    """Tokens that were never computed before."""
    tokens_shared: int = 0
    """Of those from a tier, tokens that another conversation had computed."""
    gaps: int = 0
    """Runs of recomputed tokens of at most one chunk."""
    long_gaps: int = 0
    """Runs of recomputed tokens of more than one chunk."""
    chunks_swapped_in: int = 0
    chunks_swapped_out: int = 0
    chunks_warmed: int = 0
    """Chunks whose swap-in began since their conversation's next turn was said to be near."""
    chunks_copied: int = 0
    """Chunks of which a fork got a copy of its own, from page to page of the device."""
    chunks_dropped: int = 0
    """Chunks that left the last tier they were in for want of room, or since they are cheap to recompute."""
    pages_reclaimed: int = 0
    """Device pages had without copying, since the host held the chunk already."""
    conversations_expired: int = 0
    """Times that a conversation's chunks were dropped at the end of its time to live."""
    failed_swap_ins: int = 0
    failed_swap_outs: int = 0

    def __add__(self, other: "CacheCounters") -> "CacheCounters":
        return CacheCounters(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(CacheCounters)}
        )

    def add_admission(self, plan: CachePlan) -> None:
        """Count where an admission's context came from."""
        for name in (
            "tokens_from_device",
            "tokens_from_host",
            "tokens_recomputed",
            "tokens_new",
            "tokens_shared",
            "gaps",
            "long_gaps",
        ):
            setattr(self, name, getattr(self, name) + getattr(plan, name))
