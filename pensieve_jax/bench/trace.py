"""Reading a profiler's trace: which kernels a GPU ran, and how long it had nothing to do."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel in a trace, all its launches."""

    name: str
    launches: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """What the first GPU did in a trace.

    Attributes:
        kernels: the longest first; copies count as kernels.
        busy_s: time in which at least one of them ran.
        span_s: from the first one's start to the last one's end.
    """

    kernels: tuple[KernelTime, ...]
    busy_s: float
    span_s: float

    @property
    def idle_share(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy_s / self.span_s if self.span_s else 0.0


def record_trace(run: Callable[[], None], folder: Path) -> DeviceTrace | None:
    """Run something under the profiler and read what it left; None where it saw no GPU.

    Args:
        run: does work and waits for it.
        folder: where the trace goes; TensorBoard and Perfetto show it.
    """
    with jax.profiler.trace(str(folder)):
        run()
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return read_trace(ProfileData.from_file(str(newest)))


def read_trace(data: Any) -> DeviceTrace | None:
    """Kernels of the first GPU in a `ProfileData`; None without one."""
    planes = sorted((p for p in data.planes if p.name.startswith("/device:GPU:")), key=lambda p: p.name)
    if not planes:
        return None
    totals: dict[str, list[float]] = defaultdict(list)
    intervals = []
    for line in planes[0].lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            totals[event.name].append(event.duration_ns)
            intervals.append((event.start_ns, event.start_ns + event.duration_ns))
    if not intervals:
        return None
    kernels = [
        KernelTime(name=name, launches=len(times), seconds=sum(times) / 1e9) for name, times in totals.items()
    ]
    return DeviceTrace(
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        busy_s=_covered(intervals) / 1e9,
        span_s=(max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e9,
    )


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
