"""What the figures' scripts have in common: options, settings at both sizes, systems and their shares."""

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT
from benchmarks.serving.compression import Tiers, compress_tiers
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import LATENCY_LIMIT_S, SYSTEMS, RunSettings, ServerSettings
from benchmarks.serving.study import RESULTS, Point, Study, make_console, rate_points
from benchmarks.workloads import WorkloadSettings
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.simulator.settings import DEVICE_KV_BYTES, HOST_KV_BYTES
from pensieve_jax.simulator.synthetic import SyntheticWorkload

QUICK_OUT = ROOT / "figures-out"
"""Where quick runs write: their times mean nothing."""
KEEPS_NOTHING = ("stateless", "vllm-stateless", "transformers")
"""Systems whose KV memory serves turns under way alone."""
PEERS = ("vllm-stateless", "stateless", "transformers")
"""Whom throughput is compared with: the first that was measured."""
QUICK_SHAPE = SyntheticWorkload(mean_turns=2, mean_input_tokens=20, mean_output_tokens=5, sigma=0.4)
QUICK_PAGES = 8
QUICK_CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A figure's setting: the paper's, with users who think `factor` times as fast (see `compression`)."""

    choice: ModelChoice
    tiers: Tiers
    """As in the paper, before compression."""
    running_bytes: float = 24e9
    """Of the device tier, what turns under way take: not divided."""
    think_time_s: float = 60.0
    factor: float = 3.0
    step_tokens: int = 2048
    max_rows: int = 256
    max_context_tokens: int = 16_384
    source: str = "sharegpt"
    path: Path | None = None
    synthetic: SyntheticWorkload | None = None
    conversations: int = 4000
    """As many as begin in the head start and the run, at least."""
    head_start_s: float = 600.0
    run: RunSettings
    seed: int = 0

    def server(self, system: str) -> ServerSettings:
        """What a system is given. One that keeps nothing has its whole device memory for turns under way."""
        tiers = Tiers(device_bytes=self.tiers.device_bytes, host_bytes=0.0)
        if system not in KEEPS_NOTHING:
            tiers = compress_tiers(self.tiers, self.factor, self.running_bytes)
        return ServerSettings(
            tiers=tiers,
            step_tokens=self.step_tokens,
            max_rows=self.max_rows,
            max_context_tokens=self.max_context_tokens,
        )

    def workload(self, rate: float, think_time_s: float | None = None) -> WorkloadSettings:
        """What comes at a rate."""
        whole = self.think_time_s if think_time_s is None else think_time_s
        return WorkloadSettings(
            source=self.source,
            path=self.path,
            synthetic=self.synthetic,
            conversations=self.conversations,
            requests_per_s=rate,
            think_time_s=whole / self.factor,
            head_start_s=self.head_start_s,
            max_context_tokens=self.max_context_tokens,
            seed=self.seed,
        )

    def points(
        self,
        series: str,
        systems: Sequence[str],
        rates: Sequence[float] | Mapping[str, Sequence[float]],
        *,
        think_time_s: float | None = None,
    ) -> list[Point]:
        """Every system at every rate."""
        return rate_points(
            series=series,
            systems=systems,
            rates=rates,
            choice=self.choice,
            server=self.server,
            workload=lambda rate: self.workload(rate, think_time_s),
            run=self.run,
            facts={
                "factor": self.factor,
                "whole_think_time_s": self.think_time_s if think_time_s is None else think_time_s,
                "running_gb": self.running_bytes / 1e9,
            },
        )


def options(
    description: str | None, *, model: str, systems: Sequence[str], rates: Mapping[str, Sequence[float]]
) -> argparse.ArgumentParser:
    """The options that every figure of served workloads has.

    Args:
        description: the script's text.
        model: whose dimensions are served unless another is named.
        systems: that are compared unless others are named.
        rates: requests/s of each system; `default` for all others.
    """
    parser = quick_options(description)
    parser.add_argument("--model", default=model, help="dimensions by name, or a checkpoint's path")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--systems", default=",".join(systems), help=f"of {', '.join(SYSTEMS)}, or URLs; separated by commas"
    )
    parser.add_argument("--rates", help="requests/s: 5,8 for every system, or pensieve=8,12;stateless=4,8")
    parser.set_defaults(rates_by_system=rates)
    parser.add_argument(
        "--lengths", type=Path, help="conversations' lengths as JSON lines, in place of ShareGPT's file"
    )
    parser.add_argument("--think-time", type=float, default=60.0, help="mean, in s, before --factor")
    parser.add_argument("--factor", type=float, default=3.0, help="how much faster users think")
    parser.add_argument("--running-gb", type=float, default=24.0, help="KV of turns under way")
    parser.add_argument("--max-rows", type=int, default=256, help="turns that run at once at most")
    parser.add_argument("--device-kv-gb", type=float, default=DEVICE_KV_BYTES / 1e9)
    parser.add_argument("--host-kv-gb", type=float, default=HOST_KV_BYTES / 1e9, help="before --factor")
    parser.add_argument("--duration", type=float, default=100.0, help="s in which turns come")
    parser.add_argument("--warm-up", type=float, default=50.0, help="s of it that don't count")
    parser.add_argument("--drain", type=float, default=20.0, help="s in which the last turns may end")
    parser.add_argument("--head-start", type=float, default=600.0, help="s that have passed at the start")
    parser.add_argument(
        "--latency", type=float, default=LATENCY_LIMIT_S, help="at which to compare, s per token"
    )
    return parser


def simulator_option(parser: argparse.ArgumentParser) -> None:
    """Whether points are measured, simulated, or both: a GPU needn't wait for the simulator."""
    parser.add_argument(
        "--part",
        choices=("both", "measure", "simulate"),
        default="both",
        help="simulate: what is kept in --out",
    )


