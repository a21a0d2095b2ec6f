"""The paper's figure 10: normalized latency against throughput on one GPU.

    python -m benchmarks.figures.fig10 --model llama-2-13b-kv10 --systems pensieve,gpu-only,stateless
    python -m benchmarks.figures.fig10 --systems vllm-stateless,vllm-prefix,vllm-offload
    python -m benchmarks.figures.fig10 --ultrachat ULTRACHAT.jsonl

Systems that need the GPU for themselves are run by calls of their own; results add up in one file.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.figures.common import finish, options, rates_of, run, script, setting_of, start

SYSTEMS = ("pensieve", "gpu-only", "stateless", "vllm-stateless", "vllm-prefix", "vllm-offload")
QUICK_SYSTEMS = ("pensieve", "stateless")
RATES = {
    "default": (5.0, 8.0, 11.0),
    "stateless": (3.0, 5.0, 7.0),
    "vllm-stateless": (3.0, 5.0, 7.0),
    "transformers": (0.5, 1.0),
}


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="llama-2-13b-kv10", systems=SYSTEMS, rates=RATES)
    parser.add_argument("--ultrachat", type=Path, help="a file in UltraChat's format, in place of ShareGPT")
    given = parser.parse_args(arguments)
    if given.quick:
        given.systems = ",".join(QUICK_SYSTEMS)
    setting, data = setting_of(given), "sharegpt"
    if given.ultrachat is not None and not given.quick:
        setting, data = replace(setting, source="ultrachat", path=given.ultrachat), "ultrachat"
    rates = rates_of(given)
    study = start(given)
    run(study, setting.points(f"fig10_{setting.choice.label}_{data}", list(rates), rates))
    finish(study, given.latency)


if __name__ == "__main__":
    main()
