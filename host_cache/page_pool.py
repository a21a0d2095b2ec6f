"""The free list of one tier's pages."""

from array import array

from host_cache.errors import IntegrityError


class PagePool:
    """Pages 0 .. num_pages - 1, each free or handed out. Last freed, first reused."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages not handed out."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Hand out one page, or None if none is free."""
        if not self._free:
            return None
        page = self._free.pop()
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
        self._free.append(page)

    def is_free(self, page: int) -> bool:
        """Whether the page may be handed out."""
        return bool(self._is_free[page])

    def free_pages(self) -> tuple[int, ...]:
        """All free pages, for checks and for poisoning them in tests."""
        return tuple(self._free)