def quick_options(description: str | None) -> argparse.ArgumentParser:
    """The options that every figure has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny model, few turns: only shows that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of results")
    return parser


def setting_of(given: argparse.Namespace, *, model: str | None = None, num_shards: int = 1) -> Setting:
    """The setting that options ask for.

    Args:
        given: parsed `options`.
        model: in place of the one that was given.
        num_shards: devices.
    """
    if given.quick:
        choice = ModelChoice(name="tiny", dtype="float32", num_shards=num_shards)
        page_bytes = 32.0 * choice.kv_bytes_per_token
        return Setting(
            choice=choice,
            tiers=Tiers(device_bytes=QUICK_PAGES * page_bytes, host_bytes=2 * QUICK_PAGES * page_bytes),
            running_bytes=QUICK_PAGES * page_bytes / 2,
            factor=2.0,
            step_tokens=32,
            max_rows=2,
            max_context_tokens=QUICK_CONTEXT,
            source="synthetic",
            synthetic=QUICK_SHAPE,
            conversations=5,
            head_start_s=0.0,
            run=RunSettings(stop_s=math.inf, warm_up_s=0.0),
            seed=given.seed,
        )
    return Setting(
        choice=ModelChoice(name=model or given.model, dtype=given.dtype, num_shards=num_shards),
        tiers=Tiers(device_bytes=given.device_kv_gb * 1e9, host_bytes=given.host_kv_gb * 1e9),
        running_bytes=given.running_gb * 1e9,
        think_time_s=given.think_time,
        factor=given.factor,
        max_rows=given.max_rows,
        source="sharegpt" if given.lengths is None else "jsonl",
        path=given.lengths,
        head_start_s=given.head_start,
        run=RunSettings(
            stop_s=given.duration,
            warm_up_s=given.warm_up,
            drain_s=given.drain,
            latency_limit_s=given.latency,
        ),
        seed=given.seed,
    )


def rates_of(given: argparse.Namespace) -> dict[str, list[float]]:
    """Rates by system."""
    systems = given.systems.split(",")
    if given.quick:
        return {system: [20.0] for system in systems}
    known = given.rates_by_system
    if given.rates and "=" not in given.rates:
        known = {"default": _rates(given.rates)}
    elif given.rates:
        known = known | {
            name: _rates(text) for name, text in (part.split("=") for part in given.rates.split(";"))
        }
    return {system: list(known.get(system, known["default"])) for system in systems}


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


def start(given: argparse.Namespace) -> Study:
    """A study that has said what is run."""
    out = given.out or (QUICK_OUT if given.quick else RESULTS)
    study = Study("serving", out, make_console(), warm=not given.quick)
    study.header([given.seed])
    return study


def script(main: Callable[[list[str] | None], None]) -> Callable[[list[str] | None], None]:
    """A figure's `main` that ends with one line where something is wrong with what it was given."""

    @functools.wraps(main)
    def whole(arguments: list[str] | None = None) -> None:
        try:
            main(arguments)
        except (PensieveError, OSError) as error:
            raise SystemExit(f"{type(error).__name__}: {error}") from error

    return whole


def run(study: Study, points: Iterable[Point]) -> None:
    """Run points, those of one system together, in the order in which systems come first."""
    points = list(points)
    order = {key: number for number, key in enumerate(dict.fromkeys(map(_key, points)))}
    study.run(sorted(points, key=lambda point: order[_key(point)]))


def _key(point: Point) -> tuple[str, str]:
    return point.choice.name, point.system


def finish(study: Study, latency_s: float, peers: Sequence[str] = PEERS) -> list[dict[str, Any]]:
    """Show all points, and throughput at a latency against a peer."""
    study.console.print(study.table())
    lines = study.summary(latency_s, peers)
    for line in lines:
        against = "" if line["ratio"] is None else f", {line['ratio']:.2f} x {line['shapes']['peer']}"
        study.console.print(f"{line['case']}: {line['value']:.3g} requests/s{against}", highlight=False)
    study.console.print(f"results: {study.path}", highlight=False, soft_wrap=True)
    return lines
