"""Writes the tables of docs/simulator.md and docs/policies.md from benchmarks/results/simulate-cpu.jsonl.

`python benchmarks/simulate/tables.py`; tables stand between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

import re

from results import RESULTS, ROOT

from pensieve_jax.records import read_records

PAGES = [ROOT / "docs" / name for name in ("simulator.md", "policies.md")]


def entries(prefix):
    """{case: {metric: line}} of the cases that begin with `prefix`, in the file's order."""
    cases = {}
    for entry in read_records(RESULTS):
        if entry["case"].startswith(prefix):
            cases.setdefault(entry["case"], {})[entry["metric"]] = entry
    return cases


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def fig14(prefix):
    head = ("requests/s offered", "host hit rate: LRU", "retention value", "points")
    head += (
        "recomputed tokens of a request: LRU",
        "retention value",
        "change",
        "s per output token: LRU",
        "retention value",
    )
    rows = []
    for metrics in entries(prefix).values():
        hits, tokens = metrics["host_hit_rate"], metrics["recomputed_tokens_per_request"]
        latency = metrics["normalized_latency_s_mean"]
        rows.append(
            (
                f"{hits['shapes']['offered_requests_per_s']:.2f}",
                f"{hits['ceiling']:.3f}",
                f"{hits['value']:.3f}",
                f"{100 * (hits['value'] - hits['ceiling']):+.1f}",
                f"{tokens['ceiling']:.0f}",
                f"{tokens['value']:.0f}",
                f"{100 * (tokens['value'] / tokens['ceiling'] - 1):+.1f} %",
                f"{latency['ceiling']:.3f}",
                f"{latency['value']:.3f}",
            )
        )
    return table(head, rows)


def fig15():
    head = ("think time", "requests/s at 120 ms per output token", "without state", "ratio")
    rows = []
    for metrics in entries("fig15_at120ms_").values():
        entry = metrics["served_requests_per_s"]
        rows.append(
            (
                f"{entry['shapes']['think_time_s']:g} s",
                "-" if entry["value"] is None else f"{entry['value']:.2f}",
                "-" if entry["ceiling"] is None else f"{entry['ceiling']:.2f}",
                "-" if entry["ratio"] is None else f"{entry['ratio']:.2f} x",
            )
        )
    return table(head, rows)


def fig15_points():
    head = ("think time", "requests/s offered", "s per output token", "recomputed share of history")
    rows = []
    for metrics in entries("fig15_think").values():
        entry = metrics["normalized_latency_s_mean"]
        shapes = entry["shapes"]
        rows.append(
            (
                f"{shapes['think_time_s']:g} s",
                f"{shapes['offered_requests_per_s']:.2f}",
                f"{entry['value']:.3f}",
                f"{shapes['recomputed_share']:.2f}",
            )
        )
    return table(head, rows)


def policies():
    head = ("rate", "policy", "host hit rate", "recomputed tokens of a request", "s per output token")
    rows = []
    for metrics in entries("policies_").values():
        hits = metrics["host_hit_rate"]
        rows.append(
            (
                f"{hits['shapes']['rate']:g}",
                hits["shapes"]["policy"],
                f"{hits['value']:.3f}",
                f"{metrics['recomputed_tokens_per_request']['value']:.0f}",
                f"{metrics['normalized_latency_s_mean']['value']:.3f}",
            )
        )
    return table(head, rows)


def policies_against_lru():
    cases = entries("policies_rate")
    rates = list(dict.fromkeys(m["host_hit_rate"]["shapes"]["rate"] for m in cases.values()))
    names = list(dict.fromkeys(m["host_hit_rate"]["shapes"]["policy"] for m in cases.values()))
    head = ("policy", *(f"{what}, rate {rate:g}" for what in ("recomputed", "latency") for rate in rates))
    rows = []
    for name in names:
        changes = []
        for metric in ("recomputed_tokens_per_request", "normalized_latency_s_mean"):
            for rate in rates:
                entry = cases[f"policies_rate{rate:g}_{name}"][metric]
                changes.append(f"{100 * (entry['value'] / entry['ceiling'] - 1):+.1f} %")
        rows.append((f"`{name}`", *changes))
    return table(head, rows)


def share():
    head = ("system prompts", "hit rate: plain", "share-aware")
    head += (
        "recomputed tokens of a request: plain",
        "share-aware",
        "s per output token: plain",
        "share-aware",
    )
    rows = []
    for metrics in entries("share_").values():
        names = ("hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean")
        hits, tokens, latency = (metrics[name] for name in names)
        rows.append(
            (
                str(hits["shapes"]["prompts"]),
                f"{hits['ceiling']:.3f}",
                f"{hits['value']:.3f}",
                f"{tokens['ceiling']:.0f}",
                f"{tokens['value']:.0f}",
                f"{latency['ceiling']:.3f}",
                f"{latency['value']:.3f}",
            )
        )
    return table(head, rows)


def load():
    head = ("trace", "link, GB/s", "always load", "never load", "by cost", "by cost against the better")
    rows = []
    for case, metrics in entries("load_").items():
        entry = metrics["normalized_latency_s_mean"]
        shapes = entry["shapes"]
        rows.append(
            (
                case.removeprefix("load_").rpartition("_")[0],
                f"{shapes['link_gb_s']:g}",
                f"{shapes['always']:.3f}",
                f"{shapes['never']:.3f}",
                f"{entry['value']:.3f}",
                f"{entry['ratio']:.2f} x",
            )
        )
    return table(head, rows)


TABLES = {
    "policies": policies,
    "policies_against_lru": policies_against_lru,
    "share": share,
    "load": load,
    "fig14": lambda: fig14("fig14_rate"),
    "fig14_attention2": lambda: fig14("fig14_attention2"),
    "fig14_attention4": lambda: fig14("fig14_attention4"),
    "fig14_short": lambda: fig14("fig14_short"),
    "fig15": fig15,
    "fig15_points": fig15_points,
}


def main():
    for page in PAGES:
        write_tables(page)


def write_tables(page):
    text = page.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        between = re.compile(f"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if between.search(text):
            made = make()
            text = between.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
