"""Does a compressed run see what the whole one sees? A tiny model, on a CPU: hit rates of three runs.

    python -m benchmarks.serving.compression_check

1. The whole think time, in real time.
2. The same without waiting while nothing runs.
3. Think time and tiers divided by `--factor`, without waiting; averaged over seeds, as is 2.

Case `compression_skip` is 2 against 1 (one seed), `compression_factor*` 3 against 2. Only rates of hits are
kept: what they depend on is who comes when, not how fast this machine is.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.serving.clock import RunClock
from benchmarks.serving.compression import Tiers, compress_tiers, compress_workload, running_bytes
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import Opener, RunSettings, ServerSettings, run_once
from benchmarks.serving.study import RESULTS, Study, make_console
from benchmarks.workloads import WorkloadSettings, make_workload
from pensieve_jax.simulator.synthetic import SyntheticWorkload

METRICS = ("hit_rate_device", "hit_rate_host", "recomputed_share")
DEVICE_PAGES, HOST_PAGES = 160, 120
SHAPE = SyntheticWorkload(mean_turns=6, mean_input_tokens=22, mean_output_tokens=8, sigma=0.6)
CONTEXT, RATE, THINK_S = 256, 16.0, 6.0
MEAN_CONTEXT, STEP_S = 100, 0.005
"""About: tokens of a turn under way, and seconds that a token takes."""
SPAN_IN_THINK_TIMES, WARM_UP_SHARE = 10, 0.4


def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--think-time", type=float, default=THINK_S, help="the whole one, s")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    study = Study("serving", given.out, make_console())
    study.header(range(given.seeds))
    choice = ModelChoice(name="tiny", dtype="float32")
    page_bytes = 32.0 * choice.kv_bytes_per_token
    tiers = Tiers(device_bytes=DEVICE_PAGES * page_bytes, host_bytes=HOST_PAGES * page_bytes)
    whole = WorkloadSettings(
        source="synthetic",
        synthetic=SHAPE,
        requests_per_s=RATE,
        think_time_s=given.think_time,
        conversations=round(2.2 * SPAN_IN_THINK_TIMES * given.think_time * RATE / SHAPE.mean_turns),
        max_context_tokens=CONTEXT,
        vocab_size=choice.spec.vocab_size,
        answer_s_per_token=STEP_S,
    )
    running = running_bytes(
        requests_per_s=RATE,
        output_tokens=SHAPE.mean_output_tokens,
        s_per_token=STEP_S,
        context_tokens=MEAN_CONTEXT,
        kv_bytes_per_token=choice.kv_bytes_per_token,
    )
    opener = Opener(choice, _server(tiers))

    def figures(
        workload: WorkloadSettings, sizes: Tiers, seeds: range, *, skip_idle: bool
    ) -> dict[str, float]:
        clock, rows = RunClock(skip_idle=skip_idle), []
        stop_s = SPAN_IN_THINK_TIMES * workload.think_time_s
        run = RunSettings(stop_s=stop_s, warm_up_s=WARM_UP_SHARE * stop_s, skip_idle=skip_idle)
        with opener.open("pensieve", clock, server=_server(sizes)) as system:
            for seed in seeds:
                made = make_workload(replace(workload, seed=seed, head_start_s=stop_s))
                rows.append(run_once(system, made, clock, run))
        return {name: statistics.mean(row[name] for row in rows) for name in METRICS}

    def keep(case: str, values: dict[str, float], expected: dict[str, float], seeds: range) -> None:
        for name in METRICS:
            study.console.print(f"{case}: {name} {values[name]:.3f}, beside it {expected[name]:.3f}")
        shapes = {"model": "tiny", "rate": RATE, "think_time_s": given.think_time, "seeds": list(seeds)}
        shapes |= {"device_pages": DEVICE_PAGES, "host_pages": HOST_PAGES, "factor": given.factor}
        study.keep(
            [
                {
                    "case": case,
                    "metric": name,
                    "value": values[name],
                    "unit": "share",
                    "ceiling": expected[name],
                    "ratio": None,
                    "shapes": shapes,
                }
                for name in METRICS
            ]
        )

    one, all_seeds = range(1), range(given.seeds)
    real = figures(whole, tiers, one, skip_idle=False)
    skipped = figures(whole, tiers, one, skip_idle=True)
    keep("compression_skip", skipped, real, one)
    plain = figures(whole, tiers, all_seeds, skip_idle=True)
    smaller = compress_tiers(tiers, given.factor, running)
    compressed = figures(compress_workload(whole, given.factor), smaller, all_seeds, skip_idle=True)
    keep(f"compression_factor{given.factor:g}", compressed, plain, all_seeds)


def _server(tiers: Tiers) -> ServerSettings:
    return ServerSettings(tiers=tiers, step_tokens=64, max_rows=8, max_context_tokens=CONTEXT)


if __name__ == "__main__":
    main()
