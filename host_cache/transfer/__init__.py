"""Moving pages between the tiers. The only part of the cache that knows jax; only page ids cross to it."""

from host_cache.transfer.checksums import ChecksumCounters, PageChecksums
from host_cache.transfer.faults import FaultCounters, FaultyMover
from host_cache.transfer.mover import MOST_STORES, Mover, PageMover
from host_cache.transfer.pinned_pool import PinnedPool, kernels_read_pinned, register_pinned

__all__ = [
    "MOST_STORES",
    "ChecksumCounters",
    "FaultCounters",
    "FaultyMover",
    "Mover",
    "PageChecksums",
    "PageMover",
    "PinnedPool",
    "kernels_read_pinned",
    "register_pinned",
]
