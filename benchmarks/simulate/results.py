"""Lines of `benchmarks/results/simulate-cpu.jsonl`, and the conversations that the scripts here simulate."""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt
from pensieve_jax.simulator import read_workload

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "simulate-cpu.jsonl"
IMAGES = ROOT / "docs" / "images"


def sharegpt():
    """The ShareGPT conversations, with estimated token counts."""
    return read_workload(fetch_sharegpt(ROOT / DEFAULT_FOLDER), "sharegpt")


def line(case, metric, value, unit, *, ceiling=None, ratio=None, shapes):
    """One result. `ceiling` is the peer of the same run; `ratio` grows with what is better."""
    return {
        "bench": "simulate",
        "case": case,
        "metric": metric,
        "value": value,
        "unit": unit,
        "ceiling": ceiling,
        "ratio": ratio,
        "device": _cpu(),
        "driver": None,
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "shapes": shapes,
        "commit": _commit(),
        "command": " ".join(
            ["python", *(Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(),), *sys.argv[1:]]
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def keep(lines, prefix):
    """Put lines into the file in place of those whose case begins with `prefix`. NaN becomes null."""
    for entry in lines:
        for name in ("value", "ceiling", "ratio"):
            if entry[name] != entry[name]:
                entry[name] = None
    old = []
    if RESULTS.exists():
        old = [json.loads(text) for text in RESULTS.read_text(encoding="utf-8").splitlines()]
    kept = [entry for entry in old if not entry["case"].startswith(prefix)] + lines
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")


def _cpu():
    info = Path("/proc/cpuinfo")
    names = (
        [text for text in info.read_text().splitlines() if text.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _commit():
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
