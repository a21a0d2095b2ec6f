"""The configuration of an engine: one tree of values, each part with its own part."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from host_cache.config import CHUNK_TOKENS, RUNNING_RESERVE, SWAP_OUT_BELOW, TransferFaults
from host_cache.policies import PolicyFactory, RetentionValue, find_policy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KvDtype, check_kv_dtype
from pensieve_jax.scheduler.scheduler import SchedulerConfig


def default_compilation_cache() -> Path:
    """The user's cache folder: `XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve-jax" / "xla"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Sizes of the tiers and who leaves them.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    device_pages: int | None = None
    """Pages in device memory. None: as `device_memory_share` says; on a CPU 1 GiB."""
    device_memory_share: float = 0.9
    """Share of the device memory left by weights, the largest step's workspace and copies under way that the
    pool takes if `device_pages` is None."""
    host_pages: int | None = None
    """Pages in pinned host memory; 0 keeps to the device alone. None: four times the device pages on a
    CPU, as many as fit half of the free memory on a GPU machine."""
    page_tokens: int = CHUNK_TOKENS
    """Tokens of a page, hence of a chunk."""
    policy: str | PolicyFactory = RetentionValue.name
    """Who leaves first: a name of `host_cache.policies.POLICIES`, "module:attribute", or a factory of a
    policy of your own."""
    share_prefixes: bool = True
    """Let conversations that begin alike share their KV."""
    swap_out_below: float = SWAP_OUT_BELOW
    """Copy chunks to the host ahead of time under this share of free device pages."""
    running_reserve: float = RUNNING_RESERVE
    """Share of device pages that newcomers leave to running turns."""
    kv_dtype: KvDtype | None = None
    """How keys and values are kept in both tiers: "fp8_e4m3" in 8 bits, with a scale for each page and head,
    which rounds them and holds nearly twice the tokens. None: in the model's dtype."""
    keep_state: bool = True
    """Keep KV between turns. False computes the whole history at every turn, as stateless servers do."""
    check_host_memory: bool = True
    """Refuse a host tier larger than the memory that is available at the start."""

    def __post_init__(self) -> None:
        for name, least in (("device_pages", 1), ("host_pages", 0)):
            value = getattr(self, name)
            _check(value is None or _at_least(value, least), name, value, f"None or an integer >= {least}")
        _check(_at_least(self.page_tokens, 1), "page_tokens", self.page_tokens, "an integer >= 1")
        try:
            find_policy(self.policy)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        check_kv_dtype(self.kv_dtype)
        share = self.device_memory_share
        _check(0 < share <= 1, "device_memory_share", share, "a share in (0, 1]")
        _check(0 <= self.swap_out_below <= 1, "swap_out_below", self.swap_out_below, "a share in [0, 1]")
        _check(0 <= self.running_reserve < 1, "running_reserve", self.running_reserve, "a share in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine can be told. The defaults serve.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    tiers: TierConfig = field(default_factory=TierConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_context_tokens: int | None = None
    """Longest conversation in tokens. None: the model's limit."""
    on_busy: Literal["wait", "refuse"] = "wait"
    """A second turn of a conversation that has an unfinished one: it waits, or it is refused."""
    execution: Literal["auto", "layered", "resident"] = "auto"
    """How steps without swap-ins run: layer by layer, in one call, or the better for the platform."""
    run_ahead: bool | None = None
    """Plan the next step and hand it to the device while a step computes. A stop token or stop string then
    shows a step late, which costs that step's token, never a wrong one. None: on a GPU."""
    batch_invariant: bool = False
    """A turn's attention is the same bits whatever else runs beside it. Slower."""
    compilation_cache: Path | None = field(default_factory=default_compilation_cache)
    """Folder that keeps compiled programs for the next start; None: none. If JAX was told a folder already
    (`jax_compilation_cache_dir`), it is that one. Loading a program runs what is in it: let nobody else write
    there."""
    log_path: Path | None = None
    """SQLite file that holds the conversations. None: they are lost with the process."""
    profile_path: Path | None = None
    """What recomputing a chunk costs: a file of `pensieve profile` for this model and device. None: an
    estimate from the model's dimensions."""
    load_or_recompute: bool = False
    """Neither copy a chunk to the host nor load it from there if the profile says that recomputing it is
    faster than loading. False: always copy and load, as the paper does. True needs a profile."""
    seed: int = 0
    """Draws the seeds of turns that come without one."""
    background: bool = True
    """Run steps in a thread of the engine. False: whoever waits for a turn runs the steps."""
    paranoid: bool = False
    """After every step check the cache's books and fill freed pages with NaN; keep a checksum of every host
    page, and recompute what has changed. Slow; for finding faults."""
    recompute_share: float = 0.0
    """Share of the finished greedy turns that are computed again from the log and compared. They run beside
    other turns and count as work."""
    transfer_faults: TransferFaults | None = None
    """Make copies between the tiers go wrong, to see that nothing else does. None: don't."""

    def __post_init__(self) -> None:
        _check(self.on_busy in ("wait", "refuse"), "on_busy", self.on_busy, "'wait' or 'refuse'")
        ways = ("auto", "layered", "resident")
        _check(self.execution in ways, "execution", self.execution, " or ".join(map(repr, ways)))
        wanted = "False without a profile_path"
        ok = self.profile_path is not None or not self.load_or_recompute
        _check(ok, "load_or_recompute", self.load_or_recompute, wanted)
        limit = self.max_context_tokens
        _check(limit is None or _at_least(limit, 2), "max_context_tokens", limit, "None or an integer >= 2")
        _check(0 <= self.recompute_share <= 1, "recompute_share", self.recompute_share, "a share in [0, 1]")


def _check(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidArgumentError(f"{name}: got {value!r}, expected {expected}")


def _at_least(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
