"""Products of few rows with large matrices: the weights of a decode step, read at the speed of memory."""

from pallas_kernels.skinny_matmul.api import products
from pallas_kernels.skinny_matmul.tiling import MAX_TOKENS

__all__ = ["MAX_TOKENS", "products"]
