"""Which chunk has which page. The only place where chunks change.

When pages may be reused. A step reads the pages of its swap-outs before anything in it writes, so a
device page is free for use the moment its swap-out is planned. A host page is busy until the copy into
it (`Chunk.arriving`) or out of it (`Chunk.loading`) has ended.
"""

from collections.abc import Iterable

from host_cache.chunks import CachedConversation, Chunk
from host_cache.errors import IntegrityError
from host_cache.page_pool import PagePool
from host_cache.plan import PageCopy


class Ledger:
    """Pages of both tiers, the chunks they belong to, and the copies under way."""

    def __init__(self, *, device_pages: int, host_pages: int, page_tokens: int) -> None:
        self._device = PagePool(device_pages)
        self._host = PagePool(host_pages)
        self._page_tokens = page_tokens
        self._arriving: dict[int, Chunk | None] = {}
        """Host page -> its chunk while the copy into it runs; None once nobody wants it any more."""
        self._loading: dict[int, Chunk] = {}
        """Host page -> its chunk while the copy out of it runs."""
        self.num_evictable = 0
        """Chunks whose device page can be had at once."""
        self.num_reclaimable = 0
        """Those of them that the host has too, or will."""

    @property
    def num_free_device(self) -> int:
        """Device pages that hold nothing."""
        return self._device.num_free

    def free_device_pages(self) -> tuple[int, ...]:
        """Device pages that hold nothing."""
        return self._device.free_pages()

    # -- chunks ----------------------------------------------------------------------------------

    def new_chunk(self, conversation: CachedConversation, index: int) -> Chunk:
        """An empty, pinned chunk with a device page. The caller has made room."""
        page = self._device.allocate()
        assert page is not None, "room was made before"
        return Chunk(index, [conversation], device_page=page, pins=1)

    def pin(self, chunk: Chunk) -> None:
        """A conversation that has the chunk runs."""
        self._count(chunk, -1)
        chunk.pins += 1
        self._count(chunk, +1)

    def unpin(self, chunk: Chunk) -> None:
        """A conversation that has the chunk has stopped. An empty chunk goes with the last one."""
        self._count(chunk, -1)
        chunk.pins -= 1
        self._count(chunk, +1)
        if chunk.filled == 0 and chunk.pins == 0:
            self.remove(chunk)

    def detach(self, chunk: Chunk, conversation: CachedConversation) -> None:
        """Take a chunk away from one conversation; the last one takes its pages along."""
        if len(chunk.sharers) == 1:
            self.remove(chunk)
        else:
            chunk.sharers.remove(conversation)
            conversation.chunks[chunk.index] = None

    def remove(self, chunk: Chunk) -> None:
        """Take a chunk out of both tiers and of all its conversations."""
        if chunk.loading or chunk.pins:
            raise IntegrityError(f"chunk {chunk.index} of {chunk.sharers[0].id} is removed while in use")
        self.give_up_host(chunk)
        self.give_up_device(chunk)
        for conversation in chunk.sharers:
            conversation.chunks[chunk.index] = None

    def give_up_device(self, chunk: Chunk) -> None:
        """Free the device page, if there is one."""
        if chunk.device_page is not None:
            self._count(chunk, -1)
            self._device.release(chunk.device_page)
            chunk.device_page = None
            self._count(chunk, +1)

    def give_up_host(self, chunk: Chunk) -> None:
        """Free the host page, if there is one: at once, or when the copy into it has ended."""
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

    # -- copies ----------------------------------------------------------------------------------

    def start_load(self, chunk: Chunk) -> PageCopy:
        """Give a chunk that is only in the host a device page, to be loaded. The caller has made room."""
        page, host_page = self._device.allocate(), chunk.host_page
        assert page is not None and host_page is not None, "room was made before; a chunk is in some tier"
        self._count(chunk, -1)
        chunk.device_page, chunk.loading = page, True
        self._count(chunk, +1)
        self._loading[host_page] = chunk
        return PageCopy(device_page=page, host_page=host_page)

    def end_load(self, copy: PageCopy) -> Chunk:
        """The copy has ended; the host page may be given up again.

        Returns:
            the chunk that was loaded.
        """
        chunk = self._loading.pop(copy.host_page)
        chunk.loading = False
        return chunk

    def start_copy_out(self, chunk: Chunk) -> PageCopy | None:
        """Give a chunk on the device a host page, to be copied to; None if the host has none free."""
        page = self._host.allocate()
        if page is None:
            return None
        assert chunk.device_page is not None and chunk.host_page is None
        self._count(chunk, -1)
        chunk.host_page, chunk.arriving = page, True
        self._count(chunk, +1)
        self._arriving[page] = chunk
        return PageCopy(device_page=chunk.device_page, host_page=page)

    def end_copy_out(self, copy: PageCopy) -> Chunk | None:
        """The copy has ended; the host page may be loaded and given up.

        Returns:
            the chunk that was copied; None if it had given the page up, which is free now.
        """
        chunk = self._arriving.pop(copy.host_page)
        if chunk is None:
            self._host.release(copy.host_page)
        else:
            chunk.arriving = False
        return chunk

    def _count(self, chunk: Chunk, sign: int) -> None:
        """Take a chunk out of the counts before it changes (-1), put it back after (+1)."""
        self.num_evictable += sign * chunk.evictable
        self.num_reclaimable += sign * chunk.reclaimable

    # -- the check -------------------------------------------------------------------------------

    def check(self, conversations: Iterable[CachedConversation]) -> None:
        """Check that every page is free, owned once or in flight, and that every count adds up.

        Raises:
            IntegrityError: says what doesn't hold.
        """
        pins: dict[int, int] = {}
        chunks: dict[int, Chunk] = {}
        for conversation in conversations:
            for index, chunk in enumerate(conversation.chunks):
                if chunk is None:
                    _check(not conversation.running, f"{conversation.id} runs without its chunk {index}")
                    continue
                _check(chunk.index == index, f"{conversation.id}: chunk {chunk.index} stands at {index}")
                _check(conversation in chunk.sharers, f"{conversation.id}: chunk {index} doesn't know it")
                if conversation.running:
                    right = (
                        chunk.device_page is not None and conversation.page_ids[index] == chunk.device_page
                    )
                    _check(right, f"{conversation.id} runs: its page table is wrong at {index}")
                chunks[id(chunk)] = chunk
                pins[id(chunk)] = pins.get(id(chunk), 0) + conversation.running
        for key, chunk in chunks.items():
            self._check_chunk(chunk, pins[key])
        device = [c.device_page for c in chunks.values() if c.device_page is not None]
        host = [c.host_page for c in chunks.values() if c.host_page is not None]
        host += [page for page, chunk in self._arriving.items() if chunk is None]
        for pool, owned, tier in ((self._device, device, "device"), (self._host, host, "host")):
            everything = sorted([*owned, *pool.free_pages()])
            _check(everything == list(range(pool.num_pages)), f"{tier} pages are lost or owned twice")
        evictable = sum(c.evictable for c in chunks.values())
        reclaimable = sum(c.reclaimable for c in chunks.values())
        counted = (self.num_evictable, self.num_reclaimable)
        _check(counted == (evictable, reclaimable), f"{counted} counted, {(evictable, reclaimable)} found")

    def _check_chunk(self, chunk: Chunk, running: int) -> None:
        name = f"chunk {chunk.index} of {[sharer.id for sharer in chunk.sharers]}"
        _check(chunk.pins == running, f"{name}: {chunk.pins} pins, {running} running")
        _check(len(chunk.sharers) == 1 or chunk.filled == self._page_tokens, f"{name}: shared, not full")
        _check(all(s.chunks[chunk.index] is chunk for s in chunk.sharers), f"{name}: sharers have another")
        _check(chunk.device_page is not None or chunk.host_page is not None, f"{name}: in no tier")
        _check(0 <= chunk.filled <= self._page_tokens, f"{name}: {chunk.filled} filled")
        _check(chunk.filled > 0 or chunk.pins > 0, f"{name}: empty and not running")
        page = chunk.host_page
        arriving = page is not None and self._arriving.get(page) is chunk
        loading = page is not None and self._loading.get(page) is chunk
        _check((chunk.arriving, chunk.loading) == (arriving, loading), f"{name}: copies under way")


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise IntegrityError(what)
