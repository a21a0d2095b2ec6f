"""The paper's figure 14: retention value against LRU, OPT-13B on an A100, think time 60 s, ShareGPT.

`python benchmarks/simulate/fig14.py` takes some minutes on one core. Cases:

- `fig14_rate*`: whole conversations, cut at 16,384 tokens, at rates around the knee
- `fig14_attention*_rate*`: the policy's cost with so many times the attention
- `fig14_short_rate*`: only conversations of at least two turns that fit 4,096 tokens
"""

import argparse
from collections import defaultdict
from statistics import mean

from results import IMAGES, keep, line, sharegpt
from rich.progress import Progress

from pensieve_jax.simulator.plot import write_plot
from pensieve_jax.simulator.sweep import grid, run_sweep

RATES = (1.0, 1.25, 1.5, 2.0)
SHORT_RATES = (2.5, 3.0, 3.5)
SHORT_TOKENS = 4096
POLICIES = ("lru", "retention-value")
FIGURES = (
    "offered_requests_per_s",
    "served_requests_per_s",
    "host_hit_rate",
    "hit_rate_device",
    "recomputed_share",
    "recomputed_tokens_per_request",
    "normalized_latency_s_mean",
    "normalized_latency_s_p50",
    "requests",
)


def run(name, conversations, points, processes):
    """Rows averaged over seeds, by (rate, policy)."""
    groups = defaultdict(list)
    with Progress() as progress:
        task = progress.add_task(name, total=None)
        rows = run_sweep(
            conversations,
            points,
            processes=processes,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
        for row in rows:
            groups[row["requests_per_s"], row["policy"]].append(row)
    return {
        key: {figure: mean(row[figure] for row in rows) for figure in FIGURES} for key, rows in groups.items()
    }


def lines_of(name, averages, baselines, points):
    """Retention value's figures at each rate, with LRU's as the peer."""
    lines = []
    for (rate, policy), new in sorted(averages.items()):
        if policy != "retention-value":
            continue
        old = baselines[rate, "lru"]
        base = points[0]
        shapes = {
            "model": base.model,
            "device": base.device,
            "device_kv_gb": base.device_kv_gb,
            "host_kv_gb": base.host_kv_gb,
            "think_time_s": base.think_time_s,
            "duration_s": base.duration_s,
            "seeds": sorted({point.seed for point in points}),
            "attention_weight": points[-1].attention_weight,
            "peer": "lru",
            "offered_requests_per_s": round(new["offered_requests_per_s"], 4),
            "served_requests_per_s": round(new["served_requests_per_s"], 4),
            "hit_rate_device": round(new["hit_rate_device"], 4),
        }
        case = f"{name}_rate{rate:g}"
        for metric, unit, more_is_better in (
            ("host_hit_rate", "share", True),
            ("recomputed_tokens_per_request", "tokens", False),
            ("normalized_latency_s_mean", "s", False),
            ("normalized_latency_s_p50", "s", False),
        ):
            value, peer = new[metric], old[metric]
            ratio = (value / peer if more_is_better else peer / value) if value and peer else None
            lines.append(line(case, metric, value, unit, ceiling=peer, ratio=ratio, shapes=shapes))
    return lines


def whole(conversations, common, processes):
    """Both policies on whole conversations, and retention value by other costs."""
    points = grid(requests_per_s=RATES, policy=POLICIES, **common)
    base = run("fig14", conversations, points, processes)
    keep(lines_of("fig14", base, base, points), "fig14_rate")
    plotted = [{"policy": policy} | figures for (_, policy), figures in base.items()]
    for weight in (2.0, 4.0):
        points = grid(
            requests_per_s=RATES[:3], policy=["retention-value"], attention_weight=[weight], **common
        )
        averages = run(f"fig14, attention x {weight:g}", conversations, points, processes)
        name = f"fig14_attention{weight:g}"
        keep(lines_of(name, averages, base, points), name)
        plotted += [{"policy": f"retention-value, attention x {weight:g}"} | f for f in averages.values()]
    IMAGES.mkdir(exist_ok=True)
    write_plot(
        plotted,
        x="offered_requests_per_s",
        ys=("host_hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean"),
        series="policy",
        path=IMAGES / "simulate-fig14.svg",
    )


def short(conversations, common, processes):
    """Both policies on conversations without the long ones."""
    chosen = [c for c in conversations if len(c.turns) >= 2 and c.num_tokens <= SHORT_TOKENS]
    points = grid(requests_per_s=SHORT_RATES, policy=POLICIES, **common)
    averages = run("fig14, short conversations", chosen, points, processes)
    keep(lines_of("fig14_short", averages, averages, points), "fig14_short")


PARTS = {"whole": whole, "short": short}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--duration", type=float, default=3600.0, help="simulated seconds of a point")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help="only this one")
    arguments = parser.parse_args()
    common = {"duration_s": [arguments.duration], "seed": list(range(arguments.seeds))}
    conversations = sharegpt()
    for name in [arguments.part] if arguments.part else PARTS:
        PARTS[name](conversations, common, arguments.processes)


if __name__ == "__main__":
    main()
