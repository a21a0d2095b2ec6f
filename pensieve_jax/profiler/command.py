"""The command `pensieve profile`."""

from pathlib import Path
from typing import Annotated

import jax
import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pensieve_jax.assets import DEFAULT_FOLDER, SMOLLM2
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KV_DTYPES, check_kv_dtype
from pensieve_jax.core.profile import StepProfile, write_profile
from pensieve_jax.models import ServableModel, load_model
from pensieve_jax.models.loading import resolve_dtype
from pensieve_jax.models.presets import PRESETS, random_model
from pensieve_jax.parallel import make_mesh
from pensieve_jax.profiler.measure import ProfileConfig, measure_profile


def profile(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="As for `pensieve chat`. Without one: the demo's model.", show_default=False),
    ] = None,
    dimensions: Annotated[
        str | None,
        typer.Option(help=f"Random weights in place of a checkpoint: {', '.join(PRESETS)}."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the checkpoint's")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help=f"How KV is kept: {', '.join(KV_DTYPES)}.", show_default="as the weights"),
    ] = None,
    num_shards: Annotated[int, typer.Option(min=1, help="Devices to spread the model over.")] = 1,
    max_context: Annotated[
        int | None, typer.Option(help="Longest context, in tokens.", show_default="the model's")
    ] = None,
    step_tokens: Annotated[
        int | None,
        typer.Option(help="Query tokens of the largest step.", show_default="2048; on a CPU 256"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each step; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of token ids and random weights.")] = 0,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("profile.json"),
    debug: Annotated[
        bool, typer.Option("--debug", help="Show log messages, and where an error comes from.")
    ] = False,
) -> None:
    """Measure what steps, recomputing and copies cost with a model on this machine."""
    if checkpoint is not None and dimensions is not None:
        raise InvalidArgumentError("dimensions: got a checkpoint, too, expected one of them")
    console = Console()
    config = ProfileConfig.for_platform(
        jax.default_backend(),
        step_tokens=step_tokens,
        max_context_tokens=max_context,
        rounds=rounds,
        seed=seed,
        kv_dtype=check_kv_dtype(kv_dtype),
    )
    model = _model(checkpoint, dimensions, dtype, num_shards, seed)
    with _progress() as progress:
        task = progress.add_task("measuring", total=None)
        measured = measure_profile(
            model,
            config,
            num_shards=num_shards,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_profile(out, measured)
    console.print(_table(measured))
    console.print(f"{measured.source}\nprofile: {out}", soft_wrap=True, highlight=False)


def _model(
    checkpoint: Path | None, dimensions: str | None, dtype: str | None, num_shards: int, seed: int
) -> ServableModel:
    if dimensions is not None:
        return random_model(
            dimensions,
            dtype=resolve_dtype(dtype, np.dtype(ml_dtypes.bfloat16)),
            seed=seed,
            mesh=make_mesh(num_shards),
        )
    path = checkpoint or DEFAULT_FOLDER / SMOLLM2.path
    if checkpoint is None and not path.is_file():
        raise InvalidArgumentError(
            f"CHECKPOINT: got none, expected one or --dimensions, since the demo's model is not in "
            f"{DEFAULT_FOLDER} (`make assets` fetches it)"
        )
    return load_model(path, dtype=dtype, mesh=make_mesh(num_shards) if num_shards > 1 else None)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    )


def _table(measured: StepProfile) -> Table:
    """What people want to know of a profile."""
    cost = measured.recompute_cost(measured.chunk_tokens)
    table = Table(title=f"{measured.model.name} on {measured.device}", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("ms", justify="right")
    for tokens, seconds in zip(measured.tokens, measured.other_s, strict=True):
        table.add_row(f"step of {tokens:,} tokens without history", f"{1e3 * seconds:.3f}")
    for context in measured.context_tokens:
        table.add_row(f"recomputing a chunk that ends at {context:,} tokens", f"{1e3 * cost(context):.3f}")
    chunk_bytes = measured.model.kv_page_bytes(measured.chunk_tokens)
    for way, rate in (("from", measured.load_bytes_per_s), ("to", measured.store_bytes_per_s)):
        table.add_row(f"copying a chunk {way} the host", f"{1e3 * chunk_bytes / rate:.3f}")
    return table
