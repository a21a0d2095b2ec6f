"""The comparison as a picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pensieve_jax.demo.comparison import Comparison

WITH_STATE, WITHOUT_STATE = "#1f6fb4", "#8a8a8a"
SOURCES = (
    ("from_device", "found on the device", "#1f6fb4"),
    ("from_host", "swapped in from the host", "#7fb2dd"),
    ("recomputed", "computed again", "#d9822b"),
    ("new", "new", "#b8b8b8"),
)
"""Field of `TokenCounts`, what it means, colour."""


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw the time to first token and the origin of the context by turn number, as PNG.

    Raises:
        OSError: the file can't be written.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, tokens = figure.subplots(1, 2)
    numbers = [row.number for row in comparison.rows]

    times.plot(numbers, [row.without_state_s * 1e3 for row in comparison.rows], "o-", color=WITHOUT_STATE)
    times.plot(numbers, [row.with_state_s * 1e3 for row in comparison.rows], "o-", color=WITH_STATE)
    last = comparison.rows[-1]
    for value, name, color in (
        (last.without_state_s, "without state", WITHOUT_STATE),
        (last.with_state_s, "with state", WITH_STATE),
    ):
        times.annotate(
            name,
            (last.number, value * 1e3),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            color=color,
        )
    times.set(title="Time to first token, mean", xlabel="turn", ylabel="ms", xticks=numbers)
    times.margins(y=0.12)
    times.set_ylim(bottom=0)

    bottom = [0.0] * len(numbers)
    for field, name, color in SOURCES:
        heights = [row.mean(getattr(row.counts, field)) for row in comparison.rows]
        tokens.bar(numbers, heights, bottom=bottom, color=color, label=name, width=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    tokens.set(
        title="With state: where the context came from", xlabel="turn", ylabel="tokens, mean", xticks=numbers
    )
    tokens.legend(frameon=False, loc="upper left")

    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
    title = f"FALLBACK: {comparison.title}" if comparison.is_fallback else comparison.title
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150, format="png")
