"""The paper's figure 15: think times of 30 to 600 s, Llama-2-13B with 10 KV heads on an A100, ShareGPT.

`python benchmarks/simulate/fig15.py` takes some ten minutes on one core; `--state no` or `--state kept` runs
one half of it. Cases:

- `fig15_think*_rate*` and `fig15_stateless*_rate*`: each think time with kept state and without
- `fig15_at120ms_think*`: what kept state serves at a normalized latency of 120 ms, with no state as the peer

A run is no steady state: conversations of many turns have not come to their end, the less so the longer users
think. So turns have less history at long think times, and kept state is compared only with no state at the
same think time.
"""

import argparse

from results import IMAGES, RESULTS, keep, line, sharegpt
from rich.progress import Progress

from benchmarks.curves import throughput_at
from pensieve_jax.records import read_records
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
STATELESS_RATES = {
    30.0: (1.0, 1.5, 2.0),
    60.0: (2.0, 2.5, 3.0),
    120.0: (2.5, 3.5, 4.0),
    300.0: (4.0, 5.5),
    600.0: (5.5, 7.0, 8.0),
}
LATENCY_S = 0.12
"""Normalized latency at which the paper compares throughput (figure 10)."""


def duration_s(think_time_s):
    """So that at least conversations of few turns have run through before the figures begin."""
    return 2000.0 + 6 * think_time_s


def points(keep_state):
    chosen = []
    for think_time_s, rates in (RATES if keep_state else STATELESS_RATES).items():
        chosen += grid(
            model=[MODEL],
            requests_per_s=rates,
            keep_state=[keep_state],
            think_time_s=[think_time_s],
            duration_s=[duration_s(think_time_s)],
        )
    return chosen


def lines_of(row):
    names = ("model", "device", "device_kv_gb", "host_kv_gb", "think_time_s", "duration_s", "seed", "policy")
    figures = ("offered_requests_per_s", "host_hit_rate", "hit_rate_device", "recomputed_share", "mean_batch")
    shapes = {name: row[name] for name in names} | {
        name: None if row[name] != row[name] else round(row[name], 4) for name in figures
    }
    case = f"fig15_{kind(row['keep_state'])}{row['think_time_s']:g}_rate{row['requests_per_s']:g}"
    return [
        line(case, metric, row[metric], unit, shapes=shapes)
        for metric, unit in (("normalized_latency_s_mean", "s"), ("served_requests_per_s", "1/s"))
    ]


def kind(keep_state):
    return "think" if keep_state else "stateless"


def recorded(keep_state, think_time_s):
    """The points of one server, from the results' file."""
    cases = {}
    for entry in read_records(RESULTS):
        if entry["case"].startswith(f"fig15_{kind(keep_state)}{think_time_s:g}_rate"):
            cases.setdefault(entry["case"], dict(entry["shapes"]))[entry["metric"]] = entry["value"]
    return list(cases.values())


def summary():
    lines, plotted = [], []
    for think_time_s in RATES:
        kept, without = (recorded(keep_state, think_time_s) for keep_state in (True, False))
        reached, peer = throughput_at(kept, LATENCY_S), throughput_at(without, LATENCY_S)
        ratio = reached / peer if reached and peer else None
        shapes = {"model": MODEL, "latency_s": LATENCY_S, "think_time_s": think_time_s, "peer": "no state"}
        case = f"fig15_at120ms_think{think_time_s:g}"
        lines.append(
            line(case, "served_requests_per_s", reached, "1/s", ceiling=peer, ratio=ratio, shapes=shapes)
        )
        plotted += [row | {"server": f"think time {think_time_s:g} s"} for row in kept]
    keep(lines, "fig15_at120ms_")
    IMAGES.mkdir(exist_ok=True)
    write_plot(
        plotted + [row | {"server": "no state, 60 s"} for row in recorded(False, 60.0)],
        x="served_requests_per_s",
        ys=("normalized_latency_s_mean", "recomputed_share"),
        series="server",
        path=IMAGES / "simulate-fig15.svg",
    )


def run(conversations, keep_state, processes):
    """Lines of all points with kept state, or without."""
    with Progress() as progress:
        task = progress.add_task("fig15, kept state" if keep_state else "fig15, no state", total=None)
        rows = run_sweep(
            conversations,
            points(keep_state),
            processes=processes,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
        return [entry for row in rows for entry in lines_of(row)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--state", choices=("kept", "no"), help="only with kept state, or only without")
    arguments = parser.parse_args()
    conversations = sharegpt()
    for keep_state in (False, True):
        if arguments.state is None or keep_state == (arguments.state == "kept"):
            keep(run(conversations, keep_state, arguments.processes), f"fig15_{kind(keep_state)}")
    summary()


if __name__ == "__main__":
    main()
