"""The paper's figure 12: the attention kernel over pages, against contiguous attention and the copy rate.

    python -m benchmarks.figures.fig12

Shows what `python -m benchmarks.kernels.attention` has measured on a GPU; it measures nothing itself.
"""

from rich.table import Table

from benchmarks.figures.common import quick_options
from benchmarks.records import command_line, read_records
from benchmarks.serving.study import RESULTS, make_console


def kernel_lines() -> list[dict]:
    """Kept results of the attention kernel."""
    paths = sorted(RESULTS.glob("kernels-*.jsonl"))
    return [line for path in paths for line in read_records(path) if line["ceiling"] is not None]


def main(arguments: list[str] | None = None) -> None:
    """Show it."""
    quick_options(__doc__).parse_args(arguments)
    console = make_console()
    console.print(f"command: {command_line()}", highlight=False, soft_wrap=True)
    lines = kernel_lines()
    if not lines:
        raise SystemExit(
            f"fig12: no kernels-*.jsonl in {RESULTS}: run python -m benchmarks.kernels.attention"
        )
    table = Table("case", "metric", "measured", "beside it", "ratio", "unit", "on", "versions")
    for line in lines:
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        figures = (f"{line[name]:.4g}" for name in ("value", "ceiling", "ratio"))
        table.add_row(line["case"], line["metric"], *figures, line["unit"], line["device"], versions)
    console.print(table)


if __name__ == "__main__":
    main()
