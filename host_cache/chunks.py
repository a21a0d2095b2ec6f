"""The books of the cache: chunks and the conversations they belong to.

Only `CacheManager` changes these objects.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Chunk:
    """KV of consecutive tokens of one or more conversations that share this prefix.

    A dropped chunk has no object: its place in the conversation holds None.
    """

    index: int
    """Place in its conversations: it holds tokens index * page_tokens and on."""
    sharers: list["CachedConversation"]
    """Conversations it belongs to; at least one. A chunk with several is full and never written again."""
    device_page: int | None = None
    host_page: int | None = None
    filled: int = 0
    """Tokens whose KV is valid, from the chunk's start, in every tier that has a page."""
    pins: int = 0
    """Running conversations that use it. A pinned chunk keeps its device page."""
    arriving: bool = False
    """The copy into `host_page` has not ended: it may not be loaded yet."""
    loading: bool = False
    """The copy into `device_page` has not ended: `host_page` may not be freed yet."""

    @property
    def evictable(self) -> bool:
        """Its device page can be had at once."""
        return self.device_page is not None and self.pins == 0

    @property
    def reclaimable(self) -> bool:
        """Its device page can be had without copying: the host has it, or will."""
        return self.evictable and self.host_page is not None


@dataclass(slots=True, eq=False)
class CachedConversation:
    """A conversation as the cache sees it: chunks and when it was last active."""

    id: str
    last_active: float
    """When its last turn ended, in the caller's seconds."""
    chunks: list[Chunk | None] = field(default_factory=list)
    running: bool = False
    """Its chunks are pinned and all on the device."""
    page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """i32[capacity]: device pages by chunk index. Valid for the first len(chunks) while `running`."""
