"""The paper's figure 4: what recomputing a chunk costs at a context length, attention against all the rest.

    python -m benchmarks.figures.fig04
    python -m benchmarks.figures.fig04 --profile profile.json     a file of `pensieve profile`

It is what eviction decides by: chunks further back in a conversation cost more to compute again.
"""

import dataclasses
from pathlib import Path

import jax

from benchmarks.figures.common import options, script, setting_of, start
from pensieve_jax.core.profile import StepProfile, read_profile
from pensieve_jax.profiler.measure import ProfileConfig, measure_profile

QUICK = {"step_tokens": 64, "cost_rows": 1, "decode_rows": 1, "max_context_tokens": 128, "rounds": 1}


@script
def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = options(__doc__, model="llama-2-13b-kv10", systems=(), rates={"default": ()})
    parser.add_argument("--profile", type=Path, help="a file of `pensieve profile`; none: measure now")
    given = parser.parse_args(arguments)
    setting, study = setting_of(given), start(given)
    profile = read_profile(given.profile) if given.profile else _measured(setting.choice, given.quick)
    cost = profile.recompute_cost(profile.chunk_tokens)
    other_s = cost.other_s
    name = setting.choice.label if given.profile is None else profile.model.name
    for context, attention_s in zip(profile.context_tokens, profile.attention_s, strict=True):
        line = {
            "case": f"fig4_{name}_context{context}",
            "metric": "attention_s",
            "value": attention_s,
            "unit": "s",
            "ceiling": other_s,
            "ratio": None,
            "shapes": {
                "chunk_tokens": profile.chunk_tokens,
                "peer": "everything but attention",
                "model": dataclasses.asdict(profile.model),
                "measured_on": profile.device,
            },
        }
        study.keep([line])
        study.console.print(
            f"context {context}: attention {1e6 * attention_s:.1f} us, the rest {1e6 * other_s:.1f} us",
            highlight=False,
        )
    study.console.print(f"results: {study.path}", highlight=False, soft_wrap=True)


def _measured(choice, quick: bool) -> StepProfile:
    sizes = QUICK if quick else {"max_context_tokens": 16_384}
    config = ProfileConfig.for_platform(jax.default_backend(), **sizes)
    return measure_profile(choice.load(), config, num_shards=choice.num_shards)


if __name__ == "__main__":
    main()
