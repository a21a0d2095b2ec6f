"""Attention of ragged rows of query tokens over KV scattered in pages (paper, section 4.4)."""

from pallas_kernels.multi_token_attention.api import multi_token_attention
from pallas_kernels.multi_token_attention.plan import BLOCK_Q, AttentionPlan, plan_attention, tile_tokens
from pallas_kernels.multi_token_attention.reference import reference_attention

__all__ = [
    "BLOCK_Q",
    "AttentionPlan",
    "multi_token_attention",
    "plan_attention",
    "reference_attention",
    "tile_tokens",
]
