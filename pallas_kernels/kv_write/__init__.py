"""Writing new keys and values to their pages, in place."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
