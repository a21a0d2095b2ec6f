"""Moving whole pages between a pool and a staging array, and between pools."""

from pallas_kernels.page_move.api import copy_pages, gather_pages, scatter_pages

__all__ = ["copy_pages", "gather_pages", "scatter_pages"]
