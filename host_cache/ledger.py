"""Which chunk has which page. The only place where chunks change.

Chunks are numbers into arrays, some twenty bytes each, since a server knows millions of them. What can be
done with one depends on its flags alone.

When pages may be reused. A step reads the pages of its swap-outs before anything in it writes, so a
device page is free for use the moment its swap-out is planned. A host page is busy until the copy into
it (`ARRIVING`) or out of it (`LOADING`) has ended.
"""

from collections.abc import Callable, Iterable

import numpy as np

from host_cache.conversation import CachedConversation
from host_cache.errors import IntegrityError
from host_cache.page_pool import PagePool
from host_cache.plan import PageCopy
from host_cache.prefix_index import PrefixIndex

NONE = -1
"""In the arrays of this package: no chunk, no page. Never handed out."""
DEVICE = 1
"""Flag: it has a device page, loaded or about to be."""
HOST = 2
"""Flag: it has a host page, written or about to be."""
ARRIVING = 4
"""Flag: the copy into the host page has not ended; it may not be loaded yet."""
LOADING = 8
"""Flag: the copy into the device page has not ended; the host page may not be freed yet."""
PINNED = 16
"""Flag: a running conversation has it. It keeps its device page."""
SHARED = 32
"""Flag: it belongs to more than one conversation."""
CHEAP = 64
"""Flag: to recompute it takes less time than to load it."""
_EVICTABLE = bytes(flags & (DEVICE | PINNED | LOADING) == DEVICE for flags in range(128))
_RECLAIMABLE = bytes(evictable and bool(flags & HOST) for flags, evictable in enumerate(_EVICTABLE))
_EVICTABLE_MANY = np.frombuffer(_EVICTABLE, np.uint8)
_RECLAIMABLE_MANY = np.frombuffer(_RECLAIMABLE, np.uint8)


