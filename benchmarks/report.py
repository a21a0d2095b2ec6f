"""Writes docs/results.md and its pictures from `benchmarks/results/*.jsonl`: the paper's numbers and ours.

python -m benchmarks.report
python -m benchmarks.report --results figures-out --page /tmp/results.md      of a quick run
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, read_records
from benchmarks.serving.study import POINT_METRIC, kept_points
from pensieve_jax.simulator.plot import write_plot

type Line = Mapping[str, Any]

PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """Written by `python -m benchmarks.report` from the lines in `benchmarks/results/`; each has
the command that reproduces it. [Benchmarks](benchmarks.md) says how, [Fairness](fairness.md) what was made
equal between systems."""
NOTHING = "Not measured yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One figure of the paper."""

    prefix: str
    """What its cases begin with."""
    title: str
    paper: str
    """What the paper says."""
    body: Callable[["Report", "Section"], list[str]]


class Report:
    """Kept results, and where the page's pictures go."""

    def __init__(self, results: Path, images: Path) -> None:
        """Args:
        results: folder of results.
        images: folder beside the page.
        """
        paths = sorted(results.glob("*.jsonl"))
        self.lines = [line for path in paths for line in read_records(path)]
        self.images = images
        self._points = [point for path in paths for point in kept_points(path)]

    def of(self, prefix: str | tuple[str, ...], bench: str = "serving") -> list[Line]:
        """Results of a benchmark whose case begins with a prefix, or with one of several."""
        return [line for line in self.lines if line["bench"] == bench and line["case"].startswith(prefix)]

    def points(self, prefix: str) -> list[dict[str, Any]]:
        """Figures of served points of series that begin with a prefix; see `kept_points`."""
        return [point for point in self._points if point["series"].startswith(prefix)]

    def plot(self, name: str, rows: Sequence[Mapping[str, Any]], **axes: Any) -> str:
        """Draw a picture; its Markdown."""
        self.images.mkdir(parents=True, exist_ok=True)
        path = self.images / f"{name}.svg"
        write_plot(rows, path=path, **axes)
        return f"![{name}]({self.images.name}/{path.name})"


def curves(report: Report, section: Section) -> list[str]:
    """Latency against throughput: tables, pictures, and throughput at a latency."""
    points = report.points(f"{section.prefix}_")
    if not points:
        return [NOTHING]
    parts = []
    for series in dict.fromkeys(point["series"] for point in points):
        rows = [point for point in points if point["series"] == series]
        parts += [f"**{series}**, {rows[0]['device']}", _point_table(rows)]
        axes = {"x": "served_requests_per_s", "ys": (POINT_METRIC, "ttft_s_p50"), "series": "system"}
        parts.append(report.plot(series, rows, **axes))
    compared = [line for line in report.of(f"{section.prefix}_") if re.search(r"_at[\d.]+ms_", line["case"])]
    if compared:
        head = ("throughput at a latency", "requests/s", "beside it", "ratio")
        rows = [
            (line["case"], _cell(line["value"]), _beside(line), _times(line["ratio"])) for line in compared
        ]
        parts.append(_table(head, rows))
    return parts


def policies(report: Report, section: Section) -> list[str]:
    """Curves, with one policy against the other, and the simulator."""
    parts = curves(report, section)
    chosen = [line for line in report.of(f"{section.prefix}_") if line["case"].endswith("_policy")]
    if chosen:
        head = ("point", "figure", "retention value", "LRU", "better by")
        rows = [
            (
                line["case"],
                line["metric"],
                _cell(line["value"]),
                _cell(line["ceiling"]),
                _times(line["ratio"]),
            )
            for line in chosen
        ]
        parts.append(_table(head, rows))
    return [*parts, *simulator(report, section), *simulations(report, section)]


def think_times(report: Report, section: Section) -> list[str]:
    """Curves by think time, and the simulator."""
    return [
        *curves(report, section),
        *simulator(report, section),
        *simulations(report, section),
    ]


def simulator(report: Report, section: Section) -> list[str]:
    """Measured hit rates beside simulated ones."""
    lines = [line for line in report.of(f"{section.prefix}_") if line["case"].endswith("_simulator")]
    if not lines:
        return []
    head = ("point", "figure", "measured", "simulated", "difference")
    rows = [
        (
            line["case"].removesuffix("_simulator"),
            line["metric"],
            _cell(line["value"]),
            _cell(line["ceiling"]),
            _points(line["value"], line["ceiling"]),
        )
        for line in lines
    ]
    return ["Beside the simulator, with the same conversations and sizes:", _table(head, rows)]


