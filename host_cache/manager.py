"""The cache manager: where every chunk of every conversation is, and who leaves when pages are short.

It holds books only; bytes are moved by `host_cache.transfer` as the plans say. All calls come from one
thread, between steps. Each is all or nothing.

When pages may be reused. A step reads the pages of its swap-outs before anything in it writes, so a
device page is free for use the moment its swap-out is planned. A host page is busy until the copy into
it (`Chunk.arriving`) or out of it (`Chunk.loading`) is reported done.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from host_cache.chunks import CachedConversation, Chunk
from host_cache.config import CacheConfig
from host_cache.errors import IntegrityError
from host_cache.page_pool import PagePool
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
        self._device = PagePool(config.device_pages)
        self._host = PagePool(config.host_pages)
        self._conversations: dict[str, CachedConversation] = {}
        self._swap_outs: list[PageCopy] = []
        self._arriving: dict[int, Chunk | None] = {}
        """Host page -> its chunk while the copy into it runs; None once nobody wants it any more."""
        self._loading: dict[int, Chunk] = {}
        """Host page -> its chunk while the copy out of it runs."""
        self._num_evictable = 0
        self._num_reclaimable = 0
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
        """Drop a conversation that is not running, with all it has cached. Nothing happens if it is unknown."""
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
                self._count(chunk, -1)
                chunk.pins += 1
                self._count(chunk, +1)
        conversation.running = True
        self._make_room(needed, now)

        swap_ins: list[PageCopy] = []
        missing: list[tuple[int, int]] = []
        from_device = from_host = recomputed = 0
        conversation.chunks.extend([None] * (num_pages - len(conversation.chunks)))
        for index, chunk in enumerate(conversation.chunks):
            start, end = index * size, min((index + 1) * size, num_tokens)
            if chunk is None:
                chunk = conversation.chunks[index] = self._new_chunk(conversation, index)
            cached = min(chunk.filled, end - start)
            if chunk.device_page is None:
                swap_ins.append(self._load(chunk))
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
            conversation.chunks.append(self._new_chunk(conversation, len(conversation.chunks)))
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
                self._give_up_host(chunk)

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
        short = target - self._device.num_free - self._num_reclaimable
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
            chunk = self._arriving.pop(copy.host_page)
            if chunk is None:
                self._host.release(copy.host_page)
                continue
            chunk.arriving = False
            if ok:
                self._counters.chunks_swapped_out += 1
            else:
                self._counters.failed_swap_outs += 1
                self._give_up_host(chunk)
                if chunk.device_page is None:
                    self._remove(chunk)

    def swap_ins_ended(self, copies: Iterable[PageCopy], *, ok: bool) -> None:
        """Note that copies to the device have ended. A failed one leaves its chunk in no tier.

        After a failure the conversations of those chunks have to be suspended: they lack KV.
        """
        for copy in copies:
            chunk = self._loading.pop(copy.host_page)
            chunk.loading = False
            if ok:
                self._counters.chunks_swapped_in += 1
            else:
                self._counters.failed_swap_ins += 1
                self._counters.tokens_from_host -= chunk.filled
                self._give_up_host(chunk)
                chunk.filled = 0

    # -- what others may look at -----------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Device pages that are free or can be had by evicting."""
        return self._device.num_free + self._num_evictable

    @property
    def counters(self) -> CacheCounters:
        """A copy of the counters."""
        return replace(self._counters)

    def free_device_pages(self) -> tuple[int, ...]:
        """Device pages that hold nothing of worth."""
        return self._device.free_pages()

    def check_integrity(self) -> None:
        """Check the books as a whole: every page is free, owned once, or in flight; every count adds up.

        Raises:
            IntegrityError: says what doesn't hold.
        """

        def check(ok: bool, what: str) -> None:
            if not ok:
                raise IntegrityError(what)

        chunks: dict[int, Chunk] = {}
        pins: dict[int, int] = {}
        for key, conversation in self._conversations.items():
            check(key == conversation.id, f"conversation {conversation.id} is filed under {key}")
            for index, chunk in enumerate(conversation.chunks):
                if chunk is None:
                    check(not conversation.running, f"{key} runs without its chunk {index}")
                    continue
                check(chunk.index == index, f"{key}: chunk {chunk.index} stands at {index}")
                check(conversation in chunk.sharers, f"{key}: chunk {index} doesn't know it")
                chunks[id(chunk)] = chunk
                pins[id(chunk)] = pins.get(id(chunk), 0) + conversation.running
                if conversation.running:
                    check(chunk.device_page is not None, f"{key} runs, chunk {index} is not on the device")
                    check(conversation.page_ids[index] == chunk.device_page, f"{key}: page table at {index}")
        device, host = [], []
        for key, chunk in chunks.items():
            name = f"chunk {chunk.index} of {[s.id for s in chunk.sharers]}"
            check(chunk.pins == pins[key], f"{name}: {chunk.pins} pins, {pins[key]} running")
            check(len(chunk.sharers) == 1 or chunk.filled == self.config.page_tokens, f"{name}: shared, partial")
            check(all(s.chunks[chunk.index] is chunk for s in chunk.sharers), f"{name}: sharers")
            check(chunk.device_page is not None or chunk.host_page is not None, f"{name}: in no tier")
            check(0 <= chunk.filled <= self.config.page_tokens, f"{name}: filled {chunk.filled}")
            check(chunk.filled > 0 or chunk.pins > 0, f"{name}: empty and not running")
            if chunk.device_page is not None:
                device.append(chunk.device_page)
            if chunk.host_page is not None:
                host.append(chunk.host_page)
            check(chunk.arriving == (self._arriving.get(_none(chunk.host_page)) is chunk), f"{name}: arriving")
            check(chunk.loading == (self._loading.get(_none(chunk.host_page)) is chunk), f"{name}: loading")
        host += [page for page, chunk in self._arriving.items() if chunk is None]
        for pool, owned, tier in ((self._device, device, "device"), (self._host, host, "host")):
            everything = sorted([*owned, *pool.free_pages()])
            check(everything == list(range(pool.num_pages)), f"{tier} pages are lost or owned twice")
        evictable = sum(c.evictable for c in chunks.values())
        reclaimable = sum(c.reclaimable for c in chunks.values())
        check(evictable == self._num_evictable, f"{self._num_evictable} evictable counted, {evictable} found")
        check(reclaimable == self._num_reclaimable, f"{self._num_reclaimable} counted, {reclaimable} found")

    # -- the only places where chunks change -----------------------------------------------------

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

    def _count(self, chunk: Chunk, sign: int) -> None:
        """Take a chunk out of the counts before it changes (-1), put it back after (+1)."""
        self._num_evictable += sign * chunk.evictable
        self._num_reclaimable += sign * chunk.reclaimable

    def _new_chunk(self, conversation: CachedConversation, index: int) -> Chunk:
        page = self._device.allocate()
        assert page is not None, "room was made before"
        return Chunk(index, [conversation], device_page=page, pins=1)

    def _load(self, chunk: Chunk) -> PageCopy:
        page, host_page = self._device.allocate(), chunk.host_page
        assert page is not None and host_page is not None, "room was made before; a chunk is in some tier"
        self._count(chunk, -1)
        chunk.device_page, chunk.loading = page, True
        self._count(chunk, +1)
        self._loading[host_page] = chunk
        return PageCopy(device_page=page, host_page=host_page)

    def _park(self, conversation_id: str, now: float) -> CachedConversation:
        conversation = self._running(conversation_id)
        conversation.running = False
        conversation.last_active = now
        for chunk in conversation.chunks:
            assert chunk is not None
            self._count(chunk, -1)
            chunk.pins -= 1
            self._count(chunk, +1)
            if chunk.filled == 0 and chunk.pins == 0:
                self._remove(chunk)
        self._strip(conversation)
        return conversation

    def _cut(self, conversation: CachedConversation, num_tokens: int) -> None:
        """Shorten an idle conversation's chunks to `num_tokens` tokens."""
        size = self.config.page_tokens
        for chunk in conversation.chunks[self.config.pages_for(num_tokens) :]:
            if chunk is not None:
                self._detach(chunk, conversation)
        del conversation.chunks[self.config.pages_for(num_tokens) :]
        last = conversation.chunks[-1] if conversation.chunks else None
        if last is not None and last.index * size + last.filled > num_tokens:
            if len(last.sharers) > 1:
                self._detach(last, conversation)
            else:
                last.filled = num_tokens - last.index * size
        self._strip(conversation)

    @staticmethod
    def _strip(conversation: CachedConversation) -> None:
        while conversation.chunks and conversation.chunks[-1] is None:
            conversation.chunks.pop()

    def _detach(self, chunk: Chunk, conversation: CachedConversation) -> None:
        """Take a chunk away from one conversation; the last one takes its pages along."""
        if len(chunk.sharers) == 1:
            self._remove(chunk)
        else:
            chunk.sharers.remove(conversation)
            conversation.chunks[chunk.index] = None

    def _remove(self, chunk: Chunk) -> None:
        """Take a chunk out of both tiers and of all its conversations."""
        if chunk.loading or chunk.pins:
            raise IntegrityError(f"chunk {chunk.index} of {chunk.sharers[0].id} is removed while in use")
        self._give_up_host(chunk)
        self._give_up_device(chunk)
        for conversation in chunk.sharers:
            conversation.chunks[chunk.index] = None

    def _give_up_device(self, chunk: Chunk) -> None:
        if chunk.device_page is not None:
            self._count(chunk, -1)
            self._device.release(chunk.device_page)
            chunk.device_page = None
            self._count(chunk, +1)

    def _give_up_host(self, chunk: Chunk) -> None:
        """Free the host page; at once, or when the copy into it has ended."""
        if chunk.host_page is None:
            return
        if chunk.loading:
            raise IntegrityError(f"host page {chunk.host_page} is given up while it is read")
        self._count(chunk, -1)
        if chunk.arriving:
            self._arriving[chunk.host_page] = None
            chunk.arriving = False
        else:
            self._host.release(chunk.host_page)
        chunk.host_page = None
        self._count(chunk, +1)

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
        if pages <= self._device.num_free:
            return
        victims = self._victims(now, _evictable)
        host_victims = self._host_victims(now)
        while self._device.num_free < pages:
            found = victims.peek()
            assert found is not None, "enough is evictable"
            value, chunk = found
            if chunk.host_page is not None:
                self._counters.pages_reclaimed += 1
                self._give_up_device(chunk)
            elif self._copy_out(chunk, value, host_victims):
                self._give_up_device(chunk)
            else:
                self._drop(chunk)

    def _copy_out(self, chunk: Chunk, value: float, host_victims: Victims) -> bool:
        """Plan the copy of a chunk to the host, in place of chunks that are worth less.

        Returns:
            False if the host has no page for it: everything there is worth more.
        """
        page = self._host.allocate()
        while page is None:
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
                self._give_up_host(victim)
            page = self._host.allocate()
        self._count(chunk, -1)
        chunk.host_page, chunk.arriving = page, True
        self._count(chunk, +1)
        self._arriving[page] = chunk
        assert chunk.device_page is not None
        self._swap_outs.append(PageCopy(device_page=chunk.device_page, host_page=page))
        return True

    def _drop(self, chunk: Chunk) -> None:
        self._counters.chunks_dropped += 1
        self._remove(chunk)


def _page(chunk: Chunk | None) -> int:
    assert chunk is not None and chunk.device_page is not None
    return chunk.device_page


def _none(page: int | None) -> int:
    """A key that no page has, for a chunk without one."""
    return -1 if page is None else page


def _evictable(chunk: Chunk) -> bool:
    return chunk.evictable


def _device_only(chunk: Chunk) -> bool:
    return chunk.evictable and chunk.host_page is None


def _in_host(chunk: Chunk) -> bool:
    """The host page may be given up. A running conversation may be about to load the ones it has only there."""
    free = chunk.host_page is not None and not chunk.arriving and not chunk.loading
    return free and (chunk.pins == 0 or chunk.device_page is not None)
