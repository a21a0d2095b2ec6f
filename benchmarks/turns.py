"""The demo's comparison as results: `pensieve demo`, then `python benchmarks/turns.py demo-out/demo.json`.

Time to first token by turn number over real conversations, with the state kept and without.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from pensieve_jax.records import ROOT, record, replace_records

RESULTS = ROOT / "benchmarks" / "results" / "turns-cpu.jsonl"
LATE = 5
"""Turns from this number on count as late."""


def main() -> None:
    """Convert the demo's numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", type=Path, help="demo.json, as the demo writes it")
    args = parser.parse_args()
    numbers = json.loads(args.numbers.read_text(encoding="utf-8"))
    if numbers["fallback"] or not numbers["texts_equal"] or numbers["compiled_while_serving"]:
        raise SystemExit("turns: the demo ran on its fallback, or its runs can't be compared: no results")
    shapes = {"title": numbers["title"], **numbers["settings"]}
    packages = ("jax", "flax", "numpy")

    def line(
        case: str, metric: str, value: float, unit: str, peer: float | None, ratio: float | None
    ) -> dict:
        return record(
            bench="turns",
            case=case,
            metric=metric,
            value=value,
            unit=unit,
            ceiling=peer,
            ratio=ratio,
            packages=packages,
            shapes=shapes,
        )

    records = []
    for row in numbers["by_turn"]:
        kept, stateless = row["with_state_s"], row["without_state_s"]
        case = f"sharegpt_turn{row['number']}"
        records.append(line(case, "time_to_first_token", kept, "s", stateless, stateless / kept))
    late = numbers["late_ratio"]
    records.append(
        line(f"sharegpt_turn{LATE}on", "time_to_first_token_share", late, "1", 1 / 3, 1 / 3 / late)
    )
    kept, stateless = numbers["with_state"], numbers["without_state"]
    total = kept["total_s"], stateless["total_s"]
    records.append(line("sharegpt_all", "total_time", total[0], "s", total[1], total[1] / total[0]))
    computed = kept["tokens"]["computed"], stateless["tokens"]["computed"]
    ratio = computed[1] / computed[0]
    records.append(line("sharegpt_all", "tokens_computed", computed[0], "tokens", computed[1], ratio))
    replace_records(RESULTS, records)


if __name__ == "__main__":
    main()
