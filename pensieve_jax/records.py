"""Results as lines of JSON: one home for their form. See `benchmarks/results/README.md`."""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pensieve_jax.versions import processor

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
    driver: str | None = None,
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
        driver: version of a GPU's driver.
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
        "driver": driver,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "shapes": dict(shapes),
        "commit": commit(),
        "command": command_line(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results of a file, in its order; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def replace_records(path: Path, records: Iterable[dict[str, Any]], *, prefix: str | None = None) -> None:
    """Put results into a file, in place of those of the same cases. What is not a number becomes null.

    Args:
        path: the file; it is made if it isn't there.
        records: of `record`.
        prefix: in place of all cases that begin so; None: of just the cases in `records`.
    """
    records = list(records)
    for entry in records:
        for name in ("value", "ceiling", "ratio"):
            if entry[name] is not None and math.isnan(entry[name]):
                entry[name] = None
    cases = {entry["case"] for entry in records}

    def gone(case: str) -> bool:
        return case in cases if prefix is None else case.startswith(prefix)

    kept = [entry for entry in read_records(path) if not gone(entry["case"])] + records
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def command_line() -> str:
    """How this program was started, without paths of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        started = ["-m", spec.name.removesuffix(".__main__")]
    else:
        started = [_below_root(str(Path(sys.argv[0]).resolve()))]
    return shlex.join(["python", *started, *map(_below_root, sys.argv[1:])])


def gpu() -> tuple[str, str] | None:
    """Name and driver version of the first NVIDIA GPU; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    name, driver = done.stdout.splitlines()[0].split(", ")
    return name, driver


def commit() -> str:
    """The commit that runs: as PENSIEVE_COMMIT says, for copies without a repository or of an older one."""
    if told := os.environ.get("PENSIEVE_COMMIT"):
        return told
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _below_root(text: str) -> str:
    """A path below the repository from there, any other absolute one as its last part."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
