"""The cache manager: where every chunk of every conversation is, and who leaves when pages are short.

It holds books only; bytes are moved by `host_cache.transfer` as the plans say. All calls come from one
thread, between steps. Each is all or nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from host_cache.chunks import CachedConversation, Chunk
from host_cache.config import CacheConfig
from host_cache.errors import IntegrityError
from host_cache.ledger import Ledger
from host_cache.plan import CachePlan, PageCopy
from host_cache.policies import EvictionPolicy
from host_cache.victims import Victims


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """What has happened since the start. Every context token of an admission is counted once."""

    tokens_from_device: int = 0
    tokens_from_host: int = 0
    tokens_recomputed: int = 0
    """History that was in no tier."""
    tokens_new: int = 0
    """Tokens that were never computed before."""
    gaps: int = 0
    """Runs of recomputed tokens of at most one chunk."""
    long_gaps: int = 0
    """Runs of recomputed tokens of more than one chunk."""
    chunks_swapped_in: int = 0
    chunks_swapped_out: int = 0
    chunks_dropped: int = 0
    """Chunks that left the last tier they were in for want of room."""
    pages_reclaimed: int = 0
    """Device pages had without copying, since the host held the chunk already."""
    failed_swap_ins: int = 0
    failed_swap_outs: int = 0


class CacheManager:
    """Keeps the books of both tiers. See the module's text for who may call when."""

    def __init__(self, config: CacheConfig, policy: EvictionPolicy) -> None:
        self.config = config
        self.policy = policy
        self._ledger = Ledger(
            device_pages=config.device_pages, host_pages=config.host_pages, page_tokens=config.page_tokens
        )
        self._conversations: dict[str, CachedConversation] = {}
        self._swap_outs: list[PageCopy] = []
        self._counters = CacheCounters()

    # -- conversations ---------------------------------------------------------------------------

    def open(self, conversation_id: str, now: float) -> None:
        """Know a conversation, with nothing cached. Nothing changes if it is known."""
        if conversation_id not in self._conversations:
            self._conversations[conversation_id] = CachedConversation(conversation_id, now)

    def touch(self, conversation_id: str, now: float) -> None:
        """Note activity: its next turn has arrived and waits."""
        self._conversations[conversation_id].last_active = now

    def forget(self, conversation_id: str) -> None:
        """Drop all that a conversation has cached. It must not be running; it may be unknown."""
        conversation = self._conversations.get(conversation_id)
        if conversation is not None:
            self._cut(self._idle(conversation_id), 0)
            del self._conversations[conversation_id]

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of a conversation that is not running."""
        self._cut(self._idle(conversation_id), num_tokens)

    def fork(self, source_id: str, new_id: str, num_tokens: int, now: float) -> None:
        """Let a new conversation share the source's full chunks among its first `num_tokens` tokens.

        A chunk that is only partly within them is not shared: the fork computes those few tokens again.
        """
        source = self._conversations[source_id]
        new = CachedConversation(new_id, now)
        for chunk in source.chunks[: num_tokens // self.config.page_tokens]:
            shared = chunk if chunk is not None and chunk.filled == self.config.page_tokens else None
            if shared is not None:
                shared.sharers.append(new)
            new.chunks.append(shared)
        self._strip(new)
        self._conversations[new_id] = new

    def clear(self) -> None:
        """Drop everything cached, as after a change of weights. No conversation may be running."""
        for conversation in list(self._conversations.values()):
            self._cut(self._idle(conversation.id), 0)

    # -- a turn ----------------------------------------------------------------------------------

    def admit(
        self, conversation_id: str, *, num_tokens: int, history_tokens: int, now: float, reserve_pages: int
    ) -> CachePlan | None:
        """Get a conversation ready to run: pin what is on the device, load what the host has, and give
        pages to everything else.

        Args:
            conversation_id: a known conversation that is not running.
            num_tokens: tokens whose KV the turn needs before its first output, the last of them not cached.
            history_tokens: how many of them were computed before, now or in an earlier life of the process.
            now: the time, for the policy.
            reserve_pages: pages to leave free or evictable.

        Returns:
            the plan; None if pages are short or a chunk's copy to the host has not ended: nothing changed.
        """
        conversation = self._idle(conversation_id)
        self._cut(conversation, num_tokens - 1)
        size = self.config.page_tokens
        num_pages = self.config.pages_for(num_tokens)
        kept = conversation.chunks
        if any(c is not None and c.arriving and c.device_page is None for c in kept):
            return None
        on_device = sum(1 for c in kept if c is not None and c.device_page is not None)
        own_evictable = sum(1 for c in kept if c is not None and c.evictable)
        needed = num_pages - on_device
        if needed + reserve_pages > self.num_available - own_evictable:
            return None

        for chunk in kept:
            if chunk is not None:
                self._ledger.pin(chunk)
        conversation.running = True
        self._make_room(needed, now)

        swap_ins: list[PageCopy] = []
        missing: list[tuple[int, int]] = []
        from_device = from_host = recomputed = 0
        conversation.chunks.extend([None] * (num_pages - len(conversation.chunks)))
        for index, chunk in enumerate(conversation.chunks):
            start, end = index * size, min((index + 1) * size, num_tokens)
            if chunk is None:
                chunk = conversation.chunks[index] = self._ledger.new_chunk(conversation, index)
            cached = min(chunk.filled, end - start)
            if chunk.device_page is None:
                swap_ins.append(self._ledger.start_load(chunk))
                from_host += cached
            else:
                from_device += cached
            if start + cached < end:
                if missing and missing[-1][1] == start + cached:
                    missing[-1] = (missing[-1][0], end)
                else:
                    missing.append((start + cached, end))
        conversation.page_ids = np.fromiter((_page(c) for c in conversation.chunks), np.int32, num_pages)

        for start, end in missing:
            again = max(0, min(end, history_tokens) - start)
            recomputed += again
            self._counters.gaps += 0 < again <= size
            self._counters.long_gaps += again > size
        self._counters.tokens_from_device += from_device
        self._counters.tokens_from_host += from_host
        self._counters.tokens_recomputed += recomputed
        self._counters.tokens_new += num_tokens - from_device - from_host - recomputed
        return CachePlan(
            swap_ins=tuple(swap_ins),
            missing=tuple(missing),
            tokens_from_device=from_device,
            tokens_from_host=from_host,
            tokens_recomputed=recomputed,
        )

    def grow(self, conversation_id: str, num_tokens: int, now: float) -> bool:
        """Give a running conversation pages for `num_tokens` tokens in all.

        Returns:
            False if pages are short; nothing changed then.
        """
        conversation = self._running(conversation_id)
        needed = self.config.pages_for(num_tokens) - len(conversation.chunks)
        if needed <= 0:
            return True
        if needed > self.num_available:
            return False
        self._make_room(needed, now)
        for _ in range(needed):
            conversation.chunks.append(self._ledger.new_chunk(conversation, len(conversation.chunks)))
        if len(conversation.chunks) > len(conversation.page_ids):
            grown = np.zeros(2 * len(conversation.chunks), np.int32)
            grown[: len(conversation.page_ids)] = conversation.page_ids
            conversation.page_ids = grown
        for chunk in conversation.chunks[-needed:]:
            assert chunk is not None
            conversation.page_ids[chunk.index] = _page(chunk)
        return True

    def page_ids(self, conversation_id: str, num_tokens: int) -> np.ndarray:
        """Device pages of a running conversation's first `num_tokens` tokens.

        Returns:
            i32[ceil(num_tokens / page_tokens)], valid until the conversation stops running.
        """
        return self._running(conversation_id).page_ids[: self.config.pages_for(num_tokens)]

    def computed(self, conversation_id: str, start: int, end: int) -> None:
        """Note that a step has computed tokens [start, end) of a running conversation.

        The copy of a chunk that grew is stale from here on and given up.
        """
        size = self.config.page_tokens
        chunks = self._running(conversation_id).chunks
        for index in range(start // size, self.config.pages_for(end)):
            chunk = chunks[index]
            assert chunk is not None
            if max(start - index * size, 0) > chunk.filled:
                raise IntegrityError(f"{conversation_id}: tokens before {start} were never computed")
            filled = min(end - index * size, size)
            if filled > chunk.filled:
                chunk.filled = filled
                self._ledger.give_up_host(chunk)

    def finish(self, conversation_id: str, now: float) -> None:
        """A turn has ended. Its KV stays, unless the cache keeps nothing (`keep_finished`)."""
        conversation = self._park(conversation_id, now)
        if not self.config.keep_finished:
            self._cut(conversation, 0)

    def suspend(self, conversation_id: str, now: float) -> None:
        """A turn is put back into the queue. Its KV stays, and may be evicted."""
        self._park(conversation_id, now)

    # -- copies ----------------------------------------------------------------------------------

    def plan_ahead(self, now: float) -> None:
        """Plan copies to the host while few pages are free or reclaimable (paper 4.3.2)."""
        target = int(self.config.swap_out_below * self.config.device_pages)
        short = target - self._ledger.num_free_device - self._ledger.num_reclaimable
        short = min(short, self.config.max_swap_outs_per_step)
        if short <= 0 or not self.config.host_pages:
            return
        victims = self._victims(now, _device_only)
        host_victims = self._host_victims(now)
        while short > 0 and (found := victims.peek()):
            value, chunk = found
            if not self._copy_out(chunk, value, host_victims):
                return
            short -= 1

    def take_swap_outs(self) -> tuple[PageCopy, ...]:
        """The copies to the host that were planned since the last call, for the next step's plan."""
        copies, self._swap_outs = tuple(self._swap_outs), []
        return copies

    def swap_outs_ended(self, copies: Iterable[PageCopy], *, ok: bool) -> None:
        """Note that copies to the host have ended. A failed one leaves its chunk without a host page."""
        for copy in copies:
            chunk = self._ledger.end_copy_out(copy)
            if chunk is None:
                continue
            if ok:
                self._counters.chunks_swapped_out += 1
            else:
                self._counters.failed_swap_outs += 1
                self._ledger.give_up_host(chunk)
                if chunk.device_page is None:
                    self._ledger.remove(chunk)

    def swap_ins_ended(self, copies: Iterable[PageCopy], *, ok: bool) -> None:
        """Note that copies to the device have ended. A failed one leaves its chunk in no tier.

        After a failure the conversations of those chunks have to be suspended: they lack KV.
        """
        for copy in copies:
            chunk = self._ledger.end_load(copy)
            if ok:
                self._counters.chunks_swapped_in += 1
            else:
                self._counters.failed_swap_ins += 1
                self._counters.tokens_from_host -= chunk.filled
                self._ledger.give_up_host(chunk)
                chunk.filled = 0

    # -- what others may look at -----------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Device pages that are free or can be had by evicting."""
        return self._ledger.num_free_device + self._ledger.num_evictable

    @property
    def counters(self) -> CacheCounters:
        """A copy of the counters."""
        return replace(self._counters)

    def free_device_pages(self) -> tuple[int, ...]:
        """Device pages that hold nothing of worth."""
        return self._ledger.free_device_pages()

    def check_integrity(self) -> None:
        """Check the books as a whole: every page is free, owned once, or in flight; every count adds up.

        Raises:
            IntegrityError: says what doesn't hold.
        """

        for key, conversation in self._conversations.items():
            if key != conversation.id:
                raise IntegrityError(f"conversation {conversation.id} is filed under {key}")
        self._ledger.check(self._conversations.values())

    # -- conversations, inside ---------------------------------------------------------------------

    def _idle(self, conversation_id: str) -> CachedConversation:
        conversation = self._conversations[conversation_id]
        if conversation.running:
            raise IntegrityError(f"conversation {conversation_id} is running")
        return conversation

    def _running(self, conversation_id: str) -> CachedConversation:
        conversation = self._conversations[conversation_id]
        if not conversation.running:
            raise IntegrityError(f"conversation {conversation_id} is not running")
        return conversation

    def _park(self, conversation_id: str, now: float) -> CachedConversation:
        conversation = self._running(conversation_id)
        conversation.running = False
        conversation.last_active = now
        for chunk in conversation.chunks:
            assert chunk is not None
            self._ledger.unpin(chunk)
        self._strip(conversation)
        return conversation

    def _cut(self, conversation: CachedConversation, num_tokens: int) -> None:
        """Shorten an idle conversation's chunks to `num_tokens` tokens."""
        size = self.config.page_tokens
        for chunk in conversation.chunks[self.config.pages_for(num_tokens) :]:
            if chunk is not None:
                self._ledger.detach(chunk, conversation)
        del conversation.chunks[self.config.pages_for(num_tokens) :]
        last = conversation.chunks[-1] if conversation.chunks else None
        if last is not None and last.index * size + last.filled > num_tokens:
            if len(last.sharers) > 1:
                self._ledger.detach(last, conversation)
            else:
                last.filled = num_tokens - last.index * size
        self._strip(conversation)

    @staticmethod
    def _strip(conversation: CachedConversation) -> None:
        while conversation.chunks and conversation.chunks[-1] is None:
            conversation.chunks.pop()

    # -- eviction --------------------------------------------------------------------------------

    def _victims(self, now: float, wanted: Callable[[Chunk], bool]) -> Victims:
        return Victims(
            self._conversations.values(),
            self.policy,
            wanted=wanted,
            page_tokens=self.config.page_tokens,
            now=now,
        )

    def _host_victims(self, now: float) -> Victims:
        return self._victims(now, _in_host)

    def _make_room(self, pages: int, now: float) -> None:
        """Evict until `pages` device pages are free: the shortfall, lowest value first. The caller has
        made sure that enough can be evicted."""
        if pages <= self._ledger.num_free_device:
            return
        victims = self._victims(now, _evictable)
        host_victims = self._host_victims(now)
        while self._ledger.num_free_device < pages:
            found = victims.peek()
            assert found is not None, "enough is evictable"
            value, chunk = found
            if chunk.host_page is not None:
                self._counters.pages_reclaimed += 1
                self._ledger.give_up_device(chunk)
            elif self._copy_out(chunk, value, host_victims):
                self._ledger.give_up_device(chunk)
            else:
                self._drop(chunk)

    def _copy_out(self, chunk: Chunk, value: float, host_victims: Victims) -> bool:
        """Plan the copy of a chunk to the host, in place of chunks that are worth less.

        Returns:
            False if the host has no page for it: everything there is worth more.
        """
        while (copy := self._ledger.start_copy_out(chunk)) is None:
            found = host_victims.peek()
            if found is None:
                return False
            worth, victim = found
            if worth >= value:
                return False
            host_victims.skip()
            if victim.device_page is None:
                self._drop(victim)
            else:
                self._ledger.give_up_host(victim)
        self._swap_outs.append(copy)
        return True

    def _drop(self, chunk: Chunk) -> None:
        self._counters.chunks_dropped += 1
        self._ledger.remove(chunk)


def _page(chunk: Chunk | None) -> int:
    assert chunk is not None and chunk.device_page is not None
    return chunk.device_page


def _evictable(chunk: Chunk) -> bool:
    return chunk.evictable


def _device_only(chunk: Chunk) -> bool:
    return chunk.evictable and chunk.host_page is None


def _in_host(chunk: Chunk) -> bool:
    """The host page may be given up. A running conversation may be about to load what it has only there."""
    free = chunk.host_page is not None and not chunk.arriving and not chunk.loading
    return free and (chunk.pins == 0 or chunk.device_page is not None)
