"""Which conversations have been without activity for longer than their time to live."""

import heapq
from collections.abc import Iterator
from itertools import count

from host_cache.conversation import CachedConversation


class Expiry:
    """Finds them at logarithmic cost.

    Activity moves no entry. One that comes up too early is put back, or waits until its conversation stops
    running.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, CachedConversation]] = []
        """Heap of (when to look at it, serial, conversation)."""
        self._serial = count()

    def watch(self, conversation: CachedConversation) -> None:
        """An idle conversation has a time to live, or perhaps not: see to it that it is looked at in time."""
        if conversation.time_to_live_s is None:
            return
        expires_s = conversation.last_active + conversation.time_to_live_s
        if conversation.looked_at_s is None or expires_s < conversation.looked_at_s:
            conversation.looked_at_s = expires_s
            heapq.heappush(self._entries, (expires_s, next(self._serial), conversation))

    def expired(self, now: float) -> Iterator[CachedConversation]:
        """Idle conversations that have expired; each is given once, until it is watched anew."""
        while self._entries and self._entries[0][0] <= now:
            time_s, _, conversation = heapq.heappop(self._entries)
            if conversation.looked_at_s != time_s:
                continue  # another entry stands for it
            conversation.looked_at_s = None
            if conversation.running or conversation.time_to_live_s is None:
                continue
            if conversation.last_active + conversation.time_to_live_s <= now:
                yield conversation
            else:
                self.watch(conversation)