class Ledger:
    """Pages of both tiers, the chunks they belong to, and the copies under way.

    A chunk is KV of consecutive tokens of one or more conversations that share this prefix. One with
    several sharers is full and never written again. A chunk in no tier does not exist: its place in its
    conversations holds `NONE`.
    """

    def __init__(
        self,
        *,
        device_pages: int,
        host_pages: int,
        page_tokens: int,
        prefixes: PrefixIndex,
        is_cheap: Callable[[int], bool] | None,
    ) -> None:
        """Args:
        device_pages: pages of the device tier.
        host_pages: pages of the host tier.
        page_tokens: tokens of a page.
        prefixes: forgets chunks that are gone.
        is_cheap: whether the chunk at an index takes less time to recompute than to load; None: never.
        """
        self._prefixes = prefixes
        self._is_cheap = is_cheap
        self._device = PagePool(device_pages)
        self._host = PagePool(host_pages, in_order=True)
        self._page_tokens = page_tokens
        most = device_pages + host_pages  # a chunk has a page somewhere
        self._numbers = PagePool(most)
        self._device_page = np.zeros(most, np.int32)
        self._filled = np.zeros(most, np.uint16)
        self._pins = np.zeros(most, np.uint16)
        self._flags = np.zeros(most, np.uint8)
        self.index = memoryview(np.zeros(most, np.int32))
        """Place in its conversations: the chunk holds tokens index * page_tokens and on."""
        self.device_page = memoryview(self._device_page)
        """`NONE` without the flag `DEVICE`."""
        self.host_page = memoryview(np.zeros(most, np.int32))
        """`NONE` without the flag `HOST`."""
        self.filled = memoryview(self._filled)
        """Tokens whose KV is valid, from the chunk's start, in every tier that has a page."""
        self.pins = memoryview(self._pins)
        """Running conversations that use it."""
        self.flags = memoryview(self._flags)
        """Sum of the constants above. Changed by `_set` and the operations on many chunks."""
        self._owner: list[CachedConversation | None] = [None] * most
        """The sharer that was active last: the chunk leaves with it."""
        self._sharers: dict[int, list[CachedConversation]] = {}
        """Of chunks that have more than one."""
        self._arriving: dict[int, int] = {}
        """Host page -> its chunk while the copy into it runs; `NONE` once nobody wants it any more."""
        self._loading: dict[int, int] = {}
        """Host page -> its chunk while the copy out of it runs."""
        self._abandoned: set[PageCopy] = set()
        """Copies to the device under way whose chunk is gone; both pages are busy until they have ended."""
        self.num_evictable = 0
        """Chunks whose device page can be had at once."""
        self.num_reclaimable = 0
        """Those of them that the host has too, or will."""

    @property
    def num_free_device(self) -> int:
        """Device pages that hold nothing."""
        return self._device.num_free

    @property
    def num_chunks(self) -> int:
        """Chunks in some tier."""
        return self._numbers.num_pages - self._numbers.num_free

    @property
    def num_arriving(self) -> int:
        """Copies to the host that have not ended."""
        return len(self._arriving)

    def free_device_pages(self) -> tuple[int, ...]:
        """Device pages that hold nothing."""
        return self._device.free_pages()

    # -- questions -------------------------------------------------------------------------------

    def evictable(self, chunk: int) -> bool:
        """Whether its device page can be had at once."""
        return bool(_EVICTABLE[self.flags[chunk]])

    def count_evictable(self, chunks: np.ndarray) -> int:
        """How many of these chunks, i32[n], have device pages that can be had at once."""
        return int(_EVICTABLE_MANY[self._flags[chunks]].sum())

    def sharers(self, chunk: int) -> list[CachedConversation]:
        """The conversations it belongs to."""
        return self._sharers.get(chunk) or [self.owner(chunk)]

    def owner(self, chunk: int) -> CachedConversation:
        """The sharer that was active last."""
        owner = self._owner[chunk]
        assert owner is not None
        return owner

    def flags_of(self, chunks: np.ndarray) -> np.ndarray:
        """u8[n]: flags of many chunks."""
        return self._flags[chunks]

    def filled_of(self, chunks: np.ndarray) -> np.ndarray:
        """i64[n]: valid tokens of many chunks."""
        return self._filled[chunks].astype(np.int64)

    def device_pages_of(self, chunks: np.ndarray) -> np.ndarray:
        """i32[n]: device pages of many chunks."""
        return self._device_page[chunks]

    # -- chunks ----------------------------------------------------------------------------------

    def new_chunk(self, conversation: CachedConversation, index: int) -> int:
        """An empty, pinned chunk with a device page. The caller has made room."""
        page, chunk = self._device.allocate(), self._numbers.allocate()
        assert page is not None and chunk is not None, "room was made before"
        self.index[chunk] = index
        self.device_page[chunk] = page
        self.host_page[chunk] = NONE
        self.filled[chunk] = 0
        self.pins[chunk] = 1
        cheap = self._is_cheap is not None and self._is_cheap(index)
        self.flags[chunk] = DEVICE | PINNED | CHEAP if cheap else DEVICE | PINNED
        self._owner[chunk] = conversation
        return chunk

    def pin(self, chunks: np.ndarray) -> None:
        """A conversation runs that has these chunks, i32[n]."""
        flags = self._flags[chunks]
        self._pins[chunks] += 1
        self._set_many(chunks, flags, flags | PINNED)

    def unpin(self, chunks: np.ndarray, conversation: CachedConversation) -> None:
        """A conversation that has these chunks, i32[n], has stopped: it was active last now. An empty chunk
        goes with the last one that runs."""
        flags = self._flags[chunks]
        self._pins[chunks] -= 1
        stay = (self._pins[chunks] > 0) * np.uint8(PINNED)
        self._set_many(chunks, flags, flags & ~np.uint8(PINNED) | stay)
        for chunk in chunks[flags & SHARED != 0].tolist():
            self._owner[chunk] = conversation
        for chunk in chunks[(self._filled[chunks] == 0) & (stay == 0)].tolist():
            self.remove(chunk)

    def share(self, chunk: int, conversation: CachedConversation) -> None:
        """Let a conversation have a full chunk too."""
        owner = self.owner(chunk)
        self._sharers.setdefault(chunk, [owner]).append(conversation)
        self.flags[chunk] |= SHARED
        if conversation.last_active >= owner.last_active:
            self._owner[chunk] = conversation

    def detach(self, chunk: int, conversation: CachedConversation) -> CachedConversation | None:
        """Take a chunk away from one conversation; the last one takes its pages along.

        Returns:
            the conversation that the chunk leaves with from now on, if that has changed.
        """
        if not self.flags[chunk] & SHARED:
            self.remove(chunk)
            return None
        sharers = self._sharers[chunk]
        sharers.remove(conversation)
        conversation.chunks[self.index[chunk]] = NONE
        heir = None
        if self._owner[chunk] is conversation:
            heir = self._owner[chunk] = max(sharers, key=lambda sharer: sharer.last_active)
        if len(sharers) == 1:
            del self._sharers[chunk]
            self.flags[chunk] &= ~SHARED
        return heir

    def remove(self, chunk: int) -> None:
        """Take a chunk out of both tiers and of all its conversations."""
        flags = self.flags[chunk]
        if flags & PINNED:
            raise IntegrityError(
                f"chunk {self.index[chunk]} of {self.owner(chunk).id} is removed while in use"
            )
        if flags & LOADING:
            host_page = self.host_page[chunk]
            del self._loading[host_page]
            self._abandoned.add(PageCopy(self.device_page[chunk], host_page))
        else:
            if flags & HOST:
                self.give_up_host(chunk)
            if flags & DEVICE:
                self.give_up_device(chunk)
        if flags & SHARED:
            for conversation in self._sharers.pop(chunk):
                conversation.chunks[self.index[chunk]] = NONE
        else:
            self.owner(chunk).chunks[self.index[chunk]] = NONE
        self._prefixes.remove(chunk)
        self._owner[chunk] = None
        self._numbers.release(chunk)

    def fill(self, chunk: int, filled: int) -> None:
        """Note how many tokens of a chunk are valid now. A copy of a chunk that grew is stale and given up; a
        chunk that shrank can't be found by its content any more."""
        if filled > self.filled[chunk]:
            self.give_up_host(chunk)
        else:
            self._prefixes.remove(chunk)
        self.filled[chunk] = filled

    def give_up_device(self, chunk: int) -> None:
        """Free the device page, if there is one."""
        flags = self.flags[chunk]
        if flags & DEVICE:
            self._device.release(self.device_page[chunk])
            self.device_page[chunk] = NONE
            self._set(chunk, flags & ~DEVICE)

    def give_up_host(self, chunk: int) -> None:
        """Free the host page, if there is one: at once, or when the copy into it has ended."""
        flags = self.flags[chunk]
        if not flags & HOST:
            return
        page = self.host_page[chunk]
        if flags & LOADING:
            raise IntegrityError(f"host page {page} is given up while it is read")
        if flags & ARRIVING:
            self._arriving[page] = NONE
        else:
            self._host.release(page)
        self.host_page[chunk] = NONE
        self._set(chunk, flags & ~(HOST | ARRIVING))

    # -- copies ----------------------------------------------------------------------------------

    def start_load(self, chunk: int) -> PageCopy:
        """Give a chunk that is only in the host a device page, to be loaded. The caller has made room."""
        page, host_page = self._device.allocate(), self.host_page[chunk]
        assert page is not None and host_page != NONE, "room was made before; a chunk is in some tier"
        self.device_page[chunk] = page
        self._set(chunk, self.flags[chunk] | DEVICE | LOADING)
        self._loading[host_page] = chunk
        return PageCopy(page, host_page)

    def end_load(self, copy: PageCopy) -> int | None:
        """The copy has ended; the host page may be given up again.

        Returns:
            the chunk that was loaded; None if it was removed meanwhile, and its pages are free now.
        """
        if copy in self._abandoned:
            self._abandoned.remove(copy)
            self._host.release(copy.host_page)
            self._device.release(copy.device_page)
            return None
        chunk = self._loading.pop(copy.host_page)
        self._set(chunk, self.flags[chunk] & ~LOADING)
        return chunk

    def start_copy_out(self, chunk: int) -> PageCopy | None:
        """Give a chunk on the device a host page, to be copied to; None if the host has none free."""
        page = self._host.allocate()
        if page is None:
            return None
        flags = self.flags[chunk]
        assert flags & (DEVICE | HOST) == DEVICE
        self.host_page[chunk] = page
        self._set(chunk, flags | HOST | ARRIVING)
        self._arriving[page] = chunk
        return PageCopy(self.device_page[chunk], page)

    def end_copy_out(self, copy: PageCopy) -> int | None:
        """The copy has ended; the host page may be loaded and given up.

        Returns:
            the chunk that was copied; None if it had given the page up, which is free now.
        """
        chunk = self._arriving.pop(copy.host_page)
        if chunk == NONE:
            self._host.release(copy.host_page)
            return None
        self.flags[chunk] &= ~ARRIVING
        return chunk

    def _set(self, chunk: int, flags: int) -> None:
        """Change a chunk's flags, and the counts with them."""
        before = self.flags[chunk]
        self.flags[chunk] = flags
        self.num_evictable += _EVICTABLE[flags] - _EVICTABLE[before]
        self.num_reclaimable += _RECLAIMABLE[flags] - _RECLAIMABLE[before]

    def _set_many(self, chunks: np.ndarray, before: np.ndarray, flags: np.ndarray) -> None:
        self._flags[chunks] = flags
        for name, table in (("num_evictable", _EVICTABLE_MANY), ("num_reclaimable", _RECLAIMABLE_MANY)):
            change = int(table[flags].sum()) - int(table[before].sum())
            setattr(self, name, getattr(self, name) + change)

    # -- the check -------------------------------------------------------------------------------

    def check(self, conversations: Iterable[CachedConversation]) -> None:
        """Check that every page is free, owned once or in flight, and that every count adds up.

        Raises:
            IntegrityError: says what doesn't hold.
        """
        pins: dict[int, int] = {}
        seen: dict[int, list[CachedConversation]] = {}
        for conversation in conversations:
            for index, chunk in enumerate(conversation.chunks):
                if chunk == NONE:
                    _check(not conversation.running, f"{conversation.id} runs without its chunk {index}")
                    continue
                _check(self.index[chunk] == index, f"{conversation.id}: chunk {chunk} stands at {index}")
                if conversation.running:
                    right = conversation.page_ids[index] == self.device_page[chunk] != NONE
                    _check(right, f"{conversation.id} runs: its page table is wrong at {index}")
                seen.setdefault(chunk, []).append(conversation)
                pins[chunk] = pins.get(chunk, 0) + conversation.running
        for chunk, having in seen.items():
            self._check_chunk(chunk, having, pins[chunk])
        _check(len(seen) == self.num_chunks, f"{self.num_chunks} chunks counted, {len(seen)} found")
        device = [self.device_page[c] for c in seen if self.device_page[c] != NONE]
        host = [self.host_page[c] for c in seen if self.host_page[c] != NONE]
        host += [page for page, chunk in self._arriving.items() if chunk == NONE]
        device += [copy.device_page for copy in self._abandoned]
        host += [copy.host_page for copy in self._abandoned]
        for pool, owned, tier in ((self._device, device, "device"), (self._host, host, "host")):
            everything = sorted([*owned, *pool.free_pages()])
            _check(everything == list(range(pool.num_pages)), f"{tier} pages are lost or owned twice")
        evictable = sum(self.evictable(c) for c in seen)
        reclaimable = sum(_RECLAIMABLE[self.flags[c]] for c in seen)
        counted = (self.num_evictable, self.num_reclaimable)
        _check(counted == (evictable, reclaimable), f"{counted} counted, {(evictable, reclaimable)} found")

    def _check_chunk(self, chunk: int, having: list[CachedConversation], running: int) -> None:
        name = f"chunk {self.index[chunk]} of {[c.id for c in having]}"
        pins, filled, page = self.pins[chunk], self.filled[chunk], self.host_page[chunk]
        _check(sorted(map(id, having)) == sorted(map(id, self.sharers(chunk))), f"{name}: sharers")
        _check(self._owner[chunk] in having, f"{name}: its owner doesn't have it")
        _check(pins == running, f"{name}: {pins} pins, {running} running")
        _check(len(having) == 1 or filled == self._page_tokens, f"{name}: shared, not full")
        _check(self.device_page[chunk] != NONE or page != NONE, f"{name}: in no tier")
        _check(filled <= self._page_tokens, f"{name}: {filled} filled")
        _check(filled > 0 or pins > 0, f"{name}: empty and not running")
        arriving = page != NONE and self._arriving.get(page) == chunk
        loading = page != NONE and self._loading.get(page) == chunk
        cheap = self._is_cheap is not None and self._is_cheap(self.index[chunk])
        parts = (
            (DEVICE, self.device_page[chunk] != NONE),
            (HOST, page != NONE),
            (ARRIVING, arriving),
            (LOADING, loading),
            (PINNED, pins > 0),
            (SHARED, len(having) > 1),
            (CHEAP, cheap),
        )
        _check(self.flags[chunk] == sum(flag for flag, on in parts if on), f"{name}: flags")


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise IntegrityError(what)
