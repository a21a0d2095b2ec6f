"""The command `pensieve bench step`."""

from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pensieve_jax.bench.cases import CASES, Case, Kind
from pensieve_jax.bench.presets import PRESETS, find_preset
from pensieve_jax.bench.report import ceilings_line, records, results_table, trace_table
from pensieve_jax.bench.step import StepBench
from pensieve_jax.bench.trace import record_trace
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.records import gpu, replace_records

TRACED = "decode_b64_ctx1024"
"""The case of which a step is traced, unless it was left out: then the first one."""


def bench_step(
    model: Annotated[str, typer.Argument(help=f"Dimensions: {', '.join(PRESETS)}.")] = "tiny",
    only: Annotated[
        str | None, typer.Option(help="Cases whose name contains one of these words, by comma.")
    ] = None,
    num_shards: Annotated[int, typer.Option(min=1, help="Devices to spread the model over.")] = 1,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Query tokens of a step at most; longer cases run in several.")
    ] = 16_384,
    out: Annotated[
        Path | None, typer.Option(help="File of JSON lines in which the results replace older ones.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for an XLA trace of one step; shows its kernels, too.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show log messages, and where an error comes from.")
    ] = False,
) -> None:
    """Measure decode and prefill steps, swapping and host gaps with random weights, beside their floors."""
    del debug
    preset, cases, console = find_preset(model), _chosen(only), Console()
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("making the model", total=len(cases))
        bench = StepBench(preset, cases, num_shards=num_shards, step_tokens=step_tokens)
        try:
            for case in bench.cases:
                progress.update(task, description=case.name)
                results.append(bench.measure(case))
                progress.advance(task)
            kernels = None if trace is None else _trace(bench, trace)
        finally:
            bench.close()
    name, driver = gpu() or (None, None)
    device = jax.devices()[0].device_kind if name is None else name
    console.print(
        f"{model} on {num_shards} x {device}: {ceilings_line(bench)}", highlight=False, soft_wrap=True
    )
    if preset.scale > 1:
        console.print(f"sizes of the cases are divided by {preset.scale}", highlight=False)
    console.print(results_table(results))
    if kernels is not None:
        console.print(kernels)
    if out is not None:
        replace_records(out, records(bench, results, model=model, device=name, driver=driver))
        console.print(f"results: {out}", highlight=False, soft_wrap=True)


def _chosen(only: str | None) -> list[Case]:
    words = [""] if only is None else [word.strip() for word in only.split(",")]
    cases = [case for case in CASES if any(word in case.name for word in words)]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        raise InvalidArgumentError(f"only: got {only!r}, expected words of these names: {names}")
    return cases


def _trace(bench: StepBench, folder: Path) -> object:
    plain = [case for case in bench.cases if case.kind is Kind.STEP]
    if not plain:
        raise InvalidArgumentError("trace: got no case whose steps run back to back, expected one")
    case = next((case for case in plain if case.name == TRACED), plain[0])
    steps = bench.steps(case)
    found = record_trace(lambda: jax.block_until_ready(bench.run(steps)), folder)
    return f"trace: {folder}" if found is None else trace_table(case.name, found)
