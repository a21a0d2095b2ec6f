"""The order in which chunks leave a tier, kept up to date at logarithmic cost."""

import heapq
from collections.abc import Callable
from itertools import count

from host_cache.conversation import CachedConversation
from host_cache.ledger import NONE, Ledger
from host_cache.policies import EvictionPolicy, value

type _Entry = tuple[float, int, int, CachedConversation, int]
"""(origin, serial, ticket, conversation, index of the chunk that it would let go next)."""


class LeavingOrder:
    """What each idle conversation would let go next from one tier, least valuable first.

    Entries of one weight lie in a heap by origin, since their order never changes. Among the heads of these
    heaps the least value is found by a second heap that holds for one moment. An entry is valid while it
    has its conversation's ticket; the rest is swept out as it comes up, or when it outweighs the valid ones.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: EvictionPolicy,
        *,
        tier: int,
        wanted: Callable[[int], bool],
        page_tokens: int,
    ) -> None:
        """Args:
        ledger: holds the chunks.
        policy: values them.
        tier: which of a conversation's tickets is used.
        wanted: whether a chunk can leave this tier now.
        page_tokens: tokens of a chunk.
        """
        self._ledger = ledger
        self._policy = policy
        self._tier = tier
        self._wanted = wanted
        self._page_tokens = page_tokens
        self._classes: dict[float, list[_Entry]] = {}
        self._num_entries = 0
        self._num_valid = 0
        self._serial = count()
        self._now: float | None = None
        self._front: list[tuple[float, float]] = []
        """(value at `_now`, weight): a lower bound for each class's head."""
        self._dear: dict[int, CachedConversation] = {}
        """Shared chunks that came up and are worth more than their owner's share, passed over."""
        self._dear_front: list[tuple[float, int]] = []
        """(value at `_now`, chunk)."""
        self._found: _Entry | int | None = None

    def enter(self, conversation: CachedConversation) -> None:
        """A conversation is idle, or its chunks have changed: (re)start at its first chunk to leave."""
        self.leave(conversation)
        self._push(conversation, self._next(conversation, NONE))

    def leave(self, conversation: CachedConversation) -> None:
        """A conversation isn't idle any more: nothing of it leaves."""
        tickets = conversation.tickets
        if tickets[self._tier] % 2:
            tickets[self._tier] += 1
            self._num_valid -= 1
            self._found = None

    def peek(self, now: float) -> tuple[float, int] | None:
        """The value and the chunk that would leave next, or None. It stays."""
        while True:
            if now != self._now:
                self._start_moment(now)
            head = self._least_head()
            dear = self._least_dear()
            if dear is not None and (head is None or dear[0] <= head[0]):
                self._found = dear[1]
                return dear
            if head is None:
                return None
            worth, entry = head
            conversation, index = entry[3], entry[4]
            chunk = conversation.chunks[index] if index < len(conversation.chunks) else NONE
            if not self._passes(chunk, conversation):
                self._found = entry
                self.skip()
                continue
            if self._policy.sums_sharers and self._ledger.shared(chunk):
                self._found = entry
                self.skip()
                self._dear[chunk] = conversation
                heapq.heappush(self._dear_front, (self._shared_value(chunk, now), chunk))
                continue
            self._found = entry
            return worth, chunk

    def skip(self) -> None:
        """Go past the chunk that `peek` gave."""
        found, self._found = self._found, None
        if isinstance(found, int):
            self._dear.pop(found, None)
        elif found is not None:
            _, _, _, conversation, index = found
            self.leave(conversation)
            self._push(conversation, self._next(conversation, index))

    # -- inside ----------------------------------------------------------------------------------

    def _passes(self, chunk: int, conversation: CachedConversation) -> bool:
        return chunk != NONE and self._ledger.owner(chunk) is conversation and self._wanted(chunk)

    def _next(self, conversation: CachedConversation, index: int) -> int:
        """The index of the chunk that leaves after the one at `index` (`NONE`: the first), or `NONE`."""
        chunks = conversation.chunks
        if self._policy.leading_first:
            candidates = range(index + 1, len(chunks))
        else:
            candidates = range((len(chunks) if index == NONE else index) - 1, -1, -1)
        for candidate in candidates:
            if self._passes(chunks[candidate], conversation):
                return candidate
        return NONE

    def _push(self, conversation: CachedConversation, index: int) -> None:
        if index == NONE:
            return
        tickets = conversation.tickets
        tickets[self._tier] += 1  # odd: there is a valid entry
        weight = self._policy.weight((index + 1) * self._page_tokens, conversation)
        origin = self._policy.origin(conversation)
        heap = self._classes.setdefault(weight, [])
        entry = (origin, next(self._serial), tickets[self._tier], conversation, index)
        heapq.heappush(heap, entry)
        self._num_valid += 1
        self._num_entries += 1
        if self._now is not None and heap[0] is entry:
            heapq.heappush(self._front, (value(weight, origin, self._now), weight))
        if self._num_entries > 2 * self._num_valid + 64:
            self._sweep()

    def _sweep(self) -> None:
        """Drop all entries that aren't valid."""
        for weight, heap in list(self._classes.items()):
            valid = [entry for entry in heap if self._valid(entry)]
            if valid:
                heapq.heapify(valid)
                self._classes[weight] = valid
            else:
                del self._classes[weight]
        self._num_entries = self._num_valid
        self._now = None

    def _valid(self, entry: _Entry) -> bool:
        return entry[3].tickets[self._tier] == entry[2]

    def _start_moment(self, now: float) -> None:
        self._now = now
        self._front = []
        for weight in list(self._classes):
            head = self._head(weight)
            if head is not None:
                self._front.append((value(weight, head[0], now), weight))
        heapq.heapify(self._front)
        self._dear_front = []
        for chunk, conversation in list(self._dear.items()):
            if self._still_dear(chunk, conversation):
                self._dear_front.append((self._shared_value(chunk, now), chunk))
            else:
                del self._dear[chunk]
        heapq.heapify(self._dear_front)

    def _head(self, weight: float) -> _Entry | None:
        """The valid head of a class; what lies above it goes."""
        heap = self._classes.get(weight)
        if heap is None:
            return None
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
            self._num_entries -= 1
        if not heap:
            del self._classes[weight]
            return None
        return heap[0]

    def _least_head(self) -> tuple[float, _Entry] | None:
        assert self._now is not None
        while self._front:
            bound, weight = self._front[0]
            head = self._head(weight)
            if head is None:
                heapq.heappop(self._front)
                continue
            worth = value(weight, head[0], self._now)
            if worth == bound:
                return worth, head
            heapq.heapreplace(self._front, (worth, weight))
        return None

    def _least_dear(self) -> tuple[float, int] | None:
        while self._dear_front:
            worth, chunk = self._dear_front[0]
            owner = self._dear.get(chunk)
            if owner is not None and self._still_dear(chunk, owner):
                return worth, chunk
            heapq.heappop(self._dear_front)
            self._dear.pop(chunk, None)
        return None

    def _still_dear(self, chunk: int, conversation: CachedConversation) -> bool:
        """Whether a chunk that was passed over still waits: else its owner's entry covers it again."""
        index = self._ledger.index[chunk]
        has = index < len(conversation.chunks) and conversation.chunks[index] == chunk
        return has and not conversation.running and self._passes(chunk, conversation)

    def _shared_value(self, chunk: int, now: float) -> float:
        context = (self._ledger.index[chunk] + 1) * self._page_tokens
        policy = self._policy
        return sum(
            value(policy.weight(context, sharer), policy.origin(sharer), now)
            for sharer in self._ledger.sharers(chunk)
        )
