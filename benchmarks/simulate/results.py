"""Lines of `benchmarks/results/simulate-cpu.jsonl`, and the conversations that the scripts here simulate."""

import sys
from pathlib import Path

from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt
from pensieve_jax.simulator import read_workload

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.records import record, replace_records  # noqa: E402 (found beside this folder)

RESULTS = ROOT / "benchmarks" / "results" / "simulate-cpu.jsonl"
IMAGES = ROOT / "docs" / "images"


def sharegpt():
    """The ShareGPT conversations, with estimated token counts."""
    return read_workload(fetch_sharegpt(ROOT / DEFAULT_FOLDER), "sharegpt")


def line(case, metric, value, unit, **others):
    """One result; see `benchmarks.records.record`."""
    return record(bench="simulate", case=case, metric=metric, value=value, unit=unit, **others)


def keep(lines, prefix):
    """Put lines into the file in place of those whose case begins with `prefix`."""
    replace_records(RESULTS, lines, prefix=prefix)
