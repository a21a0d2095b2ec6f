"""What a simulation has shown, as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pensieve_jax.simulator.driver import SimulationResult

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One turn that has ended."""

    conversation_id: str
    turn: int
    """0 for the first."""
    arrived_s: float
    first_step_s: float
    first_token_s: float
    end_s: float
    output_tokens: int
    tokens_new: int
    """Context tokens computed for the first time."""
    tokens_from_device: int
    tokens_from_host: int
    tokens_recomputed: int
    """History that was in no tier."""
    tokens_restored: int
    """Loaded or computed again because of suspensions."""
    suspensions: int
    swap_in_wait_s: float

    @property
    def normalized_latency_s(self) -> float:
        """End-to-end seconds for each output token (paper, section 6.1)."""
        return (self.end_s - self.arrived_s) / self.output_tokens


def summarize(
    result: "SimulationResult", *, warm_up_s: float = 0.0, until_s: float | None = None
) -> dict[str, float]:
    """The figures of a simulation.

    Args:
        result: of `Simulation.run`.
        warm_up_s: turns that arrive before are left out.
        until_s: turns that arrive after are left out; None for none. Throughput is counted between both.

    Returns:
        figure by name, units in the names: those of `figures_of`, and those of the simulated server.
    """
    return {
        **figures_of(result.records, warm_up_s=warm_up_s, until_s=until_s, end_s=result.end_s),
        "refused_requests": result.refused,
        "steps": result.steps,
        "mean_batch": _ratio(result.rows, result.steps),
        "compute_s": result.compute_s,
        "swap_in_wait_s": result.swap_in_wait_s,
        "swap_out_stall_s": result.swap_out_stall_s,
        "chunks_swapped_in": result.counters.chunks_swapped_in,
        "chunks_swapped_out": result.counters.chunks_swapped_out,
        "chunks_dropped": result.counters.chunks_dropped,
        "pages_reclaimed": result.counters.pages_reclaimed,
        "end_s": result.end_s,
    }


def figures_of(
    records: Sequence[RequestRecord], *, warm_up_s: float, until_s: float | None, end_s: float
) -> dict[str, float]:
    """The figures of turns that were served, by whatever server.

    Args:
        records: turns that have ended.
        warm_up_s: turns that arrive before are left out.
        until_s: turns that arrive after are left out; None for none. Throughput is counted between both.
        end_s: when the last one ended, or later.

    Returns:
        figure by name, units in the names. Hit rates are shares of the history's tokens, when a turn was
        first admitted: `hit_rate_device` and `hit_rate_host` of all, `host_hit_rate` of those that the device
        did not have. A figure that nothing speaks for is NaN.
    """
    end_s = end_s if until_s is None else until_s
    chosen = [r for r in records if warm_up_s <= r.arrived_s and (until_s is None or r.arrived_s <= end_s)]
    ended = [r for r in records if warm_up_s <= r.end_s <= end_s]
    span_s = end_s - warm_up_s

    def total(name: str) -> int:
        return sum(getattr(record, name) for record in chosen)

    device, host = total("tokens_from_device"), total("tokens_from_host")
    recomputed, new = total("tokens_recomputed"), total("tokens_new")
    history = device + host + recomputed
    ttft = [record.first_token_s - record.arrived_s for record in chosen]
    tpot = [(r.end_s - r.first_token_s) / (r.output_tokens - 1) for r in chosen if r.output_tokens > 1]
    return {
        "requests": len(chosen),
        "history_tokens": history,
        "new_tokens": new,
        "device_tokens": device,
        "host_tokens": host,
        "recomputed_tokens": recomputed,
        "recomputed_tokens_per_request": _ratio(recomputed, len(chosen)),
        "restored_tokens": total("tokens_restored"),
        "hit_rate": _ratio(device + host, history),
        "hit_rate_device": _ratio(device, history),
        "hit_rate_host": _ratio(host, history),
        "host_hit_rate": _ratio(host, host + recomputed),
        "recomputed_share": _ratio(recomputed, history),
        **_spread("normalized_latency_s", [record.normalized_latency_s for record in chosen]),
        **_spread("ttft_s", ttft),
        **_spread("tpot_s", tpot),
        "queue_s_mean": _mean([record.first_step_s - record.arrived_s for record in chosen]),
        "served_requests_per_s": _ratio(len(ended), span_s),
        "output_tokens_per_s": _ratio(sum(record.output_tokens for record in ended), span_s),
        "suspensions": total("suspensions"),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    figures = {f"{name}_mean": _mean(values)}
    points = np.percentile(values, PERCENTILES) if values else [float("nan")] * len(PERCENTILES)
    return figures | {f"{name}_p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
