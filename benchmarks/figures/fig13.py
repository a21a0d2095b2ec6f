"""The paper's figure 13: prompts and decoding in one batch, against steps of their own.

    python -m benchmarks.figures.fig13

Llama-2-13B with 10 KV heads on ShareGPT, as in the paper.
"""

from benchmarks.figures.common import finish, options, rates_of, run, script, setting_of, start

SYSTEMS = ("pensieve", "separate")
RATES = {"default": (5.0, 8.0, 11.0)}


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    given = options(__doc__, model="llama-2-13b-kv10", systems=SYSTEMS, rates=RATES).parse_args(arguments)
    setting, rates = setting_of(given), rates_of(given)
    study = start(given)
    run(study, setting.points(f"fig13_{setting.choice.label}", list(rates), rates))
    finish(study, given.latency, peers=("separate",))


if __name__ == "__main__":
    main()
