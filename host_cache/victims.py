"""Chunks in the order in which a policy lets them go."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from host_cache.chunks import CachedConversation, Chunk
from host_cache.policies import EvictionPolicy


class Victims:
    """A lazily merged view over all conversations, ascending by value, with one element of look-ahead.

    It may be consumed while its chunks change: each chunk is tested again right before it is given out.
    """

    def __init__(
        self,
        conversations: Iterable[CachedConversation],
        policy: EvictionPolicy,
        *,
        wanted: Callable[[Chunk], bool],
        page_tokens: int,
        now: float,
    ) -> None:
        self._policy = policy
        self._wanted = wanted
        self._page_tokens = page_tokens
        self._now = now
        self._heap: list[tuple[float, int, Chunk, Iterator[Chunk], CachedConversation]] = []
        for number, conversation in enumerate(conversations):
            chunks = self._leaving(conversation)
            first = next(chunks, None)
            if first is not None:
                self._heap.append((self._value(first, conversation), number, first, chunks, conversation))
        heapq.heapify(self._heap)

    def peek(self) -> tuple[float, Chunk] | None:
        """The next chunk and its value, or None if none is left. Stays the next one."""
        while self._heap:
            value, _, chunk, _, _ = self._heap[0]
            if self._wanted(chunk):
                return value, chunk
            self.skip()
        return None

    def skip(self) -> None:
        """Go past the chunk that `peek` shows."""
        _, number, _, chunks, conversation = self._heap[0]
        following = next(chunks, None)
        if following is None:
            heapq.heappop(self._heap)
        else:
            entry = (self._value(following, conversation), number, following, chunks, conversation)
            heapq.heapreplace(self._heap, entry)

    def _value(self, chunk: Chunk, conversation: CachedConversation) -> float:
        if chunk.pins:  # in use on the device: its copy in the host is the one that nobody misses
            return -math.inf
        return self._policy.value(
            context_tokens=(chunk.index + 1) * self._page_tokens,
            idle_s=self._now - conversation.last_active,
        )

    def _leaving(self, conversation: CachedConversation) -> Iterator[Chunk]:
        """The conversation's wanted chunks, in the order in which they leave.

        A chunk of several conversations leaves with the one that was active last.
        """
        chunks = conversation.chunks if self._policy.leading_first else reversed(conversation.chunks)
        for chunk in chunks:
            if chunk is None or not self._wanted(chunk):
                continue
            if len(chunk.sharers) > 1 and max(chunk.sharers, key=_activity) is not conversation:
                continue
            yield chunk


def _activity(conversation: CachedConversation) -> tuple[float, str]:
    return conversation.last_active, conversation.id
