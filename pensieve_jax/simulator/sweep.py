"""One simulation for each point of a grid of settings; the rows as CSV and JSON lines."""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from host_cache.config import CHUNK_TOKENS
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.profile import StepProfile
from pensieve_jax.simulator.arrivals import sample_conversations, with_poisson_arrivals
from pensieve_jax.simulator.driver import Simulation
from pensieve_jax.simulator.metrics import summarize
from pensieve_jax.simulator.settings import (
    DEVICE,
    DEVICE_KV_BYTES,
    HOST_KV_BYTES,
    MAX_ROWS,
    MODEL,
    STEP_TOKENS,
    SimulationConfig,
    make_config,
)
from pensieve_jax.simulator.workload import MAX_CONTEXT_TOKENS, SimConversation, cut_to_context

type Progress = Callable[[int, int], None]
type Row = dict[str, Any]
"""Settings and figures of one point, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulation's settings.

    Raises:
        InvalidArgumentError: a number is out of range. Names are checked when the point is run.
    """

    requests_per_s: float | None = None
    """Turns per second on average once all conversations that run at a time have begun; None keeps the
    workload's own times."""
    think_time_s: float = 60.0
    """Mean think time; of no use with the workload's own times."""
    model: str = MODEL
    device: str = DEVICE
    policy: str = "retention-value"
    attention_weight: float = 1.0
    """As in `SimulationConfig`."""
    keep_state: bool = True
    """False computes the whole history at every turn, as stateless servers do."""
    share_prefixes: bool = True
    load_or_recompute: bool = False
    """Neither copy nor load a chunk that is cheaper to recompute than to load."""
    device_kv_gb: float = DEVICE_KV_BYTES / 1e9
    host_kv_gb: float = HOST_KV_BYTES / 1e9
    page_tokens: int = CHUNK_TOKENS
    """Tokens of a chunk."""
    kv_dtype: str | None = None
    """How keys and values are kept; None: as the weights, or as in the profile."""
    step_tokens: int = STEP_TOKENS
    max_rows: int = MAX_ROWS
    duration_s: float = 3600.0
    """Simulated time with Poisson arrivals."""
    warm_up: float = 0.4
    """Share of the time at the start that the figures leave out."""
    seed: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        check(self.requests_per_s is None or 0 < self.requests_per_s < math.inf, "requests_per_s", "above 0")
        check(0 <= self.think_time_s < math.inf, "think_time_s", "at least 0")
        check(self.device_kv_gb > 0, "device_kv_gb", "above 0")
        check(self.host_kv_gb >= 0, "host_kv_gb", "at least 0")
        check(self.page_tokens >= 1, "page_tokens", "at least 1")
        check(0 <= self.attention_weight < math.inf, "attention_weight", "at least 0")
        check(0 < self.duration_s < math.inf, "duration_s", "above 0")
        check(0 <= self.warm_up < 1, "warm_up", "a share in [0, 1)")
        check(self.seed >= 0, "seed", "at least 0")

    def config(self, profile: StepProfile | None = None) -> SimulationConfig:
        """The server that the point describes.

        Raises:
            InvalidArgumentError: a name is unknown or not the profile's, or a size is out of range.
        """
        return make_config(
            model=self.model,
            device=self.device,
            policy=self.policy,
            device_kv_bytes=self.device_kv_gb * 1e9,
            host_kv_bytes=self.host_kv_gb * 1e9,
            page_tokens=self.page_tokens,
            kv_dtype=self.kv_dtype,
            keep_state=self.keep_state,
            share_prefixes=self.share_prefixes,
            load_or_recompute=self.load_or_recompute,
            step_tokens=self.step_tokens,
            max_rows=self.max_rows,
            profile=profile,
            attention_weight=self.attention_weight,
        )


def grid(**axes: Sequence[Any]) -> list[Point]:
    """Every combination of settings, the last axis fastest."""
    return [Point(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def run_point(
    conversations: Sequence[SimConversation],
    point: Point,
    *,
    profile: StepProfile | None = None,
    progress: Progress | None = None,
) -> Row:
    """Run one point.

    With a rate, conversations are drawn in random order until the duration is full, the same ones in the same
    order at every rate; the simulation stops when it is over. Without, the workload runs to its end.

    Args:
        conversations: the workload.
        point: the settings.
        profile: measured step times.
        progress: is told how many turns of how many have ended.

    Returns:
        the point's settings, then `offered_requests_per_s` and the figures of `summarize`.
    """
    cut = (cut_to_context(conversation, MAX_CONTEXT_TOKENS) for conversation in conversations)
    chosen = [conversation for conversation in cut if conversation is not None]
    stop_s = math.inf
    if point.requests_per_s is not None:
        mean_turns = sum(len(conversation.turns) for conversation in chosen) / len(chosen)
        count = math.ceil(point.requests_per_s * point.duration_s / mean_turns)
        chosen = with_poisson_arrivals(
            sample_conversations(chosen, count, point.seed),
            requests_per_s=point.requests_per_s,
            think_time_s=point.think_time_s,
            seed=point.seed,
        )
        stop_s = point.duration_s
    result = Simulation(chosen, point.config(profile), stop_s=stop_s, progress=progress).run()
    end_s = min(stop_s, result.end_s)
    warm_up_s = point.warm_up * end_s
    figures = summarize(result, warm_up_s=warm_up_s, until_s=end_s)
    offered = sum(warm_up_s <= time <= end_s for time in result.arrivals_s) / (end_s - warm_up_s)
    return asdict(point) | {"offered_requests_per_s": offered} | figures


_shared: dict[str, Any] = {}
"""Of a process that runs points: the workload and the profile."""


def _share(conversations: Sequence[SimConversation], profile: StepProfile | None) -> None:
    _shared.update(conversations=conversations, profile=profile)


def _run_shared(point: Point) -> Row:
    return run_point(_shared["conversations"], point, profile=_shared["profile"])


def run_sweep(
    conversations: Sequence[SimConversation],
    points: Sequence[Point],
    *,
    profile: StepProfile | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Run points and give their rows in order, each as soon as it and those before it are there.

    Args:
        conversations: the workload.
        points: what to run.
        profile: measured step times.
        processes: how many points run at a time.
        progress: is told how much of how much is done, in turns with one process, in points with more.
    """
    if processes <= 1:
        for number, point in enumerate(points):
            row = run_point(conversations, point, profile=profile, progress=_part(progress, number, points))
            yield row
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        processes, context, initializer=_share, initargs=(conversations, profile)
    ) as pool:
        for number, row in enumerate(pool.map(_run_shared, points)):
            if progress is not None:
                progress(number + 1, len(points))
            yield row


def _part(progress: Progress | None, number: int, points: Sequence[Point]) -> Progress | None:
    """The progress of one point of several, in thousandths."""
    if progress is None:
        return None
    return lambda done, total: progress(1000 * number + 1000 * done // max(1, total), 1000 * len(points))


def varied(points: Sequence[Point]) -> list[str]:
    """Settings that differ among points."""
    names = [field.name for field in fields(Point)]
    return [name for name in names if len({getattr(point, name) for point in points}) > 1]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with a header. Raises OSError."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines; what is not a number is null. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            file.write(json.dumps(known) + "\n")
