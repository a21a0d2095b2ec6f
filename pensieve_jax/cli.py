"""The command `pensieve` and its commands. Heavy imports wait for the command that needs them."""

import functools
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pensieve_jax.assets import DEFAULT_FOLDER, SMOLLM2, AssetError, fetch_sharegpt, fetch_smollm2
from pensieve_jax.core.errors import InvalidArgumentError, PensieveError
from pensieve_jax.core.model_shape import KV_DTYPES, check_kv_dtype
from pensieve_jax.versions import package_version

if TYPE_CHECKING:
    from pensieve_jax.demo import Comparison, Workload

USAGE_STATUS, FAILURE_STATUS, INTERRUPT_STATUS = 2, 1, 130
"""Exit statuses: what was asked for is wrong, it went wrong, Ctrl-C."""
CHAT_ROWS = 8
"""Rows of a step of a chat: it has one conversation, whose context has few gaps."""

app = typer.Typer(
    name="pensieve",
    help="Serves large language models and keeps every conversation's KV state between its turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Dtype(StrEnum):
    """Dtypes of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Shows errors as one line, with the exit statuses above; `debug` shows where they come from."""

    @functools.wraps(function)
    def run(*, debug: bool, **arguments: Any) -> None:
        _prepare(debug)
        try:
            function(debug=debug, **arguments)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(INTERRUPT_STATUS) from None
        except Exception as error:  # noqa: BLE001 (nobody who uses a command wants a traceback)
            if debug:
                traceback.print_exc()
            expected = isinstance(error, PensieveError | OSError)
            hint = "" if expected or debug else " (--debug shows where)"
            text = f"{error}" if expected else f"{type(error).__name__}: {error}"
            Console(stderr=True).print(f"error: {text}{hint}", soft_wrap=True, markup=False, highlight=False)
            wrong_use = isinstance(error, InvalidArgumentError)
            raise typer.Exit(USAGE_STATUS if wrong_use else FAILURE_STATUS) from None

    return run


class _OneLine(logging.Formatter):
    """Log records without tracebacks."""

    def formatException(self, ei: Any) -> str:
        return ""


def _prepare(debug: bool) -> None:
    """Quiet third parties, before they are imported."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch was not found
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s") if debug else _OneLine("%(message)s"))
    for name in ("pensieve_jax", "host_cache"):
        logging.getLogger(name).handlers = [handler]
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.INFO if debug else logging.WARNING)


def _start_jax() -> None:
    """Keep compiled programs between runs, unless the user has set a place for them."""
    import jax

    if not jax.config.jax_compilation_cache_dir:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "pensieve-jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class _Stages:
    """One progress bar for work in stages, on stderr; silent where that is no terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._name = ""

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` of a stage is done."""
        if self._task is None or name != self._name:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task, self._name = self._progress.add_task(name, total=total), name
        self._progress.update(self._task, completed=done, total=total)

    def stage(self, name: str) -> Callable[[int, int], None]:
        """The bar as a function of (done, total) for one stage."""
        return functools.partial(self, name)


@contextmanager
def _stages() -> Iterator[_Stages]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield _Stages(progress)


Debug = Annotated[bool, typer.Option("--debug", help="Show log messages, and where an error comes from.")]
Checkpoint = Annotated[
    Path | None,
    typer.Argument(
        help="A Hugging Face folder, a GGUF file, or a folder of `pensieve convert`. "
        "Without one: the demo's model, if it was fetched.",
        show_default=False,
    ),
]
DevicePages = Annotated[
    int | None, typer.Option(min=1, help="Pages of 32 tokens in device memory.", show_default="what fits")
]
HostPages = Annotated[
    int | None, typer.Option(min=0, help="Pages of 32 tokens in host memory.", show_default="what fits")
]
KvOption = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", help=f"How KV is kept: {', '.join(KV_DTYPES)}.", show_default="as the weights"
    ),
]
ProfilePath = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="What recomputing costs: a file of `pensieve profile`.",
        show_default="an estimate",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        Console().print(f"pensieve {package_version('pensieve-jax')}", highlight=False)
        raise typer.Exit


@app.callback()
def _pensieve(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del show_version


@app.command()
@_command
def chat(
    checkpoint: Checkpoint = None,
    conversation: Annotated[
        str | None, typer.Option(help="Id to open or begin.", show_default="a fresh one")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="File that keeps the conversations.", show_default="they end with the chat"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of a new conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Likeliest tokens, by the sum of their probabilities.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Likeliest tokens, by number; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the random choices.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Longest conversation, in tokens.", show_default="the model's")
    ] = None,
    device_pages: DevicePages = None,
    host_pages: HostPages = None,
    policy: Annotated[
        str, typer.Option(help="Who leaves first: a policy's name, or module:attribute.")
    ] = "retention-value",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of weights and KV.", show_default="the checkpoint's")
    ] = None,
    kv_dtype: KvOption = None,
    num_shards: Annotated[int, typer.Option(min=1, help="Devices to spread the model over.")] = 1,
    profile: ProfilePath = None,
    debug: Debug = False,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer; at the prompt it leaves, as Ctrl-D does."""
    from pensieve_jax.config import EngineConfig, TierConfig
    from pensieve_jax.core.types import SamplingParams
    from pensieve_jax.scheduler.scheduler import SchedulerConfig

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    config = EngineConfig(
        tiers=TierConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            policy=policy,
            kv_dtype=check_kv_dtype(kv_dtype),
        ),
        scheduler=SchedulerConfig(max_rows=CHAT_ROWS),
        max_context_tokens=max_context,
        log_path=log,
        profile_path=profile,
    )
    path = _checkpoint(checkpoint)
    _start_jax()
    from pensieve_jax.chat import Chat
    from pensieve_jax.engine import Engine
    from pensieve_jax.engine.warmup import warm_up
    from pensieve_jax.interrupts import closing_on_interrupt

    with _stages() as stages:
        engine = Engine.from_checkpoint(
            path,
            config,
            dtype=dtype and dtype.value,
            num_shards=num_shards,
            progress=stages.stage("loading"),
            host_progress=stages.stage("host memory"),
        )
    with engine:
        with _stages() as stages, closing_on_interrupt(engine.close):
            warm_up(engine, params, max_turns=1, progress=stages.stage("compiling"))
        Chat(engine, Console(), conversation_id=conversation, params=params, system=system).run()


@app.command()
@_command
def demo(
    conversations: Annotated[int, typer.Option(min=1, help="How many are served, interleaved.")] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 7,
    max_output: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 16,
    device_pages: Annotated[
        int, typer.Option(min=1, help="Pages of 32 tokens on the device; few on purpose.")
    ] = 64,
    host_pages: Annotated[int, typer.Option(min=0, help="Pages of 32 tokens in host memory.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which turns come.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the numbers.")] = Path("demo-out"),
    assets: Annotated[Path, typer.Option(help="Folder of the model and the recorded conversations.")] = (
        DEFAULT_FOLDER
    ),
    random_model: Annotated[
        bool, typer.Option("--random-model", help="Fetch nothing: a small random model, random messages.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve real conversations with their state kept and without, and compare."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    _start_jax()
    from pensieve_jax.demo import DemoSizes, compare, report_tables, serve, summary_lines, to_json
    from pensieve_jax.info import machine_facts

    sizes = DemoSizes(max_output_tokens=max_output, device_pages=device_pages, host_pages=host_pages)
    workload = _demo_workload(
        console, None if random_model else assets, conversations=conversations, turns=turns, seed=seed
    )
    console.print(
        f"Serving {workload.title} twice, one turn at a time, at most {max_output} tokens an answer: "
        f"with the state kept ({device_pages} pages on the device, {host_pages} in host memory), "
        "and without.",
        soft_wrap=True,
        highlight=False,
    )
    with _stages() as stages:
        comparison = compare(workload, *serve(workload, sizes, stages))
    for table in report_tables(comparison):
        console.print()
        console.print(table)
    console.print()
    numbers = to_json(comparison, sizes, seed=seed, machine=machine_facts())
    (out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    for line in summary_lines(comparison):
        console.print(line, soft_wrap=True, highlight=False)
    _plot(console, comparison, out / "demo.png")
    console.print(f"numbers: {out / 'demo.json'}", soft_wrap=True, highlight=False)
    if not comparison.equal:
        raise typer.Exit(FAILURE_STATUS)


def _demo_workload(
    console: Console, assets: Path | None, *, conversations: int, turns: int, seed: int
) -> "Workload":
    """Real conversations, or random ones if `assets` is None or can't be had."""
    from pensieve_jax.demo import random_workload, sharegpt_workload

    if assets is not None:
        try:
            checkpoint, recording = fetch_smollm2(assets), fetch_sharegpt(assets)
            with _stages() as stages:
                return sharegpt_workload(
                    checkpoint,
                    recording,
                    conversations=conversations,
                    turns=turns,
                    seed=seed,
                    progress=stages.stage("loading"),
                )
        except AssetError as error:
            console.print(f"[yellow]can't be had:[/] {error}", soft_wrap=True, highlight=False)
    console.print(
        "[yellow]fallback:[/] a small model with random weights and random messages: what is computed "
        "and what is reused is real, the answers mean nothing",
        soft_wrap=True,
        highlight=False,
    )
    return random_workload(conversations=conversations, turns=turns, seed=seed)


def _plot(console: Console, comparison: "Comparison", path: Path) -> None:
    try:
        from pensieve_jax.demo.plot import write_plot
    except ImportError as error:
        console.print(f"[yellow]no plot:[/] {error} (the extra `bench` brings it)")
        return
    write_plot(comparison, path)
    console.print(f"plot: {path}", soft_wrap=True, highlight=False)


@app.command()
@_command
def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(help="Folder to make; it must not exist, or be empty.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights.", show_default="the checkpoint's")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as an Orbax checkpoint, which loads sharded."""
    from pensieve_jax.models import convert_checkpoint

    with _stages() as stages:
        convert_checkpoint(
            source, dest, dtype=dtype and dtype.value, progress=stages.stage(f"converting {source.name}")
        )
    Console().print(f"converted {source} to {dest}", soft_wrap=True, highlight=False)


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose options stand with what it does, since listing them needs heavy imports."""


@app.command(context_settings=PASSED_ON)
def simulate(context: typer.Context) -> None:
    """Replay conversations on a simulated server; `pensieve simulate --help` lists the settings."""
    from pensieve_jax.simulator.command import simulate as command

    _pass_on(context, command)


@app.command(context_settings=PASSED_ON)
def profile(context: typer.Context) -> None:
    """Measure a model on this machine; `pensieve profile --help` lists the settings."""
    _prepare(debug=False)
    _start_jax()
    from pensieve_jax.profiler.command import profile as command

    _pass_on(context, command)


bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("step", context_settings=PASSED_ON)
def bench_step(context: typer.Context) -> None:
    """Measure a model's steps beside their floors; `pensieve bench step --help` lists the settings."""
    _prepare(debug=False)
    _start_jax()
    from pensieve_jax.bench.command import bench_step as command

    _pass_on(context, command)


def _pass_on(context: typer.Context, command: Callable[..., None]) -> None:
    inner = typer.Typer(add_completion=False)
    inner.command()(_command(command))
    inner(args=context.args, prog_name=context.command_path)


@app.command()
@_command
def info(
    checkpoint: Checkpoint = None,
    kv_dtype: KvOption = None,
    profile: ProfilePath = None,
    debug: Debug = False,
) -> None:
    """Show versions, devices and kernels; and what a checkpoint is."""
    from pensieve_jax.info import checkpoint_facts, machine_facts

    console = Console()
    console.print(_facts_table(None, machine_facts()))
    path = checkpoint or _demo_model()
    if path is not None:
        console.print()
        console.print(_facts_table(str(path), checkpoint_facts(path, profile, check_kv_dtype(kv_dtype))))


def _facts_table(title: str | None, facts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _checkpoint(given: Path | None) -> Path:
    """The checkpoint that was asked for, or the demo's model."""
    path = given or _demo_model()
    if path is None:
        raise InvalidArgumentError(
            f"CHECKPOINT: got none, expected one, since the demo's model is not in {DEFAULT_FOLDER} "
            "(`make assets` fetches it)"
        )
    return path


def _demo_model() -> Path | None:
    path = DEFAULT_FOLDER / SMOLLM2.path
    return path if path.is_file() else None


if __name__ == "__main__":
    app()
