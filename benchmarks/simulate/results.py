"""Lines of `benchmarks/results/simulate-cpu.jsonl`, and the conversations that the scripts here simulate."""

from pensieve_jax.assets import DEFAULT_FOLDER, fetch_sharegpt
from pensieve_jax.records import ROOT, record, replace_records
from pensieve_jax.simulator import read_workload

RESULTS = ROOT / "benchmarks" / "results" / "simulate-cpu.jsonl"
IMAGES = ROOT / "docs" / "images"


def sharegpt():
    """The ShareGPT conversations, with estimated token counts."""
    return read_workload(fetch_sharegpt(ROOT / DEFAULT_FOLDER), "sharegpt")


def line(case, metric, value, unit, **others):
    """One result; see `pensieve_jax.records.record`."""
    return record(bench="simulate", case=case, metric=metric, value=value, unit=unit, **others)


def keep(lines, prefix):
    """Put lines into the file in place of those whose case begins with `prefix`."""
    replace_records(RESULTS, lines, prefix=prefix)
