"""The cache manager: where every chunk of every conversation is, and who leaves when pages are short.

It holds books only; bytes are moved by `host_cache.transfer` as the plans say. All calls come from one
thread, between steps. Each is all or nothing.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from host_cache.config import CacheConfig
from host_cache.conversation import CachedConversation
from host_cache.counters import CacheCounters
from host_cache.errors import IntegrityError
from host_cache.expiry import Expiry
from host_cache.leaving import COPIED_AHEAD, LEAVES_DEVICE, LEAVES_HOST, LeavingOrder
from host_cache.ledger import ARRIVING, CHEAP, DEVICE, HOST, LOADING, NONE, PINNED, SHARED, Ledger
from host_cache.plan import CachePlan, PageCopy
from host_cache.policies import EvictionPolicy
from host_cache.prefix_index import PrefixIndex

DEFAULT_TENANT = ""


class CacheManager:
    """Keeps the books of both tiers. See the module's text for who may call when."""

    def __init__(
        self, config: CacheConfig, policy: EvictionPolicy, cost: Callable[[int], float] | None = None
    ) -> None:
        """Args:
        config: sizes and thresholds.
        policy: who leaves first.
        cost: seconds to recompute a chunk at a context length; needed for `config.load_s_per_page` only.
        """
        self.config = config
        self.policy = policy
        self._prefixes = PrefixIndex(
            identity=config.identity,
            page_tokens=config.page_tokens,
            most_chunks=config.device_pages + config.host_pages,
        )
        self._ledger = Ledger(
            device_pages=config.device_pages,
            host_pages=config.host_pages,
            page_tokens=config.page_tokens,
            prefixes=self._prefixes,
            is_cheap=_cheaper_to_recompute(config, cost),
        )
        self._orders = tuple(
            LeavingOrder(self._ledger, policy, order=order, page_tokens=config.page_tokens)
            for order in (LEAVES_DEVICE, LEAVES_HOST, COPIED_AHEAD)
        )
        self._device_order, self._host_order, self._ahead_order = self._orders
        self._conversations: dict[str, CachedConversation] = {}
        self._expiry = Expiry()
        self._most_arriving = config.max_swap_outs_under_way if config.load_s_per_page is not None else None
        self._swap_outs: list[PageCopy] = []
        self._to_warm: list[str] = []
        """Conversations whose next turn is near, since the last step."""
        self._spare_copies: deque[int] = deque()
        """Chunks of running conversations that may have a copy in the host, which nobody would miss."""
        self._counters = CacheCounters()

    # -- conversations ---------------------------------------------------------------------------

    def open(
        self,
        conversation_id: str,
        now: float,
        *,
        tenant: str = DEFAULT_TENANT,
        priority: float = 1.0,
        time_to_live_s: float | None = None,
    ) -> None:
        """Know a conversation, with nothing cached. Nothing changes if it is known.

        Args:
            conversation_id: any.
            now: the time.
            tenant: whose it is; nothing is shared between tenants.
            priority: see `set_priority`.
            time_to_live_s: see `set_time_to_live`.
        """
        if conversation_id not in self._conversations:
            self._conversations[conversation_id] = CachedConversation(
                conversation_id, tenant, now, priority=priority, time_to_live_s=time_to_live_s
            )

    def touch(self, conversation_id: str, now: float) -> None:
        """Note activity: its next turn has arrived and waits."""
        conversation = self._conversations[conversation_id]
        if conversation.had_turn:
            conversation.num_gaps += 1
            conversation.sum_gaps_s += now - conversation.last_active
            conversation.had_turn = False
        conversation.last_active = now
        if not conversation.running:
            self._enter(conversation)

    def forget(self, conversation_id: str) -> None:
        """Drop all that a conversation has cached. It must not be running; it may be unknown."""
        if conversation_id in self._conversations:
            conversation = self._idle(conversation_id)
            self._cut(conversation, 0)
            for order in self._orders:
                order.leave(conversation)
            conversation.time_to_live_s = None
            del self._conversations[conversation_id]

    def truncate(self, conversation_id: str, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of a conversation that is not running."""
        self._cut(self._idle(conversation_id), num_tokens)

    def fork(self, source_id: str, new_id: str, num_tokens: int, now: float) -> tuple[int, int] | None:
        """Let a new conversation share the source's full chunks among its first `num_tokens` tokens.

        A chunk that is only partly within them is not shared. If it is on the device and a page is free, the
        fork gets a copy; else it computes those few tokens again.

        Returns:
            (device page, device page to copy it to), at once, before any other step; None: nothing to copy.
        """
        source = self._conversations[source_id]
        new = CachedConversation(
            new_id, source.tenant, now, priority=source.priority, time_to_live_s=source.time_to_live_s
        )
        full = num_tokens // self.config.page_tokens
        for chunk in source.chunks[:full]:
            whole = chunk != NONE and self._ledger.filled[chunk] == self.config.page_tokens
            if whole:
                self._ledger.share(chunk, new)
            new.chunks.append(chunk if whole else NONE)
        new.keys = source.keys.first(full)
        page_copy = self._copy_part(source, new, num_tokens)
        self._strip(new)
        self._conversations[new_id] = new
        self._enter(new)
        self._expiry.watch(new)
        return page_copy

    def _copy_part(
        self, source: CachedConversation, new: CachedConversation, num_tokens: int
    ) -> tuple[int, int] | None:
        """Give a fork of `num_tokens` tokens its own copy of its last chunk, if that isn't shared."""
        ledger, index = self._ledger, self.config.pages_for(num_tokens) - 1
        if not 0 <= index < len(source.chunks) or ledger.num_free_device == 0:
            return None
        chunk = source.chunks[index]
        if chunk == NONE or chunk in new.chunks or ledger.flags[chunk] & (DEVICE | LOADING) != DEVICE:
            return None
        filled = min(num_tokens - index * self.config.page_tokens, ledger.filled[chunk])
        if filled == 0:
            return None
        copy = ledger.new_chunk(new, index)
        ledger.fill(copy, filled)
        ledger.unpin(np.array([copy]), new)
        new.chunks[index:] = array("i", [copy])
        self._counters.chunks_copied += 1
        return ledger.device_page[chunk], ledger.device_page[copy]

    def clear(self) -> None:
        """Drop everything cached, as after a change of weights. No conversation may be running."""
        for conversation in list(self._conversations.values()):
            self._cut(self._idle(conversation.id), 0)

    def set_priority(self, conversation_id: str, priority: float) -> None:
        """Multiply what a known conversation's chunks are worth. Forks made later are worth as much.

        Args:
            conversation_id: a known conversation.
            priority: above 0; 1 is usual.
        """
        conversation = self._conversations[conversation_id]
        conversation.priority = priority
        if not conversation.running:
            self._enter(conversation)

    def set_time_to_live(self, conversation_id: str, seconds: float | None) -> None:
        """Drop a known conversation's chunks after so much time without activity. Forks made later live as
        long.

        Args:
            conversation_id: a known conversation. While it runs, nothing of it is dropped.
            seconds: at least 0, counted from its last turn's arrival or end; None: no limit.
        """
        conversation = self._conversations[conversation_id]
        conversation.time_to_live_s = seconds
        self._expiry.watch(conversation)

    def drop_expired(self, now: float) -> None:
        """Drop the chunks of conversations that are past their time to live. Planning does so by itself."""
        for conversation in self._expiry.expired(now):
            self._counters.conversations_expired += 1
            self._cut(conversation, 0)

    # -- a turn ----------------------------------------------------------------------------------

    def admit(
        self,
        conversation_id: str,
        *,
        num_tokens: int,
        history_tokens: int,
        now: float,
        reserve_pages: int,
        token_ids: np.ndarray | None = None,
    ) -> CachePlan | None:
        """Get a conversation ready to run: pin what is on the device, load what the host has, and give
        pages to everything else.

        Args:
            conversation_id: a known conversation that is not running.
            num_tokens: tokens whose KV the turn needs before its first output, the last of them not cached.
            history_tokens: how many of them were computed before, now or in an earlier life of the process.
            now: the time, for the policy.
            reserve_pages: pages to leave free or evictable.
            token_ids: i32[num_tokens]: the tokens themselves, to find chunks that others have; None: don't.

        Returns:
            the plan; None if pages are short or a chunk's copy to the host has not ended: nothing changed.
        """
        conversation, ledger = self._idle(conversation_id), self._ledger
        self.drop_expired(now)
        self._cut(conversation, num_tokens - 1)
        num_keys = len(conversation.keys)
        adopted = self._adopt(conversation, token_ids, num_tokens)
        kept = conversation.present()
        flags = ledger.flags_of(kept)
        on_device = flags & DEVICE != 0
        needed = self.config.pages_for(num_tokens) - int(np.count_nonzero(on_device))
        short = needed + reserve_pages > self.num_available - ledger.count_evictable(kept)
        if short or np.any(flags & (DEVICE | ARRIVING) == ARRIVING):
            for chunk in adopted:
                self._detach(chunk, conversation)
            self._strip(conversation)
            conversation.keys.cut(num_keys)
            return None
        for order in self._orders:
            order.leave(conversation)
        cheap = flags & (CHEAP | DEVICE | SHARED) == CHEAP
        for chunk in kept[cheap].tolist():
            ledger.remove(chunk)
        ledger.pin(kept[~cheap])
        self._note_spare_copies(kept[on_device & (flags & HOST != 0)].tolist())
        conversation.running = True
        self._make_room(needed, now)
        return self._lay_out(conversation, num_tokens, history_tokens, adopted)

    def _lay_out(
        self, conversation: CachedConversation, num_tokens: int, history_tokens: int, adopted: frozenset[int]
    ) -> CachePlan:
        """Give every chunk of an admitted conversation its device page, and say what is missing."""
        size, ledger, chunks = self.config.page_tokens, self._ledger, conversation.chunks
        num_pages = self.config.pages_for(num_tokens)
        chunks.extend([NONE] * (num_pages - len(chunks)))
        for index, chunk in enumerate(chunks):
            if chunk == NONE:
                chunks[index] = ledger.new_chunk(conversation, index)
        numbers = conversation.present()
        starts = np.arange(num_pages) * size
        ends = np.minimum(starts + size, num_tokens)
        cached = np.minimum(ledger.filled_of(numbers), ends - starts)
        to_load = ledger.flags_of(numbers) & DEVICE == 0
        swap_ins = tuple(map(ledger.start_load, numbers[to_load].tolist()))
        from_host = int(cached[to_load].sum())
        from_device = int(cached.sum()) - from_host
        shared = int(cached[np.isin(numbers, list(adopted))].sum()) if adopted else 0
        missing = _joined((starts + cached).tolist(), ends.tolist())
        conversation.page_ids = ledger.device_pages_of(numbers)
        again = [max(0, min(end, history_tokens) - start) for start, end in missing]
        return CachePlan(
            swap_ins=swap_ins,
            missing=missing,
            tokens_from_device=from_device,
            tokens_from_host=from_host,
            tokens_recomputed=sum(again),
            tokens_new=num_tokens - from_device - from_host - sum(again),
            gaps=sum(0 < n <= size for n in again),
            long_gaps=sum(n > size for n in again),
            tokens_shared=shared,
        )

    def admitted(self, plan: CachePlan) -> None:
        """Count an admission whose step has ended well."""
        self._counters.add_admission(plan)

    def grow(self, conversation_id: str, num_tokens: int, now: float) -> bool:
        """Give a running conversation pages for `num_tokens` tokens in all.

        Returns:
            False if pages are short; nothing changed then.
        """
        conversation = self._running(conversation_id)
        chunks = conversation.chunks
        needed = self.config.pages_for(num_tokens) - len(chunks)
        if needed <= 0:
            return True
        if needed > self.num_available:
            return False
        self._make_room(needed, now)
        if len(chunks) + needed > len(conversation.page_ids):
            grown = np.zeros(2 * (len(chunks) + needed), np.int32)
            grown[: len(conversation.page_ids)] = conversation.page_ids
            conversation.page_ids = grown
        for _ in range(needed):
            chunk = self._ledger.new_chunk(conversation, len(chunks))
            conversation.page_ids[len(chunks)] = self._ledger.device_page[chunk]
            chunks.append(chunk)
        return True

    def capacity(self, conversation_id: str) -> int:
        """Tokens that a running conversation's pages hold."""
        return len(self._running(conversation_id).chunks) * self.config.page_tokens

    def page_ids(self, conversation_id: str, num_tokens: int) -> np.ndarray:
        """Device pages of a running conversation's first `num_tokens` tokens.

        Returns:
            i32[ceil(num_tokens / page_tokens)], valid until the conversation stops running.
        """
        return self._running(conversation_id).page_ids[: self.config.pages_for(num_tokens)]

    def computed(self, conversation_id: str, start: int, end: int) -> None:
        """Note that steps have computed tokens [start, end) of a running conversation.

        For a range that is computed token by token it is enough to say so before the conversation stops.
        """
        size, ledger = self.config.page_tokens, self._ledger
        conversation = self._running(conversation_id)
        for index in range(start // size, self.config.pages_for(end)):
            chunk = conversation.chunks[index]
            if max(start - index * size, 0) > ledger.filled[chunk]:
                raise IntegrityError(f"{conversation_id}: tokens before {start} were never computed")
            filled = min(end - index * size, size)
            if filled > ledger.filled[chunk]:
                ledger.fill(chunk, filled)
                if filled == size and index < len(conversation.keys):
                    self._prefixes.add(conversation.keys[index], chunk)

    def finish(self, conversation_id: str, now: float, token_ids: np.ndarray | None = None) -> None:
        """A turn has ended. Its KV stays, unless the cache keeps nothing (`keep_finished`).

        Args:
            conversation_id: a running conversation.
            now: the time.
            token_ids: i32[n]: its tokens, so that others can find its chunks; None: they can't.
        """
        conversation = self._park(conversation_id, now)
        conversation.had_turn = True
        if not self.config.keep_finished:
            self._cut(conversation, 0)
        elif token_ids is not None and self.config.share_prefixes:
            known = len(conversation.keys)
            self._prefixes.extend(conversation.keys, token_ids, conversation.tenant)
            for index in range(known, min(len(conversation.keys), len(conversation.chunks))):
                chunk = conversation.chunks[index]
                if chunk != NONE and self._ledger.filled[chunk] == self.config.page_tokens:
                    self._prefixes.add(conversation.keys[index], chunk)

    def suspend(self, conversation_id: str, now: float) -> None:
        """A turn is put back into the queue. Its KV stays, and may be evicted."""
        self._park(conversation_id, now)

    # -- hints -----------------------------------------------------------------------------------

    def warm(self, conversation_id: str) -> int:
        """A conversation's next turn is near: let `take_swap_ins` load what only the host has, as far as
        device pages are free or idle then.

        Returns:
            chunks that could be loaded; 0 if it runs or isn't known.
        """
        conversation = self._conversations.get(conversation_id)
        if conversation is None or conversation.running:
            return 0
        could = sum(map(self._could_warm, conversation.chunks))
        if could:
            self._to_warm.append(conversation_id)
        return could

    def _could_warm(self, chunk: int) -> bool:
        return chunk != NONE and self._ledger.flags[chunk] & (DEVICE | ARRIVING) == 0

    def release(self, conversation_id: str) -> None:
        """A conversation will hardly come back: its chunks may go at once. Nothing happens if it runs."""
        conversation = self._conversations.get(conversation_id)
        if conversation is not None and not conversation.running:
            self._cut(conversation, 0)

    # -- copies ----------------------------------------------------------------------------------

    def plan_ahead(self, now: float) -> None:
        """Plan copies to the host while few pages are free or reclaimable (paper 4.3.2)."""
        self.drop_expired(now)
        target = int(self.config.swap_out_below * self.config.device_pages)
        short = target - self._ledger.num_free_device - self._ledger.num_reclaimable
        short = min(short, self.config.max_swap_outs_per_step)
        if not self.config.host_pages:
            return
        while short > 0 and (found := self._ahead_order.peek(now)):
            worth, chunk = found
            if not self._copy_out(chunk, worth, now, ahead=True):
                return
            self._ahead_order.skip()
            short -= 1

    def take_swap_outs(self) -> tuple[PageCopy, ...]:
        """The copies to the host that were planned since the last call, for the next step's plan."""
        copies, self._swap_outs = tuple(self._swap_outs), []
        return copies

    @property
    def has_hints(self) -> bool:
        """Whether `take_swap_ins` may have something to load."""
        return bool(self._to_warm)

    def take_swap_ins(self, now: float) -> tuple[PageCopy, ...]:
        """Start the copies to the device that hints have asked for since the last call, for the next step's
        plan. They take the place of idle chunks, and leave alone what running requests may need."""
        copies: list[PageCopy] = []
        for conversation_id in self._to_warm:
            conversation = self._conversations.get(conversation_id)
            if conversation is not None and not conversation.running:
                for order in self._orders:  # its own chunks don't make room for each other
                    order.leave(conversation)
                copies.extend(self._load_idle(conversation, now))
                self._enter(conversation)
        self._to_warm = []
        self._counters.chunks_warmed += len(copies)
        return tuple(copies)

    def _load_idle(self, conversation: CachedConversation, now: float) -> Iterable[PageCopy]:
        ledger = self._ledger
        own = ledger.count_evictable(conversation.present())
        chunks = conversation.chunks
        for index in reversed(range(len(chunks))):  # what costs most to recompute first
            if self.num_available - own <= self.config.reserve_pages:
                return
            if self._could_warm(chunks[index]):
                self._make_room(1, now)
                if self._could_warm(chunks[index]):  # else what made room has taken its place in the host
                    yield ledger.start_load(chunks[index])

    def swap_outs_ended(self, copies: Iterable[PageCopy], *, ok: bool) -> None:
        """Note that copies to the host have ended. A failed one leaves its chunk without a host page."""
        changed: dict[int, CachedConversation] = {}
        for copy in copies:
            chunk = self._ledger.end_copy_out(copy)
            if chunk is None:
                continue
            owner = self._ledger.owner(chunk)
            changed[id(owner)] = owner
            if ok:
                self._counters.chunks_swapped_out += 1
            else:
                self._counters.failed_swap_outs += 1
                self._ledger.give_up_host(chunk)
                if not self._ledger.flags[chunk] & DEVICE:
                    self._ledger.remove(chunk)
        for conversation in changed.values():
            if not conversation.running:
                (self._host_order if ok else self._ahead_order).enter(conversation)

    def swap_ins_ended(self, copies: Iterable[PageCopy], *, ok: bool) -> None:
        """Note that copies to the device have ended. A failed one leaves its chunk in no tier.

        After a failure the running conversations of those chunks have to be suspended: they lack KV.
        """
        for copy in copies:
            chunk = self._ledger.end_load(copy)
            if chunk is None:
                continue
            owner = self._ledger.owner(chunk)
            if ok:
                self._counters.chunks_swapped_in += 1
                if self._ledger.pins[chunk]:
                    self._note_spare_copies([chunk])
            else:
                self._counters.failed_swap_ins += 1
                self._ledger.give_up_host(chunk)
                self._ledger.fill(chunk, 0)
                if not self._ledger.pins[chunk]:
                    self._ledger.remove(chunk)
            if not owner.running:
                self._enter(owner)

    # -- what others may look at -----------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Device pages that are free or can be had by evicting."""
        return self._ledger.num_free_device + self._ledger.num_evictable

    @property
    def num_chunks(self) -> int:
        """Chunks in some tier."""
        return self._ledger.num_chunks

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

    def _enter(self, conversation: CachedConversation) -> None:
        for order in self._orders:
            order.enter(conversation)

    def _adopt(
        self, conversation: CachedConversation, token_ids: np.ndarray | None, num_tokens: int
    ) -> frozenset[int]:
        """Take up chunks that others have and this conversation lacks.

        Returns:
            the chunks it has from others now.
        """
        if token_ids is None or not self.config.share_prefixes:
            return frozenset()
        size, chunks, adopted = self.config.page_tokens, conversation.chunks, set()
        self._prefixes.extend(conversation.keys, token_ids[:num_tokens], conversation.tenant)
        full = (num_tokens - 1) // size  # the last token is always computed
        for index in range(min(full, len(conversation.keys))):
            if index < len(chunks) and chunks[index] != NONE:
                continue
            chunk = self._prefixes.find(conversation.keys[index])
            if chunk is not None:
                chunks.extend([NONE] * (index + 1 - len(chunks)))
                chunks[index] = chunk
                self._ledger.share(chunk, conversation)
                adopted.add(chunk)
        return frozenset(adopted)

    def _park(self, conversation_id: str, now: float) -> CachedConversation:
        conversation = self._running(conversation_id)
        conversation.running = False
        conversation.last_active = now
        self._ledger.unpin(conversation.present(), conversation)
        self._strip(conversation)
        self._enter(conversation)
        self._expiry.watch(conversation)
        return conversation

    def _cut(self, conversation: CachedConversation, num_tokens: int) -> None:
        """Shorten an idle conversation's chunks to `num_tokens` tokens."""
        size, chunks = self.config.page_tokens, conversation.chunks
        pages = self.config.pages_for(num_tokens)
        before = len(chunks)
        for chunk in chunks[pages:]:
            if chunk != NONE:
                self._detach(chunk, conversation)
        del chunks[pages:]
        conversation.keys.cut(num_tokens // size)
        last = chunks[-1] if chunks else NONE
        if last != NONE:
            keep = num_tokens - (len(chunks) - 1) * size
            if self._ledger.filled[last] > keep:
                if self._ledger.flags[last] & SHARED:
                    self._detach(last, conversation)
                else:
                    self._ledger.fill(last, keep)
        self._strip(conversation)
        if len(chunks) != before:
            self._enter(conversation)

    def _detach(self, chunk: int, conversation: CachedConversation) -> None:
        heir = self._ledger.detach(chunk, conversation)
        if heir is not None and not heir.running:
            self._enter(heir)

    @staticmethod
    def _strip(conversation: CachedConversation) -> None:
        while conversation.chunks and conversation.chunks[-1] == NONE:
            conversation.chunks.pop()

    # -- eviction --------------------------------------------------------------------------------

    def _make_room(self, pages: int, now: float) -> None:
        """Evict until `pages` device pages are free: the shortfall, lowest value first. The caller has
        made sure that enough can be evicted."""
        ledger, order = self._ledger, self._device_order
        while ledger.num_free_device < pages:
            found = order.peek(now)
            assert found is not None, "enough is evictable"
            worth, chunk = found
            owner = ledger.owner(chunk)
            self._evict(chunk, worth, now)
            order.skip()
            if self.policy.whole:
                for other in list(owner.chunks):
                    if other != NONE and ledger.evictable(other):
                        self._evict(other, worth, now)

    def _evict(self, chunk: int, worth: float, now: float) -> None:
        """Take the device page of a chunk that nobody uses."""
        flags = self._ledger.flags[chunk]
        if flags & HOST:
            self._counters.pages_reclaimed += 1
            self._ledger.give_up_device(chunk)
        elif not flags & CHEAP and self._copy_out(chunk, worth, now, ahead=False):
            self._ledger.give_up_device(chunk)
        else:
            self._drop(chunk)

    def _copy_out(self, chunk: int, worth: float, now: float, *, ahead: bool) -> bool:
        """Plan the copy of a chunk to the host, in place of chunks that are worth less.

        Args:
            chunk: on the device, not in the host.
            worth: its value now.
            now: the time.
            ahead: its device page is not needed yet.

        Returns:
            False if the host has no page for it, since everything there is worth more, or if a step would
            have to wait for the copies under way.
        """
        if self._most_arriving is not None and self._ledger.num_arriving >= self._most_arriving:
            return False
        while (copy := self._ledger.start_copy_out(chunk)) is None:
            if self._give_up_spare_copy():
                continue
            found = self._host_order.peek(now)
            if found is None or found[0] >= worth:
                return False
            victim = found[1]
            if not self._ledger.flags[victim] & DEVICE:
                self._drop(victim)
            elif ahead:
                return False  # it would only take the reclaimable page of another chunk
            else:
                self._ledger.give_up_host(victim)
                self._ahead_order.enter(self._ledger.owner(victim))
            self._host_order.skip()
        self._swap_outs.append(copy)
        return True

    def _note_spare_copies(self, chunks: Iterable[int]) -> None:
        """A running conversation has chunks on the device and in the host."""
        self._spare_copies.extend(chunks)
        if len(self._spare_copies) > 2 * self.config.host_pages + 64:
            self._spare_copies = deque({c for c in self._spare_copies if self._spare_copy(c)})

    def _spare_copy(self, chunk: int) -> bool:
        wanted = DEVICE | HOST | PINNED
        return self._ledger.flags[chunk] & (wanted | ARRIVING | LOADING) == wanted

    def _give_up_spare_copy(self) -> bool:
        """Free the host page of a chunk that is in use on the device: a copy that nobody misses."""
        while self._spare_copies:
            chunk = self._spare_copies.popleft()
            if self._spare_copy(chunk):
                self._ledger.give_up_host(chunk)
                return True
        return False

    def _drop(self, chunk: int) -> None:
        self._counters.chunks_dropped += 1
        self._ledger.remove(chunk)


def _joined(starts: Iterable[int], ends: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranges [start, end) that aren't empty, ascending; those that touch are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def _cheaper_to_recompute(
    config: CacheConfig, cost: Callable[[int], float] | None
) -> Callable[[int], bool] | None:
    """Whether the chunk at an index takes less time to recompute than to load; None: nobody asks."""
    load_s = config.load_s_per_page
    if load_s is None:
        return None
    if cost is None:
        raise ValueError("cost: got None, expected the cost of recomputing, to hold load_s_per_page against")
    return lambda index: cost((index + 1) * config.page_tokens) < load_s
