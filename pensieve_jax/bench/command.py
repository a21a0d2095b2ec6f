"""The command `pensieve bench step`."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pensieve_jax.bench.cases import CASES, Case
from pensieve_jax.bench.presets import PRESETS, find_preset
from pensieve_jax.bench.report import ceilings_line, records, results_table, trace_table
from pensieve_jax.bench.step import StepBench
from pensieve_jax.bench.trace import record_trace
from pensieve_jax.config import default_compilation_cache
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KV_DTYPES, check_kv_dtype
from pensieve_jax.engine.build import keep_programs
from pensieve_jax.records import gpu, replace_records


def bench_step(
    model: Annotated[str, typer.Argument(help=f"Dimensions: {', '.join(PRESETS)}.")] = "tiny",
    only: Annotated[
        str | None, typer.Option(help="Cases whose name contains one of these words, by comma.")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help=f"How KV is kept: {', '.join(KV_DTYPES)}.", show_default="as the weights"),
    ] = None,
    num_shards: Annotated[int, typer.Option(min=1, help="Devices to spread the model over.")] = 1,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Query tokens of a step at most; longer cases run in several.")
    ] = 16_384,
    out: Annotated[
        Path | None, typer.Option(help="File of JSON lines in which the results replace older ones.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for XLA traces; shows the kernels of a step, too.")
    ] = None,
    traced: Annotated[
        str, typer.Option(help="Cases that are traced: those whose name contains one of these words.")
    ] = "decode_b64",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show log messages, and where an error comes from.")
    ] = False,
) -> None:
    """Measure decode and prefill steps, swapping and host gaps with random weights, beside their floors."""
    del debug
    kv = check_kv_dtype(kv_dtype)
    preset, cases, console = find_preset(model), _chosen("only", only), Console()
    name, driver = gpu() or (None, None)
    device = jax.devices()[0].device_kind if name is None else name
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    begin = time.perf_counter()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("", total=len(cases))

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not errors.is_terminal:
                errors.print(f"{time.perf_counter() - begin:6.1f} s: {text}", highlight=False)

        say("making the model")
        bench = StepBench(
            preset,
            cases,
            num_shards=num_shards,
            step_tokens=step_tokens,
            kv_dtype=kv,
            programs=keep_programs(default_compilation_cache()),
        )
        try:
            chosen = [] if trace is None else _among(bench.cases, "traced", traced)
            seen = {case: trace / case.name for case in chosen if trace is not None}
            say("compiling")
            for _ in bench.compile():
                pass
            for case in bench.cases:
                say(case.name)
                results.append(bench.measure(case))
                if out is not None:  # as they come, so that a run that is cut short leaves something
                    lines = records(bench, results, model=model, device=name, driver=driver)
                    replace_records(out, lines)
                if case in seen:
                    found = record_trace(partial(bench.once, case), seen[case])
                    console.print(f"trace: {trace}" if found is None else trace_table(case.name, found))
                progress.advance(task)
        finally:
            bench.close()
    console.print(
        f"{model} on {num_shards} x {device}: {ceilings_line(bench)}", highlight=False, soft_wrap=True
    )
    if preset.scale > 1:
        console.print(f"sizes of the cases are divided by {preset.scale}", highlight=False)
    console.print(results_table(results))
    if out is not None:
        console.print(f"results: {out}", highlight=False, soft_wrap=True)


def _chosen(name: str, words: str | None) -> list[Case]:
    return list(CASES) if words is None else _among(CASES, name, words)


def _among(cases: Sequence[Case], name: str, words: str) -> list[Case]:
    found = [case for case in cases if any(word.strip() in case.name for word in words.split(","))]
    if not found:
        names = ", ".join(case.name for case in cases)
        raise InvalidArgumentError(f"{name}: got {words!r}, expected words of these names: {names}")
    return found
