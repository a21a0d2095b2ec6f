"""What a page of a layer's keys and values is, on the device and in the host."""

import math

import jax
import numpy as np

from pallas_kernels import fp8_pages
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.models.interface import ModelSpec


def page_of(spec: ModelSpec, *, page_tokens: int, kv_dtype: KvDtype | None) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a page of one layer, over all shards.

    Args:
        spec: of the model.
        page_tokens: tokens of a page.
        kv_dtype: how keys and values are kept; None: in the model's dtype.

    Returns:
        [2, num_kv_heads, page_tokens, head_dim], or an 8-bit page (`pallas_kernels.fp8_pages`).
    """
    rows, dtype = page_tokens, spec.dtype
    if kv_dtype is not None:
        rows, dtype = page_tokens + fp8_pages.SCALE_ROWS, fp8_pages.PAGE_DTYPE
    return jax.ShapeDtypeStruct((2, spec.num_kv_heads, rows, spec.head_dim), dtype)


def num_bytes(page: jax.ShapeDtypeStruct) -> int:
    """Bytes of a page."""
    return math.prod(page.shape) * np.dtype(page.dtype).itemsize


def no_number(page: jax.ShapeDtypeStruct) -> float:
    """What fills a page so that whoever reads it computes NaN."""
    return fp8_pages.NAN if page.dtype == fp8_pages.PAGE_DTYPE else float("nan")
