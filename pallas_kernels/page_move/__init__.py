"""Moving whole pages between a pool and a staging array, between pools, and from host memory."""

from pallas_kernels.page_move.api import (
    address_halves,
    copy_pages,
    gather_layers,
    gather_pages,
    read_pages,
    scatter_pages,
)

__all__ = ["address_halves", "copy_pages", "gather_layers", "gather_pages", "read_pages", "scatter_pages"]
