"""Writing new keys and values to their pages, in place; with the rotation before it in the same pass."""

from pallas_kernels.kv_write.api import kv_write, rotate_and_write
from pallas_kernels.kv_write.rotary import Rotary

__all__ = ["Rotary", "kv_write", "rotate_and_write"]
