"""Many runs: points of systems, workloads and rates; lines of results as they come; a table at the end."""

import functools
import gc
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.curves import throughput_at
from benchmarks.serving.clock import RunClock
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import Opener, RunSettings, ServerSettings, live, run_once
from benchmarks.serving.systems.base import System, SystemUnavailableError
from benchmarks.workloads import TokenConversation, Workload, WorkloadSettings, make_workload, tokenise
from pensieve_jax.records import ROOT, command_line, commit, gpu, read_records, record, replace_records
from pensieve_jax.versions import processor

SATURATED = 4.0
"""A system whose latency at a rate is so many times the limit is not taken to higher rates."""
POINT_METRIC = "normalized_latency_s_mean"
"""Metric of a served point, whose line holds all its figures."""
POINT_CASE = re.compile(r"(.+)_([a-z-]+)_rate([\d.e+]+)")
"""Series, system and rate of its case."""
FILE_WIDTH = 180
"""Of output that goes to a file."""
SHOWN = {
    "offered_requests_per_s": "offered/s",
    "served_requests_per_s": "served/s",
    "output_tokens_per_s": "tokens/s",
    "normalized_latency_s_mean": "s/token",
    "normalized_latency_s_p90": "p90",
    "normalized_latency_s_p99": "p99",
    "ttft_s_p50": "TTFT p50",
    "tpot_s_p50": "TPOT p50",
    "hit_rate_device": "hits GPU",
    "hit_rate_host": "hits host",
    "recomputed_tokens_per_request": "recomputed",
}
"""Figures of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of one system."""

    case: str
    """Name of the result."""
    series: str
    """What the points of one curve have in common, the system apart."""
    system: str
    choice: ModelChoice
    server: ServerSettings
    workload: WorkloadSettings
    run: RunSettings
    facts: Mapping[str, Any]
    """Further settings for the result, such as a compression's factor."""


