"""What the cache's choices are worth: every policy, a common system prompt, load or recompute.

`python benchmarks/simulate/choices.py` takes some minutes on one core. Cases:

- `policies_rate*_*`: each policy in the setting of figure 14, with LRU as the peer
- `share_*`: ShareGPT with 1,000 tokens of system prompt before each conversation, of which there are 1, 20 or
  100; share-aware retention value, with the plain one as the peer
- `oneprompt_*`: the same with one prompt and short conversations on a device that holds about two of them
- `load_*`: load or recompute by cost on each trace and link, with the better of always loading and never
  loading (no host tier) as the peer
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import mean

from results import keep, line, sharegpt
from rich.progress import Progress

from host_cache.policies import POLICIES
from pensieve_jax.simulator import (
    DEVICES,
    PrefixSegment,
    Simulation,
    make_config,
    read_workload,
    sample_conversations,
    summarize,
    with_poisson_arrivals,
    with_time_scale,
)
from pensieve_jax.simulator.sweep import Point, run_point

SEEDS = (0, 1, 2)
PROMPT_TOKENS = 1000
SHORT_TOKENS = 3072
"""Longest conversation where tiers are small."""
SMALL_TIERS_GB = (4.0, 6.0)
"""1.5 and 2.3 conversations of that length with their prompt."""
LINKS_GB_S = (25.0, 6.0, 2.0)
"""PCIe 4.0; about where loading a chunk takes as long as recomputing it; a slow one."""


def averages(conversations, seeds, **settings):
    rows = [run_point(conversations, Point(seed=seed, **settings)) for seed in seeds]
    names = ("host_hit_rate", "hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean")
    return {name: mean(row[name] for row in rows) for name in (*names, "new_tokens", "requests")}


def policies(track):
    conversations, lines = sharegpt(), []
    for rate in (1.25, 1.5):
        peer = None
        for name in track(sorted(POLICIES, key=lambda name: name != "lru"), f"policies, rate {rate:g}"):
            figures = averages(conversations, SEEDS, requests_per_s=rate, policy=name)
            peer = peer or figures
            for metric in ("host_hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean"):
                value, other = figures[metric], peer[metric]
                ratio = value / other if metric == "host_hit_rate" else other / value
                unit = {"host_hit_rate": "share", "normalized_latency_s_mean": "s"}.get(metric, "tokens")
                shapes = {"rate": rate, "policy": name, "peer": "lru", "seeds": list(SEEDS)}
                case = f"policies_rate{rate:g}_{name}"
                lines.append(line(case, metric, value, unit, ceiling=other, ratio=ratio, shapes=shapes))
    keep(lines, "policies_")


def with_prompts(conversations, prompts):
    """A system prompt before each conversation, taken in turn."""
    changed = []
    for index, conversation in enumerate(conversations):
        first = conversation.turns[0]
        longer = replace(first, input_tokens=first.input_tokens + PROMPT_TOKENS)
        prefix = (PrefixSegment(id=f"prompt {index % prompts}", tokens=PROMPT_TOKENS),)
        changed.append(replace(conversation, turns=(longer, *conversation.turns[1:]), prefix=prefix))
    return changed


def share(track):
    conversations, lines = sharegpt(), []
    for prompts in track((1, 20, 100), "common system prompts"):
        chosen = with_prompts(conversations, prompts)
        plain, aware = (
            averages(chosen, SEEDS, requests_per_s=1.25, policy=name)
            for name in ("retention-value", "share-aware")
        )
        for metric in ("hit_rate", "recomputed_tokens_per_request", "normalized_latency_s_mean"):
            value, other = aware[metric], plain[metric]
            ratio = value / other if metric == "hit_rate" else other / value
            unit = {"hit_rate": "share", "normalized_latency_s_mean": "s"}.get(metric, "tokens")
            shapes = {"rate": 1.25, "prompts": prompts, "prompt_tokens": PROMPT_TOKENS, "seeds": list(SEEDS)}
            shapes["peer"] = "retention-value"
            lines.append(
                line(f"share_{prompts}", metric, value, unit, ceiling=other, ratio=ratio, shapes=shapes)
            )
    keep(lines, "share_")


def one_prompt(track):
    """One system prompt for all, where the device alone holds little more than one conversation."""
    conversations, lines = [c for c in sharegpt() if c.num_tokens <= SHORT_TOKENS], []
    chosen = with_prompts(conversations, 1)
    for device_gb in track(SMALL_TIERS_GB, "one prompt, small tiers"):
        settings = {"requests_per_s": 0.2, "device_kv_gb": device_gb, "host_kv_gb": 0.0, "duration_s": 7200.0}
        plain, aware = (
            averages(chosen, SEEDS, policy=name, **settings) for name in ("retention-value", "share-aware")
        )
        shapes = settings | {"prompt_tokens": PROMPT_TOKENS, "seeds": list(SEEDS), "peer": "retention-value"}
        for metric, unit in (("hit_rate", "share"), ("recomputed_tokens_per_request", "tokens")):
            value, other = aware[metric], plain[metric]
            ratio = value / other if metric == "hit_rate" else other / value
            case = f"oneprompt_{device_gb:g}gb"
            lines.append(line(case, metric, value, unit, ceiling=other, ratio=ratio, shapes=shapes))
    keep(lines, "oneprompt_")


TRACES = {
    "mooncake-conversation": ("mooncake", "mooncake/conversation_trace.jsonl", 0.04),
    "mooncake-synthetic": ("mooncake", "mooncake/synthetic_trace.jsonl", 0.04),
    "ragpulse": ("ragpulse", "ragpulse/0_trace.jsonl", 25.0),
}
"""Name -> format, file, and how fast its times run so that one A100 is loaded and not overrun."""
TRACE_S = 3600.0
"""Simulated time of each trace."""


def traces(data):
    """(name, conversations with times)."""
    drawn = sample_conversations(sharegpt(), 800, 0)
    yield "sharegpt", with_poisson_arrivals(drawn, requests_per_s=1.0, think_time_s=60.0, seed=0)
    for name, (format_name, file, speed) in TRACES.items() if data else ():
        conversations = with_time_scale(read_workload(data / file, format_name), speed)
        yield name, [c for c in conversations if (c.turns[0].arrival_s or 0.0) < TRACE_S]


def load(track, data):
    def figures(conversations, config):
        result = Simulation(conversations, config, stop_s=TRACE_S).run()
        return summarize(result, until_s=min(TRACE_S, result.end_s))

    for name, conversations in traces(data):
        without = make_config(host_kv_bytes=0)
        never = figures(conversations, without)  # no link matters
        lines = []
        for gb_s in track(LINKS_GB_S, f"load or recompute, {name}"):
            device = replace(DEVICES["a100-80gb"], load_bytes_per_s=gb_s * 1e9, store_bytes_per_s=gb_s * 1e9)
            always = replace(make_config(), device=device)
            page_bytes = always.cache.page_tokens * always.model.kv_bytes_per_token
            by_cost = replace(always, cache=replace(always.cache, load_s_per_page=page_bytes / gb_s / 1e9))
            results = {
                "always": figures(conversations, always),
                "never": never,
                "by cost": figures(conversations, by_cost),
            }
            for metric in ("normalized_latency_s_mean", "ttft_s_mean"):
                values = {way: figures[metric] for way, figures in results.items()}
                best = min(values["always"], values["never"])
                shapes = {"link_gb_s": gb_s, "model": "opt-13b", "device": device.name} | values
                shapes["requests"] = {way: figures["requests"] for way, figures in results.items()}
                value = values["by cost"]
                case = f"load_{name}_link{gb_s:g}"
                lines.append(line(case, metric, value, "s", ceiling=best, ratio=best / value, shapes=shapes))
        keep(lines, f"load_{name}_")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("policies", "share", "oneprompt", "load"), help="only this one")
    parser.add_argument(
        "--data", type=Path, help="folder of traces: mooncake/, ragpulse/; without it ShareGPT only"
    )
    arguments = parser.parse_args()
    with Progress() as progress:

        def track(items, name):
            return progress.track(items, description=name)

        if arguments.part in (None, "policies"):
            policies(track)
        if arguments.part in (None, "share"):
            share(track)
        if arguments.part in (None, "oneprompt"):
            one_prompt(track)
        if arguments.part in (None, "load"):
            load(track, arguments.data)


if __name__ == "__main__":
    main()
