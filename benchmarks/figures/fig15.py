"""The paper's figure 15: think times of 30 to 600 s, and the simulator beside them.

    python -m benchmarks.figures.fig15 --think-times 30,60,600 --rates 10

Llama-2-13B with 10 KV heads on ShareGPT, as in the paper. One server serves all think times; each point is
simulated too.
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

SYSTEMS = ("pensieve", "stateless")
RATES = {"default": (5.0,), "stateless": (4.0,)}
THINK_TIMES = "30,60,120,300,600"


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="llama-2-13b-kv10", systems=SYSTEMS, rates=RATES)
    parser.add_argument("--think-times", default=THINK_TIMES, help="s, separated by commas")
    simulator_option(parser)
    given = parser.parse_args(arguments)
    if given.quick:
        given.think_times, given.systems = "1,8", "pensieve"
    setting, rates = setting_of(given), rates_of(given)
    study = start(given)
    points = []
    for think_time in given.think_times.split(","):
        series = f"fig15_{setting.choice.label}_think{think_time}"
        points += setting.points(series, list(rates), rates, think_time_s=float(think_time))
    if given.part != "simulate":
        run(study, points)
    if given.part != "measure":
        compare(study, points)
    finish(study, given.latency)


if __name__ == "__main__":
    main()
