"""The free list of one tier's pages."""

import heapq
from array import array

from host_cache.errors import IntegrityError


class PagePool:
    """Pages 0 .. num_pages - 1, each free or handed out. Last freed, first reused; or in order, the lowest
    first, so that pages that are handed out together lie together."""

    def __init__(self, num_pages: int, *, in_order: bool = False) -> None:
        """Args:
        num_pages: how many there are.
        in_order: hand out the lowest free page.
        """
        self.num_pages = num_pages
        self._free = list(range(num_pages)) if in_order else array("i", range(num_pages - 1, -1, -1))
        """A heap if in order."""
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages not handed out."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Hand out one page, or None if none is free."""
        if not self._free:
            return None
        page = heapq.heappop(self._free) if isinstance(self._free, list) else self._free.pop()
        self._is_free[page] = 0
        return page

    def release(self, page: int) -> None:
        """Take a page back.

        Raises:
            IntegrityError: the page is free already or isn't of this pool.
        """
        if not 0 <= page < self.num_pages or self._is_free[page]:
            raise IntegrityError(f"page {page} of {self.num_pages} is released but not handed out")
        self._is_free[page] = 1
        if isinstance(self._free, list):
            heapq.heappush(self._free, page)
        else:
            self._free.append(page)

    def free_pages(self) -> tuple[int, ...]:
        """All free pages, for checks and for poisoning them in tests."""
        return tuple(self._free)
