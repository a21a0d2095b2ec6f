"""The simulator beside measured points: the same conversations, sizes and policy."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.records import read_records, record, replace_records
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


def compare(study: Study, points: Sequence[Point], device: str = "h200") -> None:
    """Simulate every point that was measured and can be simulated, and keep both hit rates side by side.

    What was measured is read from the results, so that it may have been measured elsewhere.

    Args:
        study: whose folder of results holds the points.
        points: of a figure.
        device: name of the simulator's device.
    """
    for path in sorted(study.path.parent.glob(f"{study.bench}-*.jsonl")):
        kept = {line["case"]: line for line in read_records(path)}
        for point in points:
            line = kept.get(point.case)
            if line is None or point.system not in POLICIES:
                continue
            simulated, measured = simulate(point, DEVICES[device]), line["shapes"]["figures"]
            rows = [_row(point, name, measured[name], simulated[name], device) for name in COMPARED]
            for row in rows:
                study.console.print(
                    f"{point.case}: {row['metric']} {_text(row['value'])}, simulated {_text(row['ceiling'])}",
                    highlight=False,
                )
            found = {name: line[name] for name in ("bench", "device", "driver")}
            replace_records(path, [record(**found, packages=(), **row) for row in rows])


def _row(point: Point, metric: str, value: float | None, expected: float, device: str) -> dict[str, Any]:
    return {
        "case": f"{point.case}_simulator",
        "metric": metric,
        "value": math.nan if value is None else value,
        "unit": "share",
        "ceiling": expected,
        "ratio": value / expected if value and expected else None,
        "shapes": {"simulated_device": device, "peer": "simulator", **point.facts},
    }


def _text(value: float) -> str:
    return f"{value:.3f}"
