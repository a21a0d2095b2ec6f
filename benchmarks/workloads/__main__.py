"""Makes a workload once, for many systems: prints what it is and writes its file.

python -m benchmarks.workloads sharegpt --conversations 500 --rate 4 --out work.npz
python -m benchmarks.workloads mooncake --path DATA/mooncake/conversation_trace.jsonl --recorded-times
"""

import argparse
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.workloads.make import SOURCES, WorkloadSettings, make_workload
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.models import load_tokenizer
from pensieve_jax.simulator.synthetic import SyntheticWorkload

MEANS = ("mean_turns", "mean_input_tokens", "mean_output_tokens")
DEFAULTS = {field.name: field.default for field in fields(WorkloadSettings)}


def synthetic_options(parser: argparse.ArgumentParser) -> None:
    """Means of synthetic conversations."""
    usual = SyntheticWorkload()
    for name in MEANS:
        option = "--" + name.replace("_", "-")
        parser.add_argument(
            option, type=float, default=getattr(usual, name), help="of synthetic conversations"
        )


def synthetic_of(given: argparse.Namespace) -> SyntheticWorkload | None:
    """What those options say; None for other sources."""
    if given.source != "synthetic":
        return None
    return SyntheticWorkload(**{name: getattr(given, name) for name in MEANS})


def main(arguments: list[str] | None = None) -> None:
    """Make one workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--path", type=Path, help="the source's file")
    parser.add_argument(
        "--tokenizer", type=Path, help="a checkpoint whose tokenizer is used; none: drawn ids"
    )
    parser.add_argument("--conversations", type=int, default=DEFAULTS["conversations"])
    parser.add_argument("--rate", type=float, default=DEFAULTS["requests_per_s"], help="requests/s")
    parser.add_argument("--recorded-times", action="store_true", help="a trace's own times, not a rate")
    parser.add_argument("--speed", type=float, default=DEFAULTS["speed"], help="of recorded times")
    parser.add_argument("--think-time", type=float, default=DEFAULTS["think_time_s"], help="mean, in s")
    parser.add_argument("--head-start", type=float, default=DEFAULTS["head_start_s"], help="in s")
    parser.add_argument("--max-context", type=int, default=DEFAULTS["max_context_tokens"])
    parser.add_argument("--vocab", type=int, default=DEFAULTS["vocab_size"], help="of drawn ids")
    synthetic_options(parser)
    parser.add_argument("--seed", type=int, default=DEFAULTS["seed"])
    parser.add_argument("--out", type=Path, help="file to write, .npz")
    given = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        settings = WorkloadSettings(
            source=given.source,
            path=given.path,
            conversations=given.conversations,
            requests_per_s=None if given.recorded_times else given.rate,
            think_time_s=given.think_time,
            speed=given.speed,
            max_context_tokens=given.max_context,
            vocab_size=given.vocab,
            head_start_s=given.head_start,
            synthetic=synthetic_of(given),
            seed=given.seed,
        )
        tokenizer = None if given.tokenizer is None else load_tokenizer(given.tokenizer)
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("tokenising", total=None)
            workload = make_workload(
                settings,
                tokenizer,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if given.out is not None:
            workload.write(given.out)
            console.print(f"file: {given.out}, {given.out.stat().st_size / 1e6:.2f} MB")
    except (PensieveError, OSError) as error:
        raise SystemExit(f"workloads: {error}") from error
    for name, value in workload.figures().items():
        console.print(f"{name}: {value}")
    console.print(f"seed: {settings.seed}")
    console.print(f"digest: {workload.digest}")


if __name__ == "__main__":
    main()
