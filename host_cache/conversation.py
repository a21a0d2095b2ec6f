"""A conversation as the cache sees it. Only `CacheManager` and its ledger change it."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from host_cache.prefix_index import Keys


@dataclass(slots=True, eq=False)
class CachedConversation:
    """Which chunks a conversation has, and when it was active."""

    id: str
    tenant: str
    """Nothing is shared between tenants."""
    last_active: float
    """When its last turn arrived or ended, in the caller's seconds."""
    chunks: array = field(default_factory=lambda: array("i"))
    """Chunk numbers of the ledger by index; `ledger.NONE` where a chunk is in no tier."""
    running: bool = False
    """Its chunks are pinned and all on the device."""
    page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """i32[capacity]: device pages by chunk index. Valid for the first len(chunks) while `running`."""
    keys: Keys = field(default_factory=Keys)
    """Keys of its full chunks, as far as they are known (`PrefixIndex`)."""
    had_turn: bool = False
    """A turn has ended, so a pause runs."""
    num_gaps: int = 0
    """Pauses between its turns that have been seen."""
    sum_gaps_s: float = 0.0
    """Their length in all."""
    priority: float = 1.0
    """Factor on the worth of its chunks."""
    time_to_live_s: float | None = None
    """Its chunks are dropped after so much time without activity; None: never."""
    looked_at_s: float | None = None
    """When `Expiry` looks at it next."""
    leaving: list[Any] = field(default_factory=lambda: [None, None, None])
    """Per order of leaving: its entry there, if it has a chunk that can leave."""

    def present(self) -> np.ndarray:
        """i32[n]: its chunks that are in some tier, in the order of their places."""
        chunks = np.array(self.chunks, np.int32)
        return chunks[chunks >= 0]
