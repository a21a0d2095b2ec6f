"""Which chunk has which page. The only place where chunks change.

Chunks are numbers into arrays, some twenty bytes each, since a server knows millions of them.

When pages may be reused. A step reads the pages of its swap-outs before anything in it writes, so a
device page is free for use the moment its swap-out is planned. A host page is busy until the copy into
it (`arriving`) or out of it (`loading`) has ended.
"""

from array import array
from collections.abc import Iterable

from host_cache.conversation import CachedConversation
from host_cache.errors import IntegrityError
from host_cache.page_pool import PagePool
from host_cache.plan import PageCopy
from host_cache.prefix_index import PrefixIndex

NONE = -1
"""In the arrays of this package: no chunk, no page. Never handed out."""
ARRIVING = 1
"""Flag: the copy into the host page has not ended; it may not be loaded yet."""
LOADING = 2
"""Flag: the copy into the device page has not ended; the host page may not be freed yet."""


class Ledger:
    """Pages of both tiers, the chunks they belong to, and the copies under way.

    A chunk is KV of consecutive tokens of one or more conversations that share this prefix. One with
    several sharers is full and never written again. A chunk in no tier does not exist: its place in its
    conversations holds `NONE`.
    """

    def __init__(
        self, *, device_pages: int, host_pages: int, page_tokens: int, prefixes: PrefixIndex
    ) -> None:
        self._prefixes = prefixes
        self._device = PagePool(device_pages)
        self._host = PagePool(host_pages, in_order=True)
        self._page_tokens = page_tokens
        self.index = array("i")
        """Place in its conversations: the chunk holds tokens index * page_tokens and on."""
        self.device_page = array("i")
        self.host_page = array("i")
        self.filled = array("H")
        """Tokens whose KV is valid, from the chunk's start, in every tier that has a page."""
        self.pins = array("H")
        """Running conversations that use it. A pinned chunk keeps its device page."""
        self.flags = bytearray()
        self._owner: list[CachedConversation | None] = []
        """The sharer that was active last: the chunk leaves with it."""
        self._sharers: dict[int, list[CachedConversation]] = {}
        """Of chunks that have more than one."""
        self._free_chunks: list[int] = []
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
        return len(self.index) - len(self._free_chunks)

    @property
    def num_arriving(self) -> int:
        """Copies to the host that have not ended."""
        return len(self._arriving)

    def free_device_pages(self) -> tuple[int, ...]:
        """Device pages that hold nothing."""
        return self._device.free_pages()

    # -- questions -------------------------------------------------------------------------------

    def on_device(self, chunk: int) -> bool:
        """Whether it has a device page, loaded or about to be."""
        return self.device_page[chunk] != NONE

    def in_host(self, chunk: int) -> bool:
        """Whether it has a host page, written or about to be."""
        return self.host_page[chunk] != NONE

    def arriving(self, chunk: int) -> bool:
        """Whether the copy into its host page has not ended."""
        return bool(self.flags[chunk] & ARRIVING)

    def evictable(self, chunk: int) -> bool:
        """Whether its device page can be had at once."""
        return self.device_page[chunk] != NONE and not self.pins[chunk] and not self.flags[chunk] & LOADING

    def host_page_is_free_to_go(self, chunk: int) -> bool:
        """Whether its host page can be had at once. A running conversation may be about to load what it has
        only there."""
        if self.host_page[chunk] == NONE or self.flags[chunk]:
            return False
        return not self.pins[chunk] or self.device_page[chunk] != NONE

    def shared(self, chunk: int) -> bool:
        """Whether it belongs to more than one conversation."""
        return chunk in self._sharers

    def sharers(self, chunk: int) -> list[CachedConversation]:
        """The conversations it belongs to."""
        owner = self._owner[chunk]
        assert owner is not None
        return self._sharers.get(chunk) or [owner]

    def owner(self, chunk: int) -> CachedConversation:
        """The sharer that was active last."""
        owner = self._owner[chunk]
        assert owner is not None
        return owner

    # -- chunks ----------------------------------------------------------------------------------

    def new_chunk(self, conversation: CachedConversation, index: int) -> int:
        """An empty, pinned chunk with a device page. The caller has made room."""
        page = self._device.allocate()
        assert page is not None, "room was made before"
        if self._free_chunks:
            chunk = self._free_chunks.pop()
        else:
            chunk = len(self.index)
            for column in (self.index, self.device_page, self.host_page, self.filled, self.pins, self.flags):
                column.append(0)
            self._owner.append(None)
        self.index[chunk] = index
        self.device_page[chunk] = page
        self.host_page[chunk] = NONE
        self.filled[chunk] = 0
        self.pins[chunk] = 1
        self.flags[chunk] = 0
        self._owner[chunk] = conversation
        return chunk

    def pin(self, chunk: int) -> None:
        """A conversation that has the chunk runs."""
        self._count(chunk, -1)
        self.pins[chunk] += 1
        self._count(chunk, +1)

    def unpin(self, chunk: int, conversation: CachedConversation) -> None:
        """A conversation that has the chunk has stopped: it was active last now. An empty chunk goes with the
        last one that runs."""
        self._count(chunk, -1)
        self.pins[chunk] -= 1
        self._count(chunk, +1)
        self._owner[chunk] = conversation
        if self.filled[chunk] == 0 and not self.pins[chunk]:
            self.remove(chunk)

    def share(self, chunk: int, conversation: CachedConversation) -> None:
        """Let a conversation have a full chunk too."""
        owner = self.owner(chunk)
        self._sharers.setdefault(chunk, [owner]).append(conversation)
        if conversation.last_active >= owner.last_active:
            self._owner[chunk] = conversation

    def detach(self, chunk: int, conversation: CachedConversation) -> CachedConversation | None:
        """Take a chunk away from one conversation; the last one takes its pages along.

        Returns:
            the conversation that the chunk leaves with from now on, if that has changed.
        """
        if chunk not in self._sharers:
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
        return heir

    def remove(self, chunk: int) -> None:
        """Take a chunk out of both tiers and of all its conversations."""
        if self.pins[chunk]:
            raise IntegrityError(
                f"chunk {self.index[chunk]} of {self.owner(chunk).id} is removed while in use"
            )
        if self.flags[chunk] & LOADING:
            host_page = self.host_page[chunk]
            del self._loading[host_page]
            self._abandoned.add(PageCopy(device_page=self.device_page[chunk], host_page=host_page))
        else:
            self.give_up_host(chunk)
            self.give_up_device(chunk)
        for conversation in self.sharers(chunk):
            conversation.chunks[self.index[chunk]] = NONE
        self._sharers.pop(chunk, None)
        self._prefixes.remove(chunk)
        self._owner[chunk] = None
        self._free_chunks.append(chunk)

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
        page = self.device_page[chunk]
        if page != NONE:
            self._count(chunk, -1)
            self._device.release(page)
            self.device_page[chunk] = NONE
            self._count(chunk, +1)

    def give_up_host(self, chunk: int) -> None:
        """Free the host page, if there is one: at once, or when the copy into it has ended."""
        page = self.host_page[chunk]
        if page == NONE:
            return
        if self.flags[chunk] & LOADING:
            raise IntegrityError(f"host page {page} is given up while it is read")
        self._count(chunk, -1)
        if self.flags[chunk] & ARRIVING:
            self._arriving[page] = NONE
            self.flags[chunk] &= ~ARRIVING
        else:
            self._host.release(page)
        self.host_page[chunk] = NONE
        self._count(chunk, +1)

    # -- copies ----------------------------------------------------------------------------------

    def start_load(self, chunk: int) -> PageCopy:
        """Give a chunk that is only in the host a device page, to be loaded. The caller has made room."""
        page, host_page = self._device.allocate(), self.host_page[chunk]
        assert page is not None and host_page != NONE, "room was made before; a chunk is in some tier"
        self._count(chunk, -1)
        self.device_page[chunk] = page
        self.flags[chunk] |= LOADING
        self._count(chunk, +1)
        self._loading[host_page] = chunk
        return PageCopy(device_page=page, host_page=host_page)

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
        self._count(chunk, -1)
        self.flags[chunk] &= ~LOADING
        self._count(chunk, +1)
        return chunk

    def start_copy_out(self, chunk: int) -> PageCopy | None:
        """Give a chunk on the device a host page, to be copied to; None if the host has none free."""
        page = self._host.allocate()
        if page is None:
            return None
        assert self.device_page[chunk] != NONE and self.host_page[chunk] == NONE
        self._count(chunk, -1)
        self.host_page[chunk] = page
        self.flags[chunk] |= ARRIVING
        self._count(chunk, +1)
        self._arriving[page] = chunk
        return PageCopy(device_page=self.device_page[chunk], host_page=page)

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

    def _count(self, chunk: int, sign: int) -> None:
        """Take a chunk out of the counts before it changes (-1), put it back after (+1)."""
        if self.evictable(chunk):
            self.num_evictable += sign
            if self.host_page[chunk] != NONE:
                self.num_reclaimable += sign

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
                    right = self.on_device(chunk) and conversation.page_ids[index] == self.device_page[chunk]
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
        reclaimable = sum(self.evictable(c) and self.in_host(c) for c in seen)
        counted = (self.num_evictable, self.num_reclaimable)
        _check(counted == (evictable, reclaimable), f"{counted} counted, {(evictable, reclaimable)} found")

    def _check_chunk(self, chunk: int, having: list[CachedConversation], running: int) -> None:
        name = f"chunk {self.index[chunk]} of {[c.id for c in having]}"
        pins, filled, page = self.pins[chunk], self.filled[chunk], self.host_page[chunk]
        _check(sorted(map(id, having)) == sorted(map(id, self.sharers(chunk))), f"{name}: sharers")
        _check(self._owner[chunk] in having, f"{name}: its owner doesn't have it")
        _check(pins == running, f"{name}: {pins} pins, {running} running")
        _check(len(having) == 1 or filled == self._page_tokens, f"{name}: shared, not full")
        _check(self.on_device(chunk) or self.in_host(chunk), f"{name}: in no tier")
        _check(filled <= self._page_tokens, f"{name}: {filled} filled")
        _check(filled > 0 or pins > 0, f"{name}: empty and not running")
        arriving = page != NONE and self._arriving.get(page) == chunk
        loading = page != NONE and self._loading.get(page) == chunk
        _check(self.flags[chunk] == ARRIVING * arriving + LOADING * loading, f"{name}: copies under way")


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise IntegrityError(what)
