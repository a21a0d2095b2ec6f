"""The command `pensieve simulate`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from host_cache.policies import POLICIES
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KV_DTYPES
from pensieve_jax.core.profile import read_profile
from pensieve_jax.simulator.arrivals import with_time_scale
from pensieve_jax.simulator.readers import READERS, read_workload
from pensieve_jax.simulator.sweep import Point, Row, grid, run_sweep, varied, write_csv, write_rows
from pensieve_jax.simulator.synthetic import SyntheticWorkload
from pensieve_jax.simulator.workload import SimConversation

SYNTHETIC = "synthetic"
DEFAULTS = Point()
SHOWN = {
    "offered_requests_per_s": "offered/s",
    "served_requests_per_s": "served/s",
    "hit_rate_device": "device hits",
    "hit_rate_host": "host hits",
    "recomputed_share": "recomputed",
    "normalized_latency_s_mean": "s/token",
    "normalized_latency_s_p99": "p99",
    "ttft_s_mean": "first token s",
}
"""Figures of the table, and what stands above them; hits and recomputed are shares of the history. The files
have all figures."""
SHORT = {
    "requests_per_s": "rate",
    "think_time_s": "think s",
    "device_kv_gb": "device GB",
    "host_kv_gb": "host GB",
}
"""What stands above settings, where the name is long."""
PLOTTED = ("host_hit_rate", "recomputed_tokens", "normalized_latency_s_mean")


def simulate(
    workload: Annotated[
        Path | None,
        typer.Argument(help="Conversations or a trace. Without one they are made up.", show_default=False),
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", help=f"Of the workload: {', '.join(READERS)}.")
    ] = "jsonl",
    rate: Annotated[
        str | None,
        typer.Option(help="Requests/s of Poisson arrivals, on average. Without it the recorded times hold."),
    ] = None,
    think_time: Annotated[str, typer.Option(help="Mean seconds between an answer and the next turn.")] = "60",
    model: Annotated[str | None, typer.Option(help="Names of models.", show_default=DEFAULTS.model)] = None,
    device: Annotated[
        str | None, typer.Option(help="Names of devices.", show_default=DEFAULTS.device)
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help=f"Who leaves a full tier first: {', '.join(POLICIES)}, or module:attribute."),
    ] = DEFAULTS.policy,
    keep_state: Annotated[str, typer.Option(help="true, false, or both: keep KV between turns.")] = "true",
    share_prefixes: Annotated[
        str, typer.Option(help="true, false, or both: share what conversations begin with alike.")
    ] = "true",
    load_or_recompute: Annotated[
        str, typer.Option(help="true, false, or both: recompute a chunk rather than load it, where cheaper.")
    ] = "false",
    device_gb: Annotated[str, typer.Option(help="KV on each device, GB.")] = f"{DEFAULTS.device_kv_gb:g}",
    host_gb: Annotated[str, typer.Option(help="KV in the host, for each device, GB.")] = (
        f"{DEFAULTS.host_kv_gb:g}"
    ),
    chunk: Annotated[str, typer.Option(help="Tokens of a chunk.")] = str(DEFAULTS.page_tokens),
    kv_dtype: Annotated[
        str | None,
        typer.Option(help=f"How KV is kept: {', '.join(KV_DTYPES)}.", show_default="as the weights"),
    ] = None,
    step_tokens: Annotated[str, typer.Option(help="Query tokens of a step.")] = str(DEFAULTS.step_tokens),
    max_rows: Annotated[str, typer.Option(help="Rows of a step.")] = str(DEFAULTS.max_rows),
    duration: Annotated[float, typer.Option(help="Simulated seconds, with --rate.")] = DEFAULTS.duration_s,
    warm_up: Annotated[
        float, typer.Option(help="Share of the time that figures leave out.")
    ] = DEFAULTS.warm_up,
    speed: Annotated[float, typer.Option(help="How much faster recorded times run.")] = 1.0,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="A file of `pensieve profile`: its model and device with their measured times.",
            show_default="estimated times",
        ),
    ] = None,
    seed: Annotated[str, typer.Option(help="Of everything random.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder for the numbers and plots.")] = Path("simulate-out"),
    processes: Annotated[int, typer.Option(min=1, help="Points that run at a time.")] = 1,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show log messages, and where an error comes from.")
    ] = False,
) -> None:
    """Replay conversations on a simulated server. Where several values may stand, separate them by commas:
    every combination is run."""
    measured = None if profile is None else read_profile(profile)
    points = grid(
        requests_per_s=[None] if rate is None else _numbers("rate", rate),
        think_time_s=_numbers("think-time", think_time),
        model=_texts(model or (measured.model.name if measured else DEFAULTS.model)),
        device=_texts(device or (measured.device if measured else DEFAULTS.device)),
        keep_state=_switches("keep-state", keep_state),
        share_prefixes=_switches("share-prefixes", share_prefixes),
        load_or_recompute=_switches("load-or-recompute", load_or_recompute),
        device_kv_gb=_numbers("device-gb", device_gb),
        host_kv_gb=_numbers("host-gb", host_gb),
        page_tokens=_integers("chunk", chunk),
        kv_dtype=[kv_dtype],
        step_tokens=_integers("step-tokens", step_tokens),
        max_rows=_integers("max-rows", max_rows),
        duration_s=[duration],
        warm_up=[warm_up],
        seed=_integers("seed", seed),
        policy=_texts(policy),
    )
    for point in points:
        point.config(measured)  # refuses what is wrong before anything runs
    if not 0 < speed < math.inf:
        raise InvalidArgumentError(f"speed: got {speed}, expected a number above 0")
    console = Console()
    conversations = _workload(console, workload, format_name, points, speed)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("simulating", total=None)
        rows.extend(
            run_sweep(
                conversations,
                points,
                profile=measured,
                processes=processes,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        )
    write_csv(out / "sweep.csv", rows)
    write_rows(out / "sweep.jsonl", rows)
    console.print(_table(rows, varied(points)))
    console.print(f"numbers: {out / 'sweep.csv'}, {out / 'sweep.jsonl'}", soft_wrap=True, highlight=False)
    _plot(console, rows, points, out)


def _workload(
    console: Console, path: Path | None, format_name: str, points: list[Point], speed: float
) -> list[SimConversation]:
    rates = [point.requests_per_s for point in points]
    if path is None:
        if None in rates:
            raise InvalidArgumentError(
                "rate: got none, expected one, since made-up conversations have no times"
            )
        conversations = SyntheticWorkload().draw(points[0].seed)
        name = SYNTHETIC
    else:
        conversations = read_workload(path, format_name)
        name = path.name
    turns = sum(len(conversation.turns) for conversation in conversations)
    if None in rates and len(conversations) > 1 and all(c.turns[0].arrival_s is None for c in conversations):
        raise InvalidArgumentError(f"rate: got none, expected one, since {name} has no recorded times")
    console.print(f"{name}: {len(conversations)} conversations, {turns} turns", highlight=False)
    return with_time_scale(conversations, speed)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )


def _table(rows: list[Row], settings: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in settings:
        width = max(len(_cell(row[name])) for row in rows)
        table.add_column(SHORT.get(name, name.replace("_", " ")), min_width=width)
    for heading in SHOWN.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in (*settings, *SHOWN)))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else "-"
    return str(value)


def _plot(console: Console, rows: list[Row], points: list[Point], out: Path) -> None:
    """One picture against the first setting with several numbers, a line for each value of another."""
    settings = varied(points)
    numeric = [name for name in settings if type(rows[0][name]) in (float, int)]
    if not numeric:
        return
    try:
        from pensieve_jax.simulator.plot import write_plot  # noqa: PLC0415 (matplotlib is an extra)
    except ImportError as error:
        console.print(f"[yellow]no plot:[/] {error} (the extra `bench` brings it)")
        return
    others = [name for name in settings if name != numeric[0]]
    for row in rows:
        row["series"] = ", ".join(f"{name} {_cell(row[name])}" for name in others)
    path = out / "sweep.png"
    write_plot(rows, x=numeric[0], ys=PLOTTED, series="series" if others else None, path=path)
    console.print(f"plot: {path}", soft_wrap=True, highlight=False)


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in _texts(text)]
    except ValueError:
        raise InvalidArgumentError(f"{name}: got {text!r}, expected numbers, separated by commas") from None


def _integers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in _texts(text)]
    except ValueError:
        raise InvalidArgumentError(f"{name}: got {text!r}, expected integers, separated by commas") from None


def _switches(name: str, text: str) -> list[bool]:
    known = {"true": [True], "false": [False], "both": [True, False]}
    if text not in known:
        raise InvalidArgumentError(f"{name}: got {text!r}, expected true, false or both")
    return known[text]
