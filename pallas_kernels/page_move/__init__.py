"""Moving whole pages between a pool and a staging array."""

from pallas_kernels.page_move.api import gather_pages, scatter_pages

__all__ = ["gather_pages", "scatter_pages"]
