"""Results as lines of JSON: one home for their form. See the README of `benchmarks/results`."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def record(
    *,
    bench: str,
    case: str,
    metric: str,
    value: float,
    unit: str,
    ceiling: float | None = None,
    ratio: float | None = None,
    device: str | None = None,
    packages: Sequence[str] = ("numpy",),
    shapes: Mapping[str, Any],
) -> dict[str, Any]:
    """One result.

    Args:
        bench: which benchmark.
        case: which case of it.
        metric: what was measured.
        value: the figure.
        unit: of the figure.
        ceiling: the physical limit, the bar, or the peer of the same run.
        ratio: the figure against it, in the direction in which larger is better.
        device: what it ran on; None: this machine's processor.
        packages: whose versions matter.
        shapes: sizes and settings.
    """
    return {
        "bench": bench,
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "ratio": ratio,
        "device": device or processor(),
        "driver": None,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "shapes": dict(shapes),
        "commit": _commit(),
        "command": " ".join(
            ["python", Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def replace_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Put results into a file, in place of those of the same cases."""
    records = list(records)
    cases = {entry["case"] for entry in records}
    old = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )
    kept = [entry for entry in old if entry["case"] not in cases] + records
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    names = [t for t in info.read_text().splitlines() if t.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
