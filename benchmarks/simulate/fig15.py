"""The paper's figure 15: think times of 30 to 600 s, Llama-2-13B with 10 KV heads on an A100, ShareGPT.

`python benchmarks/simulate/fig15.py` takes a quarter of an hour on one core. Cases `fig15_think*_rate*` have
the kept state's figures with those of the same server without state (`fig15_stateless_rate*`) as the peer.
"""

import argparse
from itertools import pairwise

from results import IMAGES, keep, line, sharegpt
from rich.progress import Progress

from pensieve_jax.simulator.plot import write_plot
from pensieve_jax.simulator.sweep import grid, run_sweep

MODEL = "llama2-13b-kv10"
RATES = {
    30.0: (3.0, 4.0, 5.5),
    60.0: (4.0, 5.5),
    120.0: (4.0, 5.5),
    300.0: (4.0, 5.5, 7.5),
    600.0: (4.0, 5.5, 8.0, 11.0),
}
"""By think time. Long ones take higher rates to the same load, since many turns come after the end."""
STATELESS_RATES = (2.0, 2.5, 3.0, 4.0, 5.5)
LATENCY_S = 0.12
"""Normalized latency at which the paper compares throughput (figure 10)."""


def duration_s(think_time_s):
    """Long enough that conversations of average length have run through before the figures begin."""
    return 2000.0 + 6 * think_time_s


def points():
    """Kept state at every think time, and no state at one: it has nothing to lose while users think."""
    chosen = grid(
        model=[MODEL],
        requests_per_s=STATELESS_RATES,
        keep_state=[False],
        think_time_s=[60.0],
        duration_s=[duration_s(60.0)],
    )
    for think_time_s, rates in RATES.items():
        chosen += grid(
            model=[MODEL],
            requests_per_s=rates,
            think_time_s=[think_time_s],
            duration_s=[duration_s(think_time_s)],
        )
    return chosen


def throughput_at(rows, latency_s):
    """Requests/s served where the normalized latency crosses a bound, between two points; None if outside."""
    pairs = sorted((row["normalized_latency_s_mean"], row["served_requests_per_s"]) for row in rows)
    for (below, slow), (above, fast) in pairwise(pairs):
        if below <= latency_s <= above:
            return slow + (fast - slow) * (latency_s - below) / (above - below)
    return None


def label(row):
    return "stateless" if not row["keep_state"] else f"think time {row['think_time_s']:g} s"


def shapes_of(row):
    names = ("model", "device", "device_kv_gb", "host_kv_gb", "think_time_s", "duration_s", "seed", "policy")
    figures = ("offered_requests_per_s", "host_hit_rate", "hit_rate_device", "recomputed_share", "mean_batch")
    return {name: row[name] for name in names} | {
        name: None if row[name] != row[name] else round(row[name], 4) for name in figures
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    chosen = points()
    rows = []
    with Progress() as progress:
        task = progress.add_task("fig15", total=None)
        rows.extend(
            run_sweep(
                sharegpt(),
                chosen,
                processes=arguments.processes,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        )
    by_label = {}
    for row in rows:
        by_label.setdefault(label(row), []).append(row)
    stateless = {row["requests_per_s"]: row for row in by_label["stateless"]}
    lines = []
    for row in rows:
        rate = row["requests_per_s"]
        name = f"think{row['think_time_s']:g}" if row["keep_state"] else "stateless"
        peer = stateless.get(rate) if row["keep_state"] else None
        for metric, unit in (("normalized_latency_s_mean", "s"), ("served_requests_per_s", "1/s")):
            value, other = row[metric], None if peer is None else peer[metric]
            ratio = None if other is None else (other / value if unit == "s" else value / other)
            case = f"fig15_{name}_rate{rate:g}"
            lines.append(line(case, metric, value, unit, ceiling=other, ratio=ratio, shapes=shapes_of(row)))
    bound = throughput_at(by_label["stateless"], LATENCY_S)
    for group in by_label.values():
        reached, first = throughput_at(group, LATENCY_S), group[0]
        name = f"think{first['think_time_s']:g}" if first["keep_state"] else "stateless"
        case = f"fig15_at120ms_{name}"
        ratio = reached / bound if reached and bound else None
        shapes = {"model": MODEL, "latency_s": LATENCY_S, "rates": [row["requests_per_s"] for row in group]}
        lines.append(
            line(case, "served_requests_per_s", reached, "1/s", ceiling=bound, ratio=ratio, shapes=shapes)
        )
    keep(lines, "fig15_")
    IMAGES.mkdir(exist_ok=True)
    write_plot(
        [row | {"server": label(row)} for row in rows],
        x="served_requests_per_s",
        ys=("normalized_latency_s_mean", "recomputed_share"),
        series="server",
        path=IMAGES / "simulate-fig15.svg",
    )


if __name__ == "__main__":
    main()
