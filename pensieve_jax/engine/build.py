"""Putting an engine's parts together: sizes of the tiers, policy, worker; and opening checkpoints."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from host_cache.config import CacheConfig
from host_cache.cost_model import RecomputeCost, analytic_cost
from host_cache.errors import TransferError
from host_cache.policies import EvictionPolicy, make_policy
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.core.profile import StepProfile, read_profile
from pensieve_jax.engine.inputs import InputEncoder
from pensieve_jax.models import checkpoint_fingerprint, load_model, load_tokenizer
from pensieve_jax.models.end_tokens import end_token_ids
from pensieve_jax.models.interface import ModelSpec, ServableModel
from pensieve_jax.models.shape import shape_of
from pensieve_jax.parallel import make_mesh
from pensieve_jax.worker.batch import BatchShapes, planned_heads, query_block
from pensieve_jax.worker.kv_pages import num_bytes, page_of
from pensieve_jax.worker.worker import MOST_GATHERED, Worker, build_worker, workspace_bytes

logger = logging.getLogger(__name__)
CPU_POOL_BYTES = 1 << 30
"""Device pool on a CPU unless a size is given."""
CPU_HOST_PAGES_PER_DEVICE_PAGE = 4
"""Host pages on a CPU unless a size is given."""
DEVICE_MEMORY_SHARE = 0.85
"""Share of the device memory that is free after the weights which the pool would take if the workspace isn't
known."""
MEASURED_PAGES = 64
"""Pages of the pool for which the workspace of a step is measured; it doesn't depend on them."""
POOL_BITS = 7
"""Leading bits of the device pool's pages that aren't 0 if its size follows from the free memory, which is a
little different at each start: another number of pages would be other programs."""
HOST_MEMORY_SHARE = 0.5
"""Share of the free host memory that the host tier takes unless a size is given."""
KEPT_FROM_S = 0.1
"""Programs that compile faster than this are not kept: reading them takes as long."""
NOMINAL_FLOPS_PER_S = 1e14
"""Scales all costs of the analytic cost model alike, so it changes no order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint in memory."""

    model: ServableModel
    tokenizer: Any | None
    end_token_ids: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is put together from."""

    cache_config: CacheConfig
    policy: EvictionPolicy
    cost: RecomputeCost
    """Of recomputing a chunk."""
    encoder: InputEncoder
    worker: Worker
    run_ahead: bool
    """Plan and hand over a step while the step before computes."""


def open_checkpoint(
    path: str | Path,
    *,
    dtype: str | None,
    num_shards: int,
    progress: Callable[[int, int], None] | None,
) -> LoadedCheckpoint:
    """Load weights, tokenizer and end tokens; see `Engine.from_checkpoint`."""
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    model = load_model(path, dtype=dtype, mesh=mesh, progress=progress)
    tokenizer = load_tokenizer(path)
    return LoadedCheckpoint(
        model=model,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(path, tokenizer),
        fingerprint=checkpoint_fingerprint(path),
    )


def keep_programs(folder: Path | None) -> Path | None:
    """Let JAX keep compiled programs in a folder, unless it was told one already.

    Returns:
        the folder for whole programs, below JAX's; None: keep none.
    """
    if folder is None:
        return None
    told = jax.config.jax_compilation_cache_dir
    if not told:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_FROM_S)
    return (folder if not told or "://" in told else Path(told)) / "programs"


def build_parts(
    model: ServableModel,
    tokenizer: Any | None,
    config: EngineConfig,
    num_shards: int,
    host_progress: Callable[[int, int], None] | None = None,
) -> EngineParts:
    """Size the tiers and build everything that stands on a model; see `Engine`.

    Raises:
        InvalidArgumentError: the model doesn't divide over the shards, a size is out of range, or the host
            can't give the memory of its tier.
    """
    programs = keep_programs(config.compilation_cache)
    mesh = make_mesh(num_shards)
    spec = model.spec
    shape = shape_of(model, num_shards, kv_dtype=config.tiers.kv_dtype)
    device = mesh.devices.flat[0].device_kind
    profile = fitting_profile(config.profile_path, shape, device)
    first = mesh.devices.flat[0]
    workspace = None
    if config.tiers.device_pages is None and first.platform != "cpu":
        shapes = batch_shapes(spec, config, num_shards, MEASURED_PAGES)
        workspace = workspace_bytes(model, shapes=shapes, mesh=mesh, programs=programs)
    cache_config = tier_sizes(spec, config.tiers, first, num_shards, workspace_bytes=workspace)
    page_tokens = cache_config.page_tokens
    cost = recompute_cost(profile, shape, page_tokens=page_tokens, max_context_tokens=spec.max_context_tokens)
    if config.load_or_recompute and profile is not None:
        load_s = shape.kv_page_bytes(page_tokens) / profile.load_bytes_per_s
        cache_config = replace(cache_config, load_s_per_page=load_s)
    try:
        worker = build_worker(
            model,
            shapes=batch_shapes(spec, config, num_shards, cache_config.device_pages),
            host_pages=cache_config.host_pages,
            mesh=mesh,
            execution=config.execution,
            check_host_memory=config.tiers.check_host_memory,
            checksums=config.paranoid,
            transfer_faults=config.transfer_faults,
            programs=programs,
            progress=host_progress,
        )
    except TransferError as error:
        raise InvalidArgumentError(f"host_pages: {error}") from error
    logger.info("cost of recomputing: %s", cost.source)
    logger.info("device tier: %d pages, host tier: %d", cache_config.device_pages, cache_config.host_pages)
    return EngineParts(
        cache_config=cache_config,
        policy=make_policy(config.tiers.policy, cost),
        cost=cost,
        encoder=InputEncoder(tokenizer, spec.vocab_size),
        worker=worker,
        run_ahead=mesh.devices.flat[0].platform != "cpu" if config.run_ahead is None else config.run_ahead,
    )


def fitting_profile(path: Path | None, shape: ModelShape, device: str) -> StepProfile | None:
    """The profile of a file, for a model on a device.

    Args:
        path: a file of `pensieve profile`; None: there is none.
        shape: of the model that is served.
        device: JAX's name of the kind of device.

    Raises:
        InvalidArgumentError: it can't be read, or was measured for another model or device.
    """
    if path is None:
        return None
    try:
        profile = read_profile(path)
    except OSError as error:
        raise InvalidArgumentError(f"profile_path: {error}") from error
    profile.check_fits(shape, device)
    return profile


def recompute_cost(
    profile: StepProfile | None, shape: ModelShape, *, page_tokens: int, max_context_tokens: int
) -> RecomputeCost:
    """What recomputing a chunk costs: as profiled, or else estimated from the model's dimensions.

    Args:
        profile: of this model and device; None: estimate.
        shape: of the model that is served.
        page_tokens: tokens of a chunk.
        max_context_tokens: the model's limit.
    """
    if profile is not None:
        return profile.recompute_cost(page_tokens)
    return analytic_cost(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        num_parameters=shape.num_parameters,
        chunk_tokens=page_tokens,
        max_context_tokens=max_context_tokens,
        flops_per_s=NOMINAL_FLOPS_PER_S,
    )


def batch_shapes(spec: ModelSpec, config: EngineConfig, num_shards: int, num_pages: int) -> BatchShapes:
    """The limits of the engine's batches over a pool of so many pages."""
    page_tokens = config.tiers.page_tokens
    max_context = spec.context_limit(config.max_context_tokens)
    max_rows, max_pages = config.scheduler.max_rows, min(-(-max_context // page_tokens), num_pages)
    return BatchShapes(
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_rows=max_rows,
        max_tokens=min(config.scheduler.step_tokens, max_rows * max_pages * page_tokens),
        max_pages=max_pages,
        planned_heads=planned_heads(spec, num_shards),
        block_q=query_block(spec),
        batch_invariant=config.batch_invariant,
        kv_dtype=config.tiers.kv_dtype,
    )


def steady(num_pages: int) -> int:
    """The next smaller number of at most `POOL_BITS` bits that aren't 0."""
    step = 1 << max(0, num_pages.bit_length() - POOL_BITS)
    return num_pages // step * step


def tier_sizes(
    spec: ModelSpec, tiers: TierConfig, device: Any, num_shards: int, *, workspace_bytes: int | None = None
) -> CacheConfig:
    """The sizes of both tiers, given or from what the machine has.

    Args:
        spec: dimensions of the model, whose weights are on the device.
        tiers: what was asked for.
        device: one of the devices.
        num_shards: devices that the model is spread over.
        workspace_bytes: what the largest step needs beside weights and pool; None: unknown.

    Raises:
        InvalidArgumentError: a size is out of range, or the device can't give the pool's memory.
    """
    page = page_of(spec, page_tokens=tiers.page_tokens, kv_dtype=tiers.kv_dtype)
    page_bytes = spec.num_layers * num_bytes(page) // num_shards
    stats = device.memory_stats() if device.platform != "cpu" else None
    free = CPU_POOL_BYTES if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]
    device_pages = tiers.device_pages
    if device_pages is None:
        room = free
        if workspace_bytes is not None:
            copies = 0 if tiers.host_pages == 0 else MOST_GATHERED * page_bytes
            room = int((free - workspace_bytes - copies) * tiers.device_memory_share)
        elif stats is not None:
            room = int(free * DEVICE_MEMORY_SHARE)
        device_pages = room // page_bytes
        if stats is not None:
            device_pages = steady(device_pages)
        if device_pages < 1:
            raise InvalidArgumentError(
                f"device_pages: a page needs {page_bytes / 1e9:.3f} GB, expected at most the "
                f"{max(room, 0) / 1e9:.2f} GB that the pool may take of the {free / 1e9:.2f} GB that are "
                "free on the device"
            )
    elif stats is not None and device_pages * page_bytes > free:
        raise InvalidArgumentError(
            f"device_pages: got {device_pages} pages of {device_pages * page_bytes / 1e9:.2f} GB, "
            f"expected at most the {free / 1e9:.2f} GB that are free on the device"
        )
    host_pages = tiers.host_pages
    if host_pages is None:
        host_pages = CPU_HOST_PAGES_PER_DEVICE_PAGE * device_pages
        most = int(psutil.virtual_memory().available * HOST_MEMORY_SHARE) // (page_bytes * num_shards)
        host_pages = min(host_pages, most) if stats is None else most
    if not tiers.keep_state:
        host_pages = 0
    try:
        return CacheConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            page_tokens=tiers.page_tokens,
            swap_out_below=tiers.swap_out_below,
            running_reserve=tiers.running_reserve,
            share_prefixes=tiers.share_prefixes,
            identity=f"{spec.name} {np.dtype(spec.dtype).name} {tiers.kv_dtype}".encode(),
            keep_finished=tiers.keep_state,
        )
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error
