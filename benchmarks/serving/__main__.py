"""Serve one workload with some systems at some rates.

python -m benchmarks.serving --dtype float32 --source synthetic --rates 2,4 --systems pensieve,stateless
python -m benchmarks.serving --model model.gguf --dtype float32 --conversations 20 --rates 0.5
python -m benchmarks.serving --model llama-2-13b-kv10 --systems http://127.0.0.1:8000 --rates 4
"""

import argparse
from pathlib import Path

from benchmarks.serving.compression import Tiers
from benchmarks.serving.models import ModelChoice
from benchmarks.serving.run import LATENCY_LIMIT_S, SYSTEMS, RunSettings, ServerSettings
from benchmarks.serving.study import RESULTS, Study, make_console, rate_points
from benchmarks.workloads import SOURCES, WorkloadSettings
from benchmarks.workloads.__main__ import synthetic_of, synthetic_options
from pensieve_jax.core.errors import PensieveError


def main(arguments: list[str] | None = None) -> None:
    """Run it."""
    given = _parser().parse_args(arguments)
    console = make_console()
    study = Study("serving", given.out, console, warm=not given.cold)
    choice = ModelChoice(name=given.model, dtype=given.dtype, num_shards=given.shards)
    server = ServerSettings(
        tiers=Tiers(device_bytes=given.device_kv_gb * 1e9, host_bytes=given.host_kv_gb * 1e9),
        step_tokens=given.step_tokens,
        max_rows=given.max_rows,
        max_context_tokens=given.max_context,
    )
    run = RunSettings(
        stop_s=given.duration,
        warm_up_s=given.warm_up,
        drain_s=given.drain,
        skip_idle=not given.real_time,
        latency_limit_s=given.latency_limit,
    )

    def workload(rate: float) -> WorkloadSettings:
        return WorkloadSettings(
            source=given.source,
            path=given.path,
            conversations=given.conversations,
            requests_per_s=rate,
            think_time_s=given.think_time,
            head_start_s=given.head_start,
            synthetic=synthetic_of(given),
            seed=given.seed,
        )

    study.header([given.seed])
    try:
        study.run(
            rate_points(
                series=given.name,
                systems=given.systems.split(","),
                rates=[float(rate) for rate in given.rates.split(",")],
                choice=choice,
                server=lambda _: server,
                workload=workload,
                run=run,
            )
        )
    except (PensieveError, OSError) as error:
        raise SystemExit(f"serving: {error}") from error
    console.print(study.table())
    for line in study.summary(given.latency_limit, ["vllm-stateless", "stateless"]):
        ratio = "" if line["ratio"] is None else f", {line['ratio']:.2f} x {line['shapes']['peer']}"
        console.print(f"{line['case']}: {line['value']:.3g} requests/s{ratio}", highlight=False)
    console.print(f"results: {study.path}", highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny", help="dimensions by name, or a checkpoint's path")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shards", type=int, default=1, help="devices")
    parser.add_argument("--systems", default="pensieve,stateless", help=f"of {', '.join(SYSTEMS)}, or URLs")
    parser.add_argument("--name", default="serving", help="what the cases' names begin with")
    parser.add_argument("--source", choices=SOURCES, default="sharegpt")
    parser.add_argument("--path", type=Path, help="the source's file")
    synthetic_options(parser)
    parser.add_argument("--conversations", type=int, default=200, help="at most")
    parser.add_argument("--rates", default="1", help="requests/s, separated by commas")
    parser.add_argument("--think-time", type=float, default=60.0, help="mean, in s")
    parser.add_argument("--head-start", type=float, default=0.0, help="s before the start, already passed")
    parser.add_argument("--duration", type=float, default=120.0, help="s in which turns come")
    parser.add_argument("--warm-up", type=float, default=0.0, help="s of it that don't count")
    parser.add_argument("--drain", type=float, default=60.0, help="s in which the last turns may end")
    parser.add_argument("--device-kv-gb", type=float, default=40.0)
    parser.add_argument("--host-kv-gb", type=float, default=72.0)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--max-context", type=int, default=16_384)
    parser.add_argument("--latency-limit", type=float, default=LATENCY_LIMIT_S, help="s per output token")
    parser.add_argument("--real-time", action="store_true", help="wait while nothing runs")
    parser.add_argument("--cold", action="store_true", help="compile while serving: times mean nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    return parser


if __name__ == "__main__":
    main()
