"""The paper's figure 14: eviction by retention value against LRU, and the simulator beside it.

    python -m benchmarks.figures.fig14

OPT-13B on ShareGPT, as in the paper. Each point is simulated too, with the same conversations and sizes.
"""

from benchmarks.figures.common import (
    finish,
    options,
    rates_of,
    run,
    script,
    setting_of,
    simulator_option,
    start,
)
from benchmarks.figures.simulated import compare

SYSTEMS = ("pensieve", "lru")
RATES = {"default": (1.0, 1.5)}
METRICS = {"host_hit_rate": "share", "recomputed_tokens_per_request": "tokens"}


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="opt-13b", systems=SYSTEMS, rates=RATES)
    simulator_option(parser)
    given = parser.parse_args(arguments)
    setting, rates = setting_of(given), rates_of(given)
    study = start(given)
    points = setting.points(f"fig14_{setting.choice.label}", list(rates), rates)
    if given.part != "simulate":
        run(study, points)
    by_case = {row["case"]: row for row in study.rows}
    lines = []
    for row in study.rows:
        peer = by_case.get(row["case"].replace("_pensieve_", "_lru_"))
        if row["system"] != "pensieve" or peer is None:
            continue
        for metric, unit in METRICS.items():
            value, other = row[metric], peer[metric]
            better, worse = (value, other) if unit == "share" else (other, value)
            lines.append(
                {
                    "case": f"{row['case']}_policy",
                    "metric": metric,
                    "value": value,
                    "unit": unit,
                    "ceiling": other,
                    "ratio": better / worse if worse else None,
                    "shapes": {"peer": "lru", "rate": row["rate"]},
                }
            )
    study.keep(lines)
    if given.part != "measure":
        compare(study, points)
    finish(study, given.latency, peers=("lru",))


if __name__ == "__main__":
    main()
