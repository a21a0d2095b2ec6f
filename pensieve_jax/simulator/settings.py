"""What a simulation is told."""

from dataclasses import dataclass, field, replace

from host_cache.config import CHUNK_TOKENS, CacheConfig
from host_cache.policies import PolicyFactory, RetentionValue, find_policy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import ModelShape, check_kv_dtype
from pensieve_jax.core.profile import StepProfile
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from pensieve_jax.simulator.hardware import DEVICES, MODELS, DeviceSpec, device_of
from pensieve_jax.simulator.worker import STAGING_PAGES
from pensieve_jax.simulator.workload import MAX_CONTEXT_TOKENS

MODEL = "opt-13b"
DEVICE = "a100-80gb"
"""What is simulated unless something else is asked for: the paper's smaller model (section 6.1)."""
DEVICE_KV_BYTES = 40 * 10**9
"""KV on each GPU in the paper's evaluation (section 6.1)."""
HOST_KV_BYTES = 200 * 10**9
"""KV in the host. The paper's machines have 220 GB for each GPU; 20 GB are taken to serve everything else."""
STEP_TOKENS = 2048
"""Query tokens of a step. The paper has a threshold and doesn't give it; vLLM of that time took 2560."""
MAX_ROWS = 256
"""Rows of a step, as in vLLM of that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One simulated server."""

    model: ModelShape
    device: DeviceSpec
    cache: CacheConfig
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(step_tokens=STEP_TOKENS, max_rows=MAX_ROWS)
    )
    policy: str | PolicyFactory = RetentionValue.name
    """The eviction policy, as in `host_cache.policies.find_policy`."""
    profile: StepProfile | None = None
    """Measured times in place of the estimate."""
    attention_weight: float = 1.0
    """Multiplies the attention's part of the cost by which the policy judges, not the time that it takes: to
    see what depends on the cost profile."""
    max_context_tokens: int = MAX_CONTEXT_TOKENS
    """Longer conversations are cut."""
    hold_swap_outs: bool = True
    """Copies to the host pause while swap-ins run."""
    fast_decode: bool = True
    """Advance many decode steps at once where nothing else happens. The result is the same."""


def make_config(
    *,
    model: str | None = None,
    device: str | None = None,
    policy: str | PolicyFactory = RetentionValue.name,
    device_kv_bytes: float = DEVICE_KV_BYTES,
    host_kv_bytes: float = HOST_KV_BYTES,
    page_tokens: int = CHUNK_TOKENS,
    kv_dtype: str | None = None,
    keep_state: bool = True,
    share_prefixes: bool = True,
    load_or_recompute: bool = False,
    step_tokens: int = STEP_TOKENS,
    max_rows: int = MAX_ROWS,
    profile: StepProfile | None = None,
    attention_weight: float = 1.0,
    fast_decode: bool = True,
) -> SimulationConfig:
    """A simulated server from names and sizes in bytes.

    Args:
        model: one of `MODELS`; None: `MODEL`, or the profile's.
        device: one of `DEVICES`; None: `DEVICE`, or the profile's.
        policy: a name of `host_cache.policies.POLICIES`, "module:attribute", or a factory.
        device_kv_bytes: KV on each device.
        host_kv_bytes: KV in the host for each device; 0 for none.
        page_tokens: tokens of a chunk, hence of a page.
        kv_dtype: how keys and values are kept; None: as the weights, or as in the profile.
        keep_state: False computes the whole history at every turn; the host tier is left out then.
        share_prefixes: let conversations that begin alike share chunks.
        load_or_recompute: neither copy nor load a chunk that is cheaper to recompute than to load, and drop
            chunks for whose copies a step would wait.
        step_tokens: query tokens of a step at most.
        max_rows: rows of a step at most.
        profile: measured times in place of the estimate; model, device and link are the profile's then.
        attention_weight: as in `SimulationConfig`.
        fast_decode: as in `SimulationConfig`.

    Raises:
        InvalidArgumentError: a name is unknown or not the profile's, or a size is out of range.
    """
    try:
        find_policy(policy)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error
    if profile is None:
        shape, spec = _named(MODELS, "model", model or MODEL), _named(DEVICES, "device", device or DEVICE)
        shape = replace(shape, kv_dtype=check_kv_dtype(kv_dtype))
    else:
        shape, spec = profile.model, device_of(profile)
        _named({shape.name: shape}, "model", model or shape.name)
        _named({spec.name: spec}, "device", device or spec.name)
        if kv_dtype not in (None, shape.kv_dtype):
            raise InvalidArgumentError(
                f"kv_dtype: got {kv_dtype!r}, expected the profile's, {shape.kv_dtype!r}"
            )
    page_bytes = shape.kv_page_bytes(page_tokens)
    try:
        cache = CacheConfig(
            device_pages=int(device_kv_bytes // page_bytes),
            host_pages=int(host_kv_bytes // page_bytes) if keep_state else 0,
            page_tokens=page_tokens,
            keep_finished=keep_state,
            share_prefixes=share_prefixes,
            load_s_per_page=page_bytes / spec.load_bytes_per_s if load_or_recompute else None,
            max_swap_outs_under_way=STAGING_PAGES,
        )
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error
    return SimulationConfig(
        model=shape,
        device=spec,
        cache=cache,
        scheduler=SchedulerConfig(step_tokens=step_tokens, max_rows=max_rows),
        policy=policy,
        profile=profile,
        attention_weight=attention_weight,
        fast_decode=fast_decode,
    )


def _named[T](known: dict[str, T], what: str, name: str) -> T:
    if name not in known:
        raise InvalidArgumentError(f"{what}: got {name!r}, expected one of {', '.join(known)}")
    return known[name]
