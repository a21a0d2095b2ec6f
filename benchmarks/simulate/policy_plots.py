"""Draws the pictures of docs/policies.md from benchmarks/results/simulate-cpu.jsonl and profiles/.

`python benchmarks/simulate/policy_plots.py`.
"""

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import IMAGES, ROOT
from tables import entries

from pensieve_jax.core.profile import read_profile
from pensieve_jax.simulator import DEVICES, MODELS, StepTimeModel
from pensieve_jax.simulator.plot import COLOURS

mpl.rcParams["svg.fonttype"] = "none"  # text stays text, which is small
mpl.rcParams["svg.hashsalt"] = "pensieve"
POLICIES = (
    "lru",
    "tail-first-lru",
    "whole-conversation-lru",
    "retention-value",
    "share-aware",
    "think-time",
)
METRICS = {
    "host_hit_rate": "host hit rate",
    "hit_rate": "hit rate, both tiers",
    "recomputed_tokens_per_request": "recomputed tokens of a request",
    "normalized_latency_s_mean": "s per output token, mean",
}


def panels(count, width=4.2):
    """A figure and its panels side by side."""
    figure = Figure(figsize=(width * count, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    made = figure.subplots(1, count, squeeze=False)[0]
    for panel in made:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, axis="y")
    return figure, made


def save(figure, name):
    figure.savefig(IMAGES / f"policies-{name}.svg", metadata={"Date": None})


def bars(panel, groups, series, values):
    """values[series][group] as bars, groups side by side."""
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        at = np.arange(len(groups)) + (number - (len(series) - 1) / 2) * width
        panel.bar(at, values[name], width, label=name, color=COLOURS[number % len(COLOURS)])
    panel.set_xticks(np.arange(len(groups)), groups)


def cost():
    measured = read_profile(ROOT / "profiles" / "smollm2-135m-cpu.json")
    estimated = StepTimeModel(MODELS["opt-13b"], DEVICES["a100-80gb"])
    figure, (left, right) = panels(2)
    contexts = np.linspace(32, measured.context_tokens[-1], 100)
    of_profile = measured.recompute_cost(32)
    left.plot(contexts, [1e3 * of_profile(n) for n in contexts], color=COLOURS[0])
    points = measured.context_tokens
    left.plot(points, [1e3 * of_profile(n) for n in points], "o", ms=4, color=COLOURS[0], label="measured")
    left.set(xlabel="context length at its end, tokens", ylabel="recomputing a chunk, ms", ylim=(0, None))
    left.set_title("SmolLM2-135M, CPU", fontsize=9)
    contexts = np.linspace(32, 16_384, 100)
    of_estimate = estimated.recompute_cost(32, 16_384)
    right.plot(contexts, [1e3 * of_estimate(n) for n in contexts], color=COLOURS[1], label="estimated")
    right.set(xlabel="context length at its end, tokens", ylim=(0, None))
    right.set_title("OPT-13B, A100", fontsize=9)
    for panel in (left, right):
        panel.legend(frameon=False, fontsize=8)
    save(figure, "cost")


def every_policy():
    cases = entries("policies_rate")
    rates = sorted({metrics["host_hit_rate"]["shapes"]["rate"] for metrics in cases.values()})
    names = ("host_hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean")
    figure, made = panels(len(names))
    for panel, metric in zip(made, names, strict=True):
        values = {
            policy: [cases[f"policies_rate{rate:g}_{policy}"][metric]["value"] for rate in rates]
            for policy in POLICIES
        }
        bars(panel, [f"rate {rate:g}" for rate in rates], POLICIES, values)
        panel.set_ylabel(METRICS[metric])
    made[1].legend(frameon=False, fontsize=7, loc="upper left")
    save(figure, "all")


def share():
    cases = entries("share_")
    prompts = [str(metrics["hit_rate"]["shapes"]["prompts"]) for metrics in cases.values()]
    names = ("hit_rate", "recomputed_tokens_per_request")
    figure, made = panels(len(names))
    for panel, metric in zip(made, names, strict=True):
        lines = [metrics[metric] for metrics in cases.values()]
        values = {
            "retention-value": [entry["ceiling"] for entry in lines],
            "share-aware": [entry["value"] for entry in lines],
        }
        bars(panel, prompts, tuple(values), values)
        panel.set(xlabel="different system prompts", ylabel=METRICS[metric])
    made[1].legend(frameon=False, fontsize=8, loc="upper left")
    save(figure, "share")


def load():
    traces = {}
    for case, metrics in entries("load_").items():
        trace = case.removeprefix("load_").rpartition("_")[0]
        traces.setdefault(trace, []).append(metrics["normalized_latency_s_mean"]["shapes"])
    figure, made = panels(len(traces), width=3.2)
    for panel, (trace, shapes) in zip(made, traces.items(), strict=True):
        links = [shape["link_gb_s"] for shape in shapes]
        for number, way in enumerate(("always", "never", "by cost")):
            label = {"always": "always load", "never": "never load"}.get(way, way)
            style = "o-" if way == "by cost" else "o--"
            panel.plot(
                links, [shape[way] for shape in shapes], style, ms=4, label=label, color=COLOURS[number]
            )
        panel.set(xscale="log", ylim=(0, None), xlabel="link, GB/s")
        panel.set_xticks(links, [f"{link:g}" for link in links])
        panel.minorticks_off()
        panel.set_title(trace, fontsize=9)
    made[0].set_ylabel(METRICS["normalized_latency_s_mean"])
    made[-1].legend(frameon=False, fontsize=8)
    save(figure, "load")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for draw in (cost, every_policy, share, load):
        draw()