def simulations(report: Report, section: Section) -> list[str]:
    """What the simulator says of the paper's own setting."""
    lines = [
        line
        for line in report.of(f"{section.prefix}_", "simulate")
        if re.search(r"_rate[\d.]+$|_at120ms_", line["case"]) and line["ceiling"] is not None
    ]
    if not lines:
        return []
    head = ("simulated: the paper's machine", "figure", "value", "beside it", "ratio")
    rows = [
        (line["case"], line["metric"], _cell(line["value"]), _beside(line), _times(line["ratio"]))
        for line in lines
    ]
    return [_table(head, rows)]


def prompts(report: Report, section: Section) -> list[str]:
    """Figure 3."""
    lines = report.of(f"{section.prefix}_")
    if not lines:
        return [NOTHING]
    rows, cells = [], []
    for line in lines:
        history = int(line["case"].rpartition("history")[2])
        for name, seconds in (("history kept", line["value"]), ("computed again", line["ceiling"])):
            rows.append({"history": history, "seconds": seconds, "way": name})
        cells.append((str(history), _cell(line["value"]), _cell(line["ceiling"]), _times(line["ratio"])))
    sizes = lines[0]["shapes"]
    return [
        f"{sizes['batch']} turns of {sizes['new']} new tokens at once, {lines[0]['device']}.",
        _table(("history, tokens", "kept, s", "computed again, s", "ratio"), cells),
        report.plot(section.prefix, rows, x="history", ys=("seconds",), series="way"),
    ]


def attention(report: Report, section: Section) -> list[str]:
    """Figure 4."""
    lines = report.of(f"{section.prefix}_")
    if not lines:
        return [NOTHING]
    rows, cells = [], []
    for line in lines:
        context = int(line["case"].rpartition("context")[2])
        for name, seconds in (("attention", line["value"]), ("everything else", line["ceiling"])):
            rows.append({"context": context, "seconds of a chunk": seconds, "part": name})
        cells.append((str(context), f"{1e6 * line['value']:.1f}", f"{1e6 * line['ceiling']:.1f}"))
    head = ("context, tokens", "attention of a chunk, us", "everything else, us")
    picture = report.plot(section.prefix, rows, x="context", ys=("seconds of a chunk",), series="part")
    return [f"{lines[0]['shapes']['model']['name']}, {lines[0]['device']}.", _table(head, cells), picture]


def kernels(report: Report, section: Section) -> list[str]:
    """Figure 12."""
    cells = _beside_peers(report, "kernels")
    return [*_ways_to_attend(report, section), cells] if cells else [NOTHING]


def steps(report: Report, _: Section) -> list[str]:
    """What `pensieve bench step` left."""
    return [_beside_peers(report, "step") or NOTHING]


def loops(report: Report, _: Section) -> list[str]:
    """What `benchmarks.closed_loop` left."""
    return [_beside_peers(report, "serving", ("closed_", "pressure_")) or NOTHING]


def _beside_peers(report: Report, bench: str, prefix: str | tuple[str, ...] = "") -> str:
    """A table of a benchmark's figures that have something beside them; empty without any."""
    lines = [line for line in report.of(prefix, bench) if line["ceiling"] is not None]
    head = ("case", "measured", "beside it", "ratio", "on")
    cells = [
        (
            line["case"],
            f"{_cell(line['value'])} {line['unit']}",
            f"{_cell(line['ceiling'])} {line['unit']}",
            _cell(line["ratio"]),
            line["device"],
        )
        for line in lines
    ]
    return _table(head, cells) if cells else ""


def _ways_to_attend(report: Report, section: Section) -> list[str]:
    """The paper's shapes: the kernel beside CopyOut and multi-round, a table and a picture for each model."""
    parts, models = [], {}
    for line in report.of("paper_", "kernels"):
        past, heads = line["case"].removeprefix("paper_32x8_over_").split("_")
        models.setdefault(heads, []).append((int(past), line))
    for heads, lines in models.items():
        rows, cells = [], []
        for context, line in lines:
            ways = {"kernel": line["value"]}
            ways |= {name: line["shapes"][f"{name}_us"] for name in ("copy_out", "multi_round")}
            rows += [{"context": context, "us of a launch": us, "way": way} for way, us in ways.items()]
            cells.append((str(context), *(f"{us:,.0f}" for us in ways.values())))
        sizes = lines[0][1]["shapes"]
        of = f"{sizes['num_heads']} heads, {sizes['num_kv_heads']} KV heads"
        parts += [
            f"32 requests of 8 new tokens, {of}, {lines[0][1]['device']}:",
            _table(("context, tokens", "kernel, us", "CopyOut, us", "multi-round, us"), cells),
            report.plot(f"{section.prefix}_{heads}", rows, x="context", ys=("us of a launch",), series="way"),
        ]
    return parts


