"""The order in which chunks leave a tier, kept up to date at logarithmic cost."""

import heapq
from itertools import count

import numpy as np

from host_cache.conversation import CachedConversation
from host_cache.ledger import ARRIVING, CHEAP, DEVICE, HOST, LOADING, NONE, PINNED, SHARED, Ledger
from host_cache.policies import MIN_IDLE_S, EvictionPolicy, value

type Entry = tuple[float, int, CachedConversation, int, int]
"""(origin, serial, conversation, index of the chunk that it would let go next, class)."""

LEAVES_DEVICE, LEAVES_HOST, COPIED_AHEAD = 0, 1, 2
"""Orders: whose device page is taken, whose host page is taken, who is copied to the host ahead of time."""
_CAN_LEAVE = (
    (DEVICE | PINNED | LOADING, DEVICE),
    (HOST | PINNED | ARRIVING | LOADING, HOST),
    (DEVICE | HOST | PINNED | LOADING | CHEAP, DEVICE),
)
"""By order: of the first flags exactly the second are set on a chunk that can leave."""


class LeavingOrder:
    """What each idle conversation would let go next from one tier, least valuable first.

    Entries of one weight are a class, and lie in a heap by origin, since their order never changes. Among
    the heads of these heaps the least value is found by computing them all, once for each moment. An entry is
    valid while its conversation has it; others are swept out as they come up, or when they outweigh the
    valid ones of their class.
    """

    def __init__(self, ledger: Ledger, policy: EvictionPolicy, *, order: int, page_tokens: int) -> None:
        """Args:
        ledger: holds the chunks.
        policy: values them.
        order: one of the constants above.
        page_tokens: tokens of a chunk.
        """
        self._ledger = ledger
        self._flags = ledger.flags
        self._policy = policy
        self._order = order
        self._mask, self._wanted = _CAN_LEAVE[order]
        self._page_tokens = page_tokens
        self._serial = count()
        self._classes: dict[float, int] = {}
        """Weight -> class."""
        self._heaps: list[list[Entry]] = []
        self._num_valid: list[int] = []
        self._unused: list[int] = []
        """Classes without entries."""
        self._weights = np.zeros(0)
        """By class; infinite without entries."""
        self._origins = np.zeros(0)
        """Of each class's head, which may not be valid any more: then a later one."""
        self._values = np.zeros(0)
        """Of the heads at `_now`."""
        self._now: float | None = None
        self._dear: dict[int, CachedConversation] = {}
        """Shared chunks that came up and are worth more than their owner's share, passed over."""
        self._dear_front: list[tuple[float, int]] = []
        """(value at `_now`, chunk)."""
        self._found: Entry | int | None = None

    def can_leave(self, chunk: int) -> bool:
        """Whether a chunk could go now, whatever it is worth."""
        return self._flags[chunk] & self._mask == self._wanted

    def enter(self, conversation: CachedConversation) -> None:
        """A conversation is idle, or its chunks have changed: (re)start at its first chunk to leave."""
        self._push(conversation, self._first(conversation))

    def leave(self, conversation: CachedConversation) -> None:
        """A conversation isn't idle any more: nothing of it leaves."""
        entry = conversation.leaving[self._order]
        if entry is not None:
            conversation.leaving[self._order] = None
            self._num_valid[entry[4]] -= 1

    def peek(self, now: float) -> tuple[float, int] | None:
        """The value and the chunk that would leave next, or None. It stays."""
        if now != self._now:
            self._start_moment(now)
        while True:
            entry = self._least_head()
            worth = np.inf if entry is None else float(self._values[entry[4]])
            dear = self._least_dear() if self._dear_front else None
            if dear is not None and dear[0] <= worth:
                self._found = dear[1]
                return dear
            if entry is None:
                return None
            self._found = entry
            _, _, conversation, index, _ = entry
            chunk = conversation.chunks[index] if index < len(conversation.chunks) else NONE
            if not self._passes(chunk, conversation):
                self.skip()
            elif self._policy.sums_sharers and self._flags[chunk] & SHARED:
                self.skip()
                self._dear[chunk] = conversation
                heapq.heappush(self._dear_front, (self._shared_value(chunk, now), chunk))
            else:
                return worth, chunk

    def skip(self) -> None:
        """Go past the chunk that `peek` gave."""
        found, self._found = self._found, None
        if isinstance(found, int):
            self._dear.pop(found, None)
        elif found is not None and self._valid(found):
            _, _, conversation, index, number = found
            self.leave(conversation)
            heap = self._heaps[number]
            if heap[0] is found:
                heapq.heappop(heap)
                self._head_has_changed(number)
            self._push(conversation, self._after(conversation, index))

    # -- inside ----------------------------------------------------------------------------------

    def _passes(self, chunk: int, conversation: CachedConversation) -> bool:
        if chunk == NONE:
            return False
        flags = self._flags[chunk]
        if flags & self._mask != self._wanted:  # as `can_leave`, without a call: it is asked most often
            return False
        return not flags & SHARED or self._ledger.owner(chunk) is conversation

    def _first(self, conversation: CachedConversation) -> int:
        """The index of the chunk that leaves first, or `NONE`."""
        chunks = np.array(conversation.chunks, np.int32)
        flags = self._ledger.flags_of(chunks)  # of chunk NONE: of some other chunk
        candidates = np.flatnonzero((flags & self._mask == self._wanted) & (chunks != NONE))
        for index in (candidates if self._policy.leading_first else candidates[::-1]).tolist():
            if self._passes(conversation.chunks[index], conversation):
                return index
        return NONE

    def _after(self, conversation: CachedConversation, index: int) -> int:
        """The index of the chunk that leaves after the one at `index`, or `NONE`."""
        chunks = conversation.chunks
        if self._policy.leading_first:
            candidates = range(index + 1, len(chunks))
        else:
            candidates = range(min(index, len(chunks)) - 1, -1, -1)
        for candidate in candidates:
            if self._passes(chunks[candidate], conversation):
                return candidate
        return NONE

    def _push(self, conversation: CachedConversation, index: int) -> None:
        """Make the chunk at an index the one that leaves next; `NONE`: none does."""
        if index == NONE:
            self.leave(conversation)
            return
        weight = self._policy.weight((index + 1) * self._page_tokens, conversation)
        origin = self._policy.origin(conversation)
        number = self._classes.get(weight)
        before = conversation.leaving[self._order]
        if before is not None:
            if before[3] == index and before[0] == origin and before[4] == number:
                return
            self.leave(conversation)
        if number is None:
            number = self._new_class(weight)
        heap = self._heaps[number]
        entry = (origin, next(self._serial), conversation, index, number)
        conversation.leaving[self._order] = entry
        self._num_valid[number] += 1
        heapq.heappush(heap, entry)
        if heap[0] is entry:
            self._head_has_changed(number)
        if len(heap) > 2 * self._num_valid[number] + 16:
            self._heaps[number] = [entry for entry in heap if self._valid(entry)]
            heapq.heapify(self._heaps[number])
            self._head_has_changed(number)

    def _new_class(self, weight: float) -> int:
        if not self._unused:
            known = len(self._heaps)
            more = max(64, known)
            self._weights, self._origins, self._values = (
                np.append(column, np.full(more, np.inf))
                for column in (self._weights, self._origins, self._values)
            )
            self._heaps.extend([] for _ in range(more))
            self._num_valid.extend([0] * more)
            self._unused = list(range(known + more - 1, known - 1, -1))
        number = self._classes[weight] = self._unused.pop()
        self._weights[number] = weight
        return number

    def _valid(self, entry: Entry) -> bool:
        return entry[2].leaving[self._order] is entry

    def _start_moment(self, now: float) -> None:
        self._now = now
        np.subtract(now, self._origins, out=self._values)
        np.maximum(self._values, MIN_IDLE_S, out=self._values)
        np.divide(self._weights, self._values, out=self._values)
        self._dear_front = []
        for chunk, conversation in list(self._dear.items()):
            if self._still_dear(chunk, conversation):
                self._dear_front.append((self._shared_value(chunk, now), chunk))
            else:
                del self._dear[chunk]
        heapq.heapify(self._dear_front)

    def _head_has_changed(self, number: int) -> None:
        heap = self._heaps[number]
        if heap:
            origin = self._origins[number] = heap[0][0]
            if self._now is not None:
                self._values[number] = self._weights[number] / max(self._now - origin, MIN_IDLE_S)
        else:
            del self._classes[float(self._weights[number])]
            self._unused.append(number)
            self._weights[number] = self._values[number] = np.inf

    def _least_head(self) -> Entry | None:
        while self._classes:
            number = int(self._values.argmin())
            heap = self._heaps[number]
            if self._valid(heap[0]):
                return heap[0]
            heapq.heappop(heap)
            self._head_has_changed(number)
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
