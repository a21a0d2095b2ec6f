"""The comparison as tables and as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from pensieve_jax.demo.comparison import LATE_TURN, Comparison, TokenCounts, counts_of
from pensieve_jax.demo.play import DemoSizes, ModeRun

FORMAT_VERSION = 1
"""Of the JSON; raised when the meaning of a field changes."""


def report_tables(comparison: Comparison) -> tuple[RenderableType, ...]:
    """Tables of the whole and of the turns by their number."""
    return _totals_table(comparison), _turns_table(comparison)


def summary_lines(comparison: Comparison) -> list[str]:
    """What the numbers say, in sentences; Rich's markup."""
    what = "answers (token ids)" if comparison.is_fallback else "texts"
    lines = [f"{what} of both runs are equal: {'yes' if comparison.equal else '[red]no[/]'}"]
    lines += [
        f"  conversation {difference.conversation}, turn {difference.turn}: "
        + escape(f"with state {difference.with_state!r}, without {difference.without_state!r}")
        for difference in comparison.differences
    ]
    lines += [f"[yellow]note:[/] {what}; other sizes would show it" for what in comparison.unused]
    if comparison.late_ratio is not None:
        lines.append(
            f"at turn {LATE_TURN} and later, the time to first token with state is "
            f"{comparison.late_ratio:.2f} of that without"
        )
    compile_s = sum(program.seconds for program in comparison.compiled)
    lines.append(
        f"[yellow]note:[/] {len(comparison.compiled)} programs were compiled while turns were timed, "
        f"{compile_s:.2f} s in all"
        if comparison.compiled
        else "no time includes compilation: every shape was compiled before the first timed turn"
    )
    return lines


def to_json(
    comparison: Comparison, sizes: DemoSizes, *, seed: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, as values that JSON knows.

    Args:
        comparison: of both runs.
        sizes: that they had.
        seed: of the order of turns (and of the random model).
        machine: versions and device.
    """
    return {
        "format": FORMAT_VERSION,
        "title": comparison.title,
        "fallback": comparison.is_fallback,
        "settings": asdict(sizes) | {"seed": seed},
        "machine": machine,
        "texts_equal": comparison.equal,
        "differences": [asdict(difference) for difference in comparison.differences],
        "compiled_while_serving": [asdict(program) for program in comparison.compiled],
        "not_used": list(comparison.unused),
        "late_ratio": comparison.late_ratio,
        "by_turn": [asdict(row) | {"ratio": row.ratio} for row in comparison.rows],
        "with_state": _run_json(comparison.with_state),
        "without_state": _run_json(comparison.without_state),
    }


def _run_json(run: ModeRun) -> dict[str, Any]:
    counts = counts_of(run.turns)
    return {
        "total_s": run.total_s,
        "tokens": asdict(counts) | {"context": counts.context, "computed": counts.computed},
        "counters": asdict(run.counters),
        "turns": [
            {
                "conversation": turn.conversation + 1,
                "turn": turn.turn + 1,
                "text": turn.text,
                "token_ids": list(turn.token_ids),
                "receipt": asdict(turn.receipt),
            }
            for turn in run.turns
        ],
    }


def _totals_table(comparison: Comparison) -> Table:
    table = Table(title=comparison.title, title_justify="left")
    table.add_column("all turns together")
    table.add_column("with state", justify="right")
    table.add_column("without", justify="right")
    runs = (comparison.with_state, comparison.without_state)
    kept, lost = (counts_of(run.turns) for run in runs)

    def row(name: str, value: Callable[[TokenCounts], int], *, end_section: bool = False) -> None:
        table.add_row(name, f"{value(kept):,}", f"{value(lost):,}", end_section=end_section)

    row("context tokens", lambda c: c.context)
    row("  found on the device", lambda c: c.from_device)
    row("  swapped in from the host", lambda c: c.from_host)
    row("  computed for the first time", lambda c: c.new)
    row("  computed again", lambda c: c.recomputed)
    row("context tokens computed", lambda c: c.computed)
    row("tokens produced", lambda c: c.output, end_section=True)

    def counter(name: str, field: str, *, end_section: bool = False) -> None:
        values = (f"{getattr(run.counters, field):,}" for run in runs)
        table.add_row(name, *values, end_section=end_section)

    counter("chunks swapped out to the host", "chunks_swapped_out")
    counter("chunks swapped in", "chunks_swapped_in")
    counter("chunks dropped", "chunks_dropped", end_section=True)
    table.add_row("total time", *(f"{run.total_s:.1f} s" for run in runs))
    return table


def _turns_table(comparison: Comparison) -> Table:
    table = Table(title="By turn number, means over the conversations", title_justify="left")
    for name in ("turn", "context", "device", "host", "again", "new"):
        table.add_column(name, justify="right")
    table.add_column("first token,\nwith state", justify="right")
    table.add_column("first token,\nwithout", justify="right")
    table.add_column("ratio", justify="right")
    for row in comparison.rows:
        counts = row.counts
        tokens = (counts.context, counts.from_device, counts.from_host, counts.recomputed, counts.new)
        table.add_row(
            str(row.number),
            *(f"{row.mean(part):.0f}" for part in tokens),
            f"{row.with_state_s * 1e3:.0f} ms",
            f"{row.without_state_s * 1e3:.0f} ms",
            f"{row.ratio:.2f}",
        )
    return table
