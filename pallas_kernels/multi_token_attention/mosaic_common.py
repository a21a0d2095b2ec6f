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
    def pages_per_block(self) -> int:
        return max(1, BLOCK_KV // self.page_size)

    @property
    def paired(self) -> bool:
        """Whether the consumers of a wide item have two heads (and not two runs of tokens)."""
        return self.group % 2 == 0


def aligned(line: jax.Array) -> jax.Array:
    """The aligned row at or before one."""
    return lax.div(line, jnp.int32(ALIGN)) * ALIGN
