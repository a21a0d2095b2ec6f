"""One run: a system, a workload, a rate, and the figures that come out."""

import importlib
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.serving.clock import RunClock
from benchmarks.serving.compression import Tiers
from benchmarks.serving.driver import Progress as DriverProgress
from benchmarks.serving.driver import ServedRun, serve
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.systems import pensieve, transformers_batching, vllm_engine
from benchmarks.serving.systems.base import System, SystemUnavailableError
from benchmarks.workloads import Workload
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models import ServableModel
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from pensieve_jax.simulator.metrics import figures_of

SYSTEMS = (*pensieve.VARIANTS, *vllm_engine.VARIANTS, "transformers")
"""Names of systems; beside them, a URL is a server with OpenAI's API."""
LATENCY_LIMIT_S = 0.12
"""Normalized latency at which the paper compares throughput (figure 10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What every system is given alike."""

    tiers: Tiers
    """KV on each device, and in the host for each device."""
    page_tokens: int = 32
    step_tokens: int = 2048
    """Query tokens of a step at most."""
    max_rows: int = 256
    """Requests that run at once at most."""
    max_context_tokens: int = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How long, and what is left out."""

    stop_s: float
    """Turns come until then."""
    warm_up_s: float
    """Turns that come before are served and don't count."""
    drain_s: float = 60.0
    """How long unfinished turns are waited for afterwards."""
    skip_idle: bool = True
    """Don't wait while nothing runs."""
    latency_limit_s: float = LATENCY_LIMIT_S
    """Of goodput: turns with at most this normalized latency count."""


class Opener:
    """Opens systems one after the other; the engine's variants share one model in memory."""

    def __init__(self, choice: ModelChoice, server: ServerSettings) -> None:
        self.choice = choice
        self.server = server
        self._model: ServableModel | None = None

    @contextmanager
    def open(
        self, name: str, clock: RunClock, *, server: ServerSettings | None = None, warm: bool = True
    ) -> Iterator[System]:
        """A system that is empty and, if it is to be, warm: everything compiled.

        Args:
            name: one of `SYSTEMS`, or a URL.
            clock: of the run.
            server: in place of the opener's own.
            warm: whether to compile ahead.

        Raises:
            SystemUnavailableError: it can't be used here.
            InvalidArgumentError: there is no such system, or it can't be given these sizes.
        """
        server = server or self.server
        with tempfile.TemporaryDirectory(prefix="serving-") as folder:
            system = self._make(name, clock, server, Path(folder))
            try:
                if warm:
                    system.warm_up()
                yield system
            finally:
                system.close()

    def _loaded(self) -> ServableModel:
        if self._model is None:
            self._model = self.choice.load()
        return self._model

    def _make(self, name: str, clock: RunClock, server: ServerSettings, folder: Path) -> System:
        if name in pensieve.VARIANTS:
            return pensieve.PensieveSystem(
                name, self._loaded(), self._engine_config(server), clock, num_shards=self.choice.num_shards
            )
        model = self.choice.checkpoint or self.choice.config
        if name in vllm_engine.VARIANTS:
            settings = vllm_engine.VllmSettings(
                model=model,
                dtype=self.choice.dtype,
                kv_bytes=int(server.tiers.device_bytes),
                host_bytes=int(server.tiers.host_bytes),
                max_context_tokens=server.max_context_tokens,
                max_rows=server.max_rows,
                page_tokens=server.page_tokens,
                num_shards=self.choice.num_shards,
            )
            return vllm_engine.VllmSystem(name, settings, clock, folder)
        if name == "transformers":
            return transformers_batching.TransformersSystem(
                transformers_batching.TransformersSettings(
                    model=model,
                    dtype=self.choice.dtype,
                    kv_bytes=int(server.tiers.device_bytes),
                    kv_bytes_per_token=self.choice.kv_bytes_per_token,
                    step_tokens=server.step_tokens,
                ),
                clock,
            )
        if name.startswith(("http://", "https://")):
            try:
                module = importlib.import_module("benchmarks.serving.systems.openai_server")
            except ImportError as error:
                raise SystemUnavailableError(f"{name}: {error} (the extra `bench` brings it)") from error
            return module.OpenAIServerSystem(name, clock)
        raise InvalidArgumentError(f"system: got {name!r}, expected a URL or one of {', '.join(SYSTEMS)}")

    def _engine_config(self, server: ServerSettings) -> EngineConfig:
        page_bytes = self.choice.kv_bytes_per_token * server.page_tokens
        return EngineConfig(
            tiers=TierConfig(
                device_pages=int(server.tiers.device_bytes // page_bytes),
                host_pages=int(server.tiers.host_bytes // page_bytes),
                page_tokens=server.page_tokens,
            ),
            scheduler=SchedulerConfig(step_tokens=server.step_tokens, max_rows=server.max_rows),
            max_context_tokens=server.max_context_tokens,
        )


def run_once(
    system: System,
    workload: Workload,
    clock: RunClock,
    settings: RunSettings,
    *,
    progress: Callable[[DriverProgress], None] | None = None,
) -> dict[str, float]:
    """Serve a workload once.

    Returns:
        the figures of `pensieve_jax.simulator.metrics.figures_of`, of turns that came after the warm-up, and:
        `goodput_requests_per_s` (turns within the latency limit), `offered_requests_per_s`, `unfinished`,
        `refused`, `skipped_s`, `latest_s` (how late the driver was at most), `memory_bytes`, and the system's
        own counters, as far as they changed. Hit rates are NaN where a system can't tell them.

    Raises:
        ServingError: the system failed, or it wasn't empty.
    """
    before = dict(system.counters())
    run = serve(system, workload, clock, stop_s=settings.stop_s, drain_s=settings.drain_s, progress=progress)
    until_s = min(settings.stop_s, run.end_s)
    figures = figures_of(run.records, warm_up_s=settings.warm_up_s, until_s=until_s, end_s=run.end_s)
    figures |= _further_figures(run, settings, until_s)
    figures["memory_bytes"] = system.memory_bytes() or float("nan")
    figures |= {
        name: value - before.get(name, 0) for name, value in system.counters().items() if name not in figures
    }
    if not system.facts.tells_tiers:
        for name in ("hit_rate_device", "hit_rate_host", "host_hit_rate"):
            figures[name] = float("nan")
    return figures


def _further_figures(run: ServedRun, settings: RunSettings, until_s: float) -> dict[str, float]:
    span_s = until_s - settings.warm_up_s
    ended = [r for r in run.records if settings.warm_up_s <= r.end_s <= until_s]
    good = [r for r in ended if r.normalized_latency_s <= settings.latency_limit_s]
    arrived = [time_s for time_s in run.arrivals_s if settings.warm_up_s <= time_s <= until_s]
    return {
        "goodput_requests_per_s": len(good) / span_s if span_s > 0 else float("nan"),
        "offered_requests_per_s": len(arrived) / span_s if span_s > 0 else float("nan"),
        "unfinished": run.unfinished,
        "refused": run.refused,
        "skipped_s": run.skipped_s,
        "latest_s": run.latest_s,
    }


@contextmanager
def live(console: Console, title: str, stop_s: float) -> Iterator[Callable[[DriverProgress], None]]:
    """A bar that shows how far a run is. Yields what `serve` calls."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = None if math.isinf(stop_s) else stop_s
        task = bar.add_task(title, total=total, counts="")

        def show(state: DriverProgress) -> None:
            counts = f"{state.ended} of {state.arrived} turns answered, {state.in_flight} under way"
            bar.update(task, completed=min(state.now_s, stop_s), counts=counts)

        yield show
