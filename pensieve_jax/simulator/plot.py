"""Figures of a sweep as pictures. Needs matplotlib, which the extra `bench` brings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#1f6fb4", "#d9822b", "#3a8f4d", "#8a4fb0", "#8a8a8a", "#b03a48")
LABELS = {
    "offered_requests_per_s": "requests/s offered",
    "requests_per_s": "requests/s",
    "think_time_s": "think time, s (mean)",
    "host_kv_gb": "host tier, GB",
    "device_kv_gb": "device tier, GB",
    "page_tokens": "tokens of a chunk",
    "host_hit_rate": "host hit rate",
    "hit_rate": "hit rate, both tiers",
    "recomputed_share": "recomputed share of history",
    "recomputed_tokens": "recomputed tokens",
    "recomputed_tokens_per_request": "recomputed tokens of a request",
    "normalized_latency_s_mean": "s per output token, mean",
    "served_requests_per_s": "requests/s served",
    "ttft_s_mean": "time to first token, s",
}
"""Axis texts of settings and figures."""


def write_plot(
    rows: Sequence[Mapping[str, Any]], *, x: str, ys: Sequence[str], series: str | None, path: Path
) -> None:
    """Draw figures against a setting, one panel for each, one line for each value of another setting.

    Args:
        rows: of a sweep.
        x: name of the horizontal axis.
        ys: names of the figures.
        series: setting whose values are the lines; None for a single one.
        path: where the picture goes; its ending (png, svg) says what kind.

    Raises:
        OSError: the file can't be written.
    """
    figure = Figure(figsize=(4.6 * len(ys), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(ys), squeeze=False)[0]
    names = list(dict.fromkeys(row[series] if series else "" for row in rows))
    for panel, y in zip(panels, ys, strict=True):
        for number, name in enumerate(names):
            line = sorted((row[x], row[y]) for row in rows if not series or row[series] == name)
            xs, values = zip(*line, strict=True)
            panel.plot(xs, values, "o-", ms=4, label=str(name), color=COLOURS[number % len(COLOURS)])
        panel.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    if series:
        panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
