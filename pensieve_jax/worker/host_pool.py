"""The host tier's memory for a model."""

from collections.abc import Callable

from jax.sharding import Mesh

from host_cache.transfer import PinnedPool
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.worker.kv_pages import page_of


def host_pool(
    spec: ModelSpec,
    *,
    num_pages: int,
    page_tokens: int,
    mesh: Mesh,
    kv_dtype: KvDtype | None = None,
    check_memory: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> PinnedPool:
    """Allocate host pages for a model's KV, split over the devices as the device pool is.

    Args:
        spec: of the model.
        num_pages: pages of the host tier.
        page_tokens: tokens of a page.
        mesh: the devices to spread over.
        kv_dtype: how keys and values are kept; None: in the model's dtype.
        check_memory: refuse more memory than is available.
        progress: called with (bytes done, bytes in all).

    Raises:
        TransferError: the host can't give the memory.
    """
    page = page_of(spec, page_tokens=page_tokens, kv_dtype=kv_dtype)
    sides, heads, *of_head = page.shape
    return PinnedPool(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        page_shape=(sides, heads // mesh.devices.size, *of_head),
        dtype=page.dtype,
        devices=list(mesh.devices.flat),
        check_memory=check_memory,
        progress=progress,
    )
