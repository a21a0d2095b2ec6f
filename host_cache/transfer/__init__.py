"""Moving pages between the tiers. The only part of the cache that knows jax; only page ids cross to it."""

from host_cache.transfer.mover import PageMover
from host_cache.transfer.pinned_pool import PinnedPool, register_pinned

__all__ = ["PageMover", "PinnedPool", "register_pinned"]
