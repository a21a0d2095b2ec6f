"""The paper's figure 11: normalized latency against throughput on several GPUs, by tensor parallelism.

    python -m benchmarks.figures.fig11 --model llama-2-70b --shards 2
    python -m benchmarks.figures.fig11 --model opt-66b --shards 2 --systems vllm-stateless

The paper has four GPUs of 80 GB. Sizes of tiers are per GPU.
"""

import jax

from benchmarks.figures.common import finish, options, rates_of, run, script, setting_of, start

SYSTEMS = ("pensieve", "stateless", "vllm-stateless")
RATES = {"default": (4.0, 8.0, 12.0), "stateless": (2.0, 4.0, 8.0), "vllm-stateless": (2.0, 4.0, 8.0)}


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="llama-2-70b", systems=SYSTEMS, rates=RATES)
    parser.add_argument("--shards", type=int, default=2, help="GPUs")
    given = parser.parse_args(arguments)
    if given.quick:
        given.systems = "pensieve"
        given.shards = min(given.shards, len(jax.devices()))
    setting = setting_of(given, num_shards=given.shards)
    rates = rates_of(given)
    study = start(given)
    run(study, setting.points(f"fig11_{setting.choice.label}_x{given.shards}", list(rates), rates))
    finish(study, given.latency)


if __name__ == "__main__":
    main()