def compression(report: Report, _: Section) -> list[str]:
    """Time compression against real time."""
    lines = report.of("compression_")
    if not lines:
        return [NOTHING]
    head = ("case", "figure", "compressed", "whole", "difference")
    cells = [
        (
            line["case"],
            line["metric"],
            _cell(line["value"]),
            _cell(line["ceiling"]),
            _points(line["value"], line["ceiling"]),
        )
        for line in lines
    ]
    return [_table(head, cells)]


SECTIONS = (
    Section(
        prefix="fig3",
        title="Figure 3: what a prompt costs against its history",
        paper="With history, prefill outweighs generation.",
        body=prompts,
    ),
    Section(
        prefix="fig4",
        title="Figure 4: recomputing a chunk, by context length",
        paper="Attention's part grows with the context, the rest is constant: later chunks cost more.",
        body=attention,
    ),
    Section(
        prefix="fig10",
        title="Figure 10: one GPU",
        paper="At about 120 ms per token on ShareGPT: OPT-13B 1.36 x vLLM, 1.14 x TensorRT-LLM; Llama 2-13B "
        "with 10 KV heads 1.70 x, 1.58 x.",
        body=curves,
    ),
    Section(
        prefix="fig11",
        title="Figure 11: several GPUs",
        paper="Four GPUs, ShareGPT: OPT-66B 2.04 x vLLM, 1.64 x TensorRT-LLM; Llama 2-70B 3.0 x, 2.47 x.",
        body=curves,
    ),
    Section(
        prefix="fig12",
        title="Figure 12: the attention kernel",
        paper="As fast as attention over contiguous KV.",
        body=kernels,
    ),
    Section(
        prefix="fig13",
        title="Figure 13: one batch for prompts and decoding",
        paper="Better throughput and latency than separate phases (Llama 2-13B).",
        body=curves,
    ),
    Section(
        prefix="fig14",
        title="Figure 14: retention value against LRU",
        paper="OPT-13B, above 3 requests/s: host hit rate up to 4.4 points higher, up to 14.6 % fewer tokens "
        "recomputed.",
        body=policies,
    ),
    Section(
        prefix="fig15",
        title="Figure 15: think time",
        paper="From 30 to 600 s gains shrink, and are still there at 600 s (Llama 2-13B).",
        body=think_times,
    ),
    Section(
        prefix="step",
        title="Steps of a model",
        paper="not in it: decode and prefill steps of `pensieve bench step`, beside their floor or what they "
        "are compared with.",
        body=steps,
    ),
    Section(
        prefix="closed",
        title="Closed loops",
        paper="not in it: conversations that each send their next turn at once, by "
        "`python -m benchmarks.closed_loop`. Beside it: for a run that keeps state, the bar; for a stateless "
        "one, the run that keeps it.",
        body=loops,
    ),
    Section(
        prefix="compression",
        title="Time compression",
        paper="not in it: [how runs are shortened](benchmarks.md#time-compression), against real time.",
        body=compression,
    ),
)


def page(report: Report) -> str:
    """The page as Markdown."""
    parts = ["# Results beside the paper's", INTRODUCTION]
    for section in SECTIONS:
        parts += [f"## {section.title}", f"Paper: {section.paper}", *section.body(report, section)]
    return "\n\n".join(parts) + "\n"


def _point_table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = {
        "system": "system",
        "offered_requests_per_s": "requests/s offered",
        "served_requests_per_s": "served",
        "goodput_requests_per_s": "within the limit",
        "normalized_latency_s_mean": "s per token",
        "normalized_latency_s_p90": "p90",
        "normalized_latency_s_p99": "p99",
        "ttft_s_p50": "first token, s (p50)",
        "tpot_s_p50": "per token after, s (p50)",
        "hit_rate_device": "hits, device",
        "hit_rate_host": "hits, host",
        "recomputed_tokens_per_request": "recomputed tokens a turn",
    }
    return _table(tuple(names.values()), [[_cell(row.get(name)) for name in names] for row in rows])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _beside(line: Line) -> str:
    if line["ceiling"] is None:
        return "-"
    peer = line["shapes"].get("peer")
    return _cell(line["ceiling"]) + ("" if peer is None else f" ({peer})")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"


def _points(value: float | None, other: float | None) -> str:
    return "-" if value is None or other is None else f"{100 * (value - other):+.1f} points"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    report = Report(given.results, given.page.parent / "images")
    given.page.write_text(page(report), encoding="utf-8")
    print(given.page)


if __name__ == "__main__":
    main()
