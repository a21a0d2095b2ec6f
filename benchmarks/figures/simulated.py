"""The simulator beside measured points: the same conversations, sizes and policy."""

from typing import Any

from benchmarks.serving.study import Point, Study, workload_of
from host_cache.config import CacheConfig
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from pensieve_jax.simulator import DEVICES, Simulation, SimulationConfig, summarize
from pensieve_jax.simulator.settings import DeviceSpec

POLICIES = {"pensieve": "retention-value", "gpu-only": "retention-value", "lru": "lru"}
"""Systems that can be simulated, with their policy."""
COMPARED = ("hit_rate_device", "hit_rate_host", "hit_rate", "recomputed_share")


def simulate(point: Point, device: DeviceSpec) -> dict[str, float]:
    """Figures of a point as the simulator has them.

    Args:
        point: of one of the systems of `POLICIES`.
        device: rates of the device.
    """
    server, choice = point.server, point.choice
    page_bytes = server.page_tokens * choice.kv_bytes_per_token
    host_pages = 0 if point.system == "gpu-only" else int(server.tiers.host_bytes // page_bytes)
    config = SimulationConfig(
        model=choice.shape,
        device=device,
        cache=CacheConfig(
            device_pages=int(server.tiers.device_bytes // page_bytes),
            host_pages=host_pages,
            page_tokens=server.page_tokens,
        ),
        scheduler=SchedulerConfig(step_tokens=server.step_tokens, max_rows=server.max_rows),
        policy=POLICIES[point.system],
        max_context_tokens=server.max_context_tokens,
    )
    shapes = [conversation.shape for conversation in workload_of(point).conversations]
    result = Simulation(shapes, config, stop_s=point.run.stop_s).run()
    until_s = min(point.run.stop_s, result.end_s)
    return summarize(result, warm_up_s=point.run.warm_up_s, until_s=until_s)


def compare(study: Study, points: list[Point], device: str = "h200") -> None:
    """Simulate every point that was run and can be simulated, and keep both hit rates side by side.

    Args:
        study: that has run them.
        points: of a figure.
        device: name of the simulator's device.
    """
    measured = {row["case"]: row for row in study.rows}
    lines: list[dict[str, Any]] = []
    for point in points:
        if point.case not in measured or point.system not in POLICIES:
            continue
        simulated = simulate(point, DEVICES[device])
        for name in COMPARED:
            value, expected = measured[point.case][name], simulated[name]
            lines.append(
                {
                    "case": f"{point.case}_simulator",
                    "metric": name,
                    "value": value,
                    "unit": "share",
                    "ceiling": expected,
                    "ratio": value / expected if expected else None,
                    "shapes": {"simulated_device": device, "peer": "simulator", **point.facts},
                }
            )
            study.console.print(
                f"{point.case}: {name} {value:.3f}, simulated {expected:.3f}", highlight=False
            )
    study.keep(lines)