class Study:
    """Runs points and keeps their results.

    A system is opened once for points in a row that need it alike, and emptied between them.
    """

    def __init__(self, bench: str, out: Path, console: Console, *, warm: bool = True) -> None:
        """Args:
        bench: of the results; the file is `<bench>-<device>.jsonl` in `out`.
        out: folder of results.
        console: where progress and tables go.
        warm: compile ahead; quick runs, whose times mean nothing, do without.
        """
        self.bench, self.console, self.warm = bench, console, warm
        self.gpu = gpu()
        self.path = out / f"{bench}-{device_label(self.gpu)}.jsonl"
        self._opener: tuple[tuple, Opener] | None = None
        """The last one, by what its model depends on."""
        self.rows: list[dict[str, Any]] = []
        """Figures of the points that were run, with `series`, `system`, `case` and `rate`."""

    def header(self, seeds: Sequence[int]) -> None:
        """Print what is run, from what, on what."""
        device = processor() if self.gpu is None else ", driver ".join(self.gpu)
        self.console.print(f"command: {command_line()}", highlight=False, soft_wrap=True)
        self.console.print(f"commit: {commit()}; seeds: {list(seeds)}; device: {device}", highlight=False)

    def run(self, points: Iterable[Point]) -> None:
        """Run points in their order. A system that can't be used here is left out, and a line says so."""
        points = list(points)
        with ExitStack() as stack:
            opened: tuple[Any, ...] | None = None
            system, clock, missing = None, None, set()
            saturated: set[tuple[str, str]] = set()
            for point in points:
                if point.system in missing or (point.series, point.system) in saturated:
                    continue
                key = (point.system, point.choice.name, point.choice.num_shards, point.server)
                if key != opened:
                    stack.close()
                    system = None
                    gc.collect()  # its KV is freed before the next one's is allocated
                    opened, clock = key, RunClock(skip_idle=point.run.skip_idle)
                    try:
                        system = stack.enter_context(
                            self._opener_of(point).open(
                                point.system, clock, server=point.server, warm=self.warm
                            )
                        )
                    except SystemUnavailableError as error:
                        self.console.print(f"[yellow]left out:[/] {error}", highlight=False)
                        missing.add(point.system)
                        opened = None
                        continue
                    self._show_versions(system)
                assert system is not None and clock is not None
                figures = self._run_point(point, system, clock)
                if figures["normalized_latency_s_mean"] > SATURATED * point.run.latency_limit_s:
                    saturated.add((point.series, point.system))

    def summary(self, latency_s: float, peers: Sequence[str]) -> list[dict[str, Any]]:
        """Throughput of each curve at a latency, against peers on the same series; kept as results.

        Curves are read from the results, where those of systems that were run apart are together.

        Args:
            latency_s: normalized latency.
            peers: systems to compare with; the first that was measured counts.
        """
        lines = []
        kept = kept_points(self.path)
        for series in dict.fromkeys(row["series"] for row in self.rows):
            curves: dict[str, list[dict[str, Any]]] = {}
            for row in kept:
                if row["series"] == series:
                    curves.setdefault(row["system"], []).append(row)
            reached = {name: throughput_at(rows, latency_s) for name, rows in curves.items()}
            peer = next((name for name in peers if reached.get(name)), None)
            for name, value in reached.items():
                if value is None:
                    continue
                against = reached[peer] if peer is not None and peer != name else None
                lines.append(
                    self._record(
                        case=f"{series}_at{1000 * latency_s:g}ms_{name}",
                        metric="served_requests_per_s",
                        value=value,
                        unit="1/s",
                        ceiling=against,
                        ratio=value / against if against else None,
                        packages=(),
                        shapes={"latency_s": latency_s, "peer": peer, "points": len(curves[name])},
                    )
                )
        if lines:
            replace_records(self.path, lines)
        return lines

    def table(self) -> Table:
        """All points."""
        table = Table(title=self.bench)
        for name in ("case", *SHOWN.values()):
            table.add_column(name, justify="left" if name == "case" else "right", overflow="fold")
        for row in self.rows:
            table.add_row(row["case"], *(_cell(row.get(name)) for name in SHOWN))
        return table

    # -- inside ----------------------------------------------------------------------------------

    def _opener_of(self, point: Point) -> Opener:
        key = (point.choice.name, point.choice.dtype, point.choice.num_shards)
        if self._opener is None or self._opener[0] != key:
            self._opener = None  # its model's memory is free before the next one's is taken
            self._opener = (key, Opener(point.choice, point.server))
        return self._opener[1]

    def _run_point(self, point: Point, system: System, clock: RunClock) -> dict[str, float]:
        workload = workload_of(point)
        title = f"{point.case}, digest {workload.digest}"
        self.console.print(f"{title}: {workload.num_turns} turns at most", highlight=False)
        with live(self.console, point.case, point.run.stop_s) as progress:
            figures = run_once(system, workload, clock, point.run, progress=progress)
        shapes = {
            "model": point.choice.label,
            "dtype": point.choice.dtype,
            "system": dict(system.facts.settings),
            "tiers_gb": {name: value / 1e9 for name, value in asdict(point.server.tiers).items()},
            "workload": {name: value for name, value in workload.settings.items() if value is not None},
            "digest": workload.digest,
            "run": {name: _plain(value) for name, value in asdict(point.run).items()},
            **point.facts,
            "figures": {name: _plain(value) for name, value in figures.items()},
        }
        line = self._record(
            case=point.case,
            metric=POINT_METRIC,
            value=figures["normalized_latency_s_mean"],
            unit="s",
            packages=(),
            shapes=shapes,
        )
        line["versions"] |= dict(system.facts.versions)
        replace_records(self.path, [line])
        rate = point.workload.requests_per_s
        self.rows.append(
            figures
            | {"case": point.case, "series": point.series, "system": point.system, "rate": rate}
            | dict(point.facts)
        )
        self._say(figures)
        return figures

    def keep(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add results of the figure's own: keywords of `records.record`, without bench and device."""
        replace_records(self.path, [self._record(packages=(), **line) for line in lines])

    def _record(self, **values: Any) -> dict[str, Any]:
        device, driver = self.gpu or (None, None)
        return record(bench=self.bench, device=device, driver=driver, **values)

    def _show_versions(self, system: System) -> None:
        versions = ", ".join(f"{name} {version}" for name, version in system.facts.versions.items())
        self.console.print(f"{system.facts.name}: {versions}", highlight=False)

    def _say(self, figures: Mapping[str, float]) -> None:
        parts = [f"{label} {_cell(figures.get(name))}" for name, label in SHOWN.items()]
        self.console.print("  " + ", ".join(parts), highlight=False, soft_wrap=True)


def kept_points(path: Path) -> list[dict[str, Any]]:
    """Figures of the served points of a file of results, with `series`, `system`, `rate` and `device`; NaN
    where a figure is unknown."""
    points = []
    for line in read_records(path):
        match = POINT_CASE.fullmatch(line["case"])
        if line["metric"] == POINT_METRIC and match is not None and "figures" in line["shapes"]:
            names = {
                "series": match[1],
                "system": match[2],
                "rate": float(match[3]),
                "device": line["device"],
            }
            figures = line["shapes"]["figures"]
            points.append({n: math.nan if v is None else v for n, v in figures.items()} | names)
    return points


def workload_of(point: Point) -> Workload:
    """What a point serves: tokens of its model, contexts that it and its server take."""
    settings, tokenizer = point.workload, point.choice.tokenizer
    if tokenizer is None:
        settings = replace(settings, vocab_size=point.choice.spec.vocab_size)
    limits = (
        settings.max_context_tokens,
        point.server.max_context_tokens,
        point.choice.spec.max_context_tokens,
    )
    settings = replace(settings, max_context_tokens=min(limits))
    return make_workload(settings, tokenizer, tokens=_tokens(_without_times(settings), point.choice))


@functools.lru_cache(maxsize=2)
def _tokens(settings: WorkloadSettings, choice: ModelChoice) -> tuple[TokenConversation, ...]:
    """Tokenised once for all rates and think times."""
    return tuple(tokenise(settings, choice.tokenizer))


def _without_times(settings: WorkloadSettings) -> WorkloadSettings:
    rate = None if settings.requests_per_s is None else 1.0
    return replace(settings, requests_per_s=rate, think_time_s=0.0, head_start_s=0.0)


def make_console() -> Console:
    """Where progress and tables go: wide enough for tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def device_label(found: tuple[str, str] | None) -> str:
    """The name of a device in file names: `h200`, `cpu`."""
    return "cpu" if found is None else found[0].split()[-1].lower()


def rate_points(
    *,
    series: str,
    systems: Sequence[str],
    rates: Sequence[float] | Mapping[str, Sequence[float]],
    choice: ModelChoice,
    server: Callable[[str], ServerSettings],
    workload: Callable[[float], WorkloadSettings],
    run: RunSettings,
    facts: Mapping[str, Any] | None = None,
) -> list[Point]:
    """Every system at every rate, a system's rates in ascending order.

    Args:
        series: of the curve.
        systems: names.
        rates: requests/s; by system if they differ.
        choice: the model.
        server: what a system is given.
        workload: settings at a rate.
        run: how long.
        facts: further settings for the results.
    """
    points = []
    for system in systems:
        of_system = rates.get(system, ()) if isinstance(rates, Mapping) else rates
        points += [
            Point(
                case=f"{series}_{_case_name(system)}_rate{rate:g}",
                series=series,
                system=system,
                choice=choice,
                server=server(system),
                workload=workload(rate),
                run=run,
                facts=facts or {},
            )
            for rate in sorted(of_system)
        ]
    return points


def _case_name(system: str) -> str:
    return "openai-server" if "://" in system else system


def _plain(value: Any) -> Any:
    """A value that JSON has: no NaN, no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


RESULTS = ROOT / "benchmarks" / "results"
"""Where results are kept."""
