"""A checksum per host page, taken from the bytes that came and checked before they go back."""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from host_cache.transfer.pinned_pool import PinnedPool


@dataclass(slots=True, kw_only=True)
class ChecksumCounters:
    """Sums since the start."""

    pages_summed: int = 0
    """Pages whose checksum was taken as they came to the host."""
    pages_verified: int = 0
    """Pages that were checked before they went to the device."""
    pages_damaged: int = 0
    """Those of them that had changed meanwhile."""


class PageChecksums:
    """CRC-32 of each host page over all layers and shards."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._sums = [0] * pool.num_pages
        self.counters = ChecksumCounters()
        self._lock = threading.Lock()

    def note(self, host_pages: Sequence[int], layers: Sequence[Sequence[np.ndarray]]) -> None:
        """Take the checksums of pages that come.

        Args:
            host_pages: where they go.
            layers: per layer and shard [>= len(host_pages), *page]: their bytes.
        """
        for place, page in enumerate(host_pages):
            self._sums[page] = _sum(layers, place)
        with self._lock:  # pages may come in several threads
            self.counters.pages_summed += len(host_pages)

    def damaged(self, host_pages: Sequence[int]) -> list[int]:
        """Those of some pages that hold other bytes than those that came."""
        wrong = [page for page in host_pages if _sum(self._pool.layers, page) != self._sums[page]]
        self.counters.pages_verified += len(host_pages)
        self.counters.pages_damaged += len(wrong)
        return wrong


def _sum(layers: Sequence[Sequence[np.ndarray]], place: int) -> int:
    crc = 0
    for shards in layers:
        for pages in shards:
            crc = zlib.crc32(pages[place].reshape(-1).view(np.uint8), crc)
    return crc
