"""What the parts of the kernel for Hopper GPUs share."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.multi_token_attention.schedule import ALIGN, BLOCK_KV, TILE_Q, narrow_stride

NEVER = -1e30
"""Start of a running maximum: finite, so that a row that sees no key yet stays free of NaN."""
LOG2E = math.log2(math.e)
HEAD_SIZES = (64, 80, 96, 128, 256)
"""Multiples of 16, the depth of a product's step. Keys and values lie in tiles as wide as divide the head:
64 columns, of 96 columns 32, of 80 columns 16 (`swizzled`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What a kernel is compiled for."""

    dtype: Any
    head_dim: int
    group: int
    page_size: int
    scale: float
    logit_soft_cap: float | None
    sliding_window: int | None
    interpret: Any
    """`plgpu.InterpretGPUParams` on a machine without the GPU; None: compile."""

    @property
    def stride(self) -> int:
        return narrow_stride(self.group)

    @property
    def narrow_tokens(self) -> int:
        return TILE_Q // self.stride

    @property
    def large(self) -> bool:
        """Whether queries and outputs leave no room for the schedule's blocks."""
        return self.head_dim > 128

    @property
    def block_kv(self) -> int:
        """Keys of one step."""
        return BLOCK_KV // 2 if self.large else BLOCK_KV

    @property
    def num_slots(self) -> int:
        """Slots of the ring, each a block of K or of V: with queries and outputs 224 KB at head sizes 128 and
        256. Three are the fewest: a block's keys and values beside the values of the one before."""
        return 3 if self.large else 5

    @property
    def merged_rows(self) -> int:
        """Rows of a token whose parts are merged at a time, as registers allow."""
        return ALIGN if self.large else self.stride

    @property
    def pages_per_block(self) -> int:
        """Pages that a block is copied from."""
        return max(1, self.block_kv // self.page_size)

    @property
    def blocks_per_page(self) -> int:
        """Blocks that a page is copied to."""
        return max(1, self.page_size // self.block_kv)

    @property
    def paired(self) -> bool:
        """Whether the consumers of a wide item have two heads (and not two runs of tokens)."""
        return self.group % 2 == 0


def aligned(line: jax.Array) -> jax.Array:
    """The aligned row at or before one."""
    return lax.div(line, jnp.int32(ALIGN)) * ALIGN
