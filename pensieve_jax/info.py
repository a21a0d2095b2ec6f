"""What `pensieve info` shows: versions, devices, kernels, and what a checkpoint is."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax

from host_cache.config import CHUNK_TOKENS
from pallas_kernels.dispatch import runs_here
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.multi_token_attention import api as attention
from pensieve_jax.config import TierConfig
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.engine.build import DEVICE_MEMORY_SHARE, fitting_profile, recompute_cost, tier_sizes
from pensieve_jax.models import describe_checkpoint
from pensieve_jax.versions import package_version

PACKAGES = ("pensieve-jax", "jax", "jaxlib", "flax", "transformers", "orbax-checkpoint")


def machine_facts() -> dict[str, str]:
    """Versions, devices and kernels."""
    devices = jax.local_devices()
    kinds = sorted({device.device_kind for device in devices})
    return {
        **{name: package_version(name) for name in PACKAGES},
        "devices": f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform})",
        "attention": _chosen(filter(runs_here, attention.in_order(decode=False))),
        "attention, decoding": _chosen(filter(runs_here, attention.in_order(decode=True))),
        "KV writing": _chosen(filter(runs_here, kv_write.IMPLEMENTATIONS)),
    }


def _chosen(implementations: Iterable[str]) -> str:
    first, *others = implementations
    return first + (f" (then {', '.join(others)})" if others else "")


def checkpoint_facts(
    path: Path, profile: Path | None = None, kv_dtype: KvDtype | None = None
) -> dict[str, str]:
    """Sizes of a checkpoint, how much conversation the tiers hold by default on this machine, and where the
    cost of recomputing comes from.

    Args:
        path: the checkpoint.
        profile: a file of `pensieve profile`; None: the cost is estimated.
        kv_dtype: how keys and values are kept; None: as the weights.

    Raises:
        InvalidArgumentError: the profile can't be read, or is of another model or device.
        CheckpointError, UnsupportedModelError: as `load_model`.
    """
    described = describe_checkpoint(path)
    spec, device = described.spec, jax.local_devices()[0]
    shape = replace(described.shape, kv_dtype=kv_dtype)
    cost = recompute_cost(
        fitting_profile(profile, shape, device.device_kind),
        shape,
        page_tokens=CHUNK_TOKENS,
        max_context_tokens=spec.max_context_tokens,
    )
    tiers = tier_sizes(spec, TierConfig(kv_dtype=kv_dtype), device, 1)
    token_bytes = shape.kv_page_bytes(tiers.page_tokens) / tiers.page_tokens
    device_tokens = tiers.device_pages * tiers.page_tokens
    if device.platform != "cpu":  # there the pool takes its share of what the weights leave
        device_tokens -= int(described.size_bytes * DEVICE_MEMORY_SHARE / token_bytes)
    host_tokens = tiers.host_pages * tiers.page_tokens
    return {
        "model": f"{spec.name}, stored as {described.format.value}",
        "parameters": f"{described.num_parameters:,}",
        "weights": f"{_size(described.size_bytes)} in {described.dtype}",
        "files": _size(described.file_bytes),
        "layers": f"{spec.num_layers}, hidden size {spec.hidden_size}",
        "heads": f"{spec.num_heads} of {spec.head_dim}, {spec.num_kv_heads} for keys and values",
        "vocabulary": f"{spec.vocab_size:,} tokens",
        "context": f"{spec.max_context_tokens:,} tokens",
        "KV of a token": f"{token_bytes:,.0f} bytes in {kv_dtype or described.dtype}",
        "device tier": f"{max(0, device_tokens):,} tokens by default",
        "host tier": f"{host_tokens:,} tokens by default",
        "cost of recomputing": cost.source,
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
