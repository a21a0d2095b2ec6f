"""What compiling ahead takes at the first start and at the second: `python -m benchmarks.starts CHECKPOINT`.

Each start is a process of its own. Beside it stands the second start with nothing but JAX's own cache of
compiled programs, which finds a program after tracing and lowering it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.records import ROOT, gpu, record, replace_records
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.engine import Engine
from pensieve_jax.engine.warmup import warm_up

RESULTS = ROOT / "benchmarks" / "results"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def start(checkpoint: Path, device_pages: int, host_pages: int, folder: Path | None) -> dict:
    """Start an engine, and say how long it took to open it and to compile ahead, and what was traced for it.

    Args:
        checkpoint: of the model.
        device_pages: of the device tier.
        host_pages: of the host tier.
        folder: of compiled programs; None: none but JAX's.
    """
    lowered = 0

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        nonlocal lowered
        lowered += event == LOWERED

    jax.monitoring.register_event_duration_secs_listener(listen)
    tiers = TierConfig(device_pages=device_pages, host_pages=host_pages)
    begin = time.perf_counter()
    engine = Engine.from_checkpoint(checkpoint, config=EngineConfig(tiers=tiers, compilation_cache=folder))
    opened, lowered = time.perf_counter(), 0
    warm_up(engine)
    compiled = time.perf_counter()
    engine.close()
    return {
        "open_s": opened - begin,
        "compile_ahead_s": compiled - opened,
        "programs_traced": lowered,
        "device": jax.devices()[0].device_kind,
    }


def start_apart(options: list[str], environment: dict[str, str]) -> dict:
    """`start` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.starts", *options],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Start, start again, and keep what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device-pages", type=int, default=64)
    parser.add_argument("--host-pages", type=int, default=64)
    parser.add_argument("--results", type=Path, default=None, help="the file to write")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(start(args.checkpoint, args.device_pages, args.host_pages, args.folder)))
        return
    options = [str(args.checkpoint), f"--device-pages={args.device_pages}", f"--host-pages={args.host_pages}"]
    options.append("--once")
    with tempfile.TemporaryDirectory() as made:
        none = {"JAX_COMPILATION_CACHE_DIR": ""}
        kept = [*options, f"--folder={made}/ours"]
        of_jax = {
            "JAX_COMPILATION_CACHE_DIR": f"{made}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        starts = {"first_start": start_apart(kept, none), "second_start": start_apart(kept, none)}
        start_apart(options, of_jax)
        peer = start_apart(options, of_jax)
    there = gpu()
    records = [
        record(
            bench="starts",
            case=f"{args.checkpoint.stem}_{case}",
            metric="compile_ahead",
            value=took["compile_ahead_s"],
            unit="s",
            ceiling=peer["compile_ahead_s"] if case == "second_start" else None,
            ratio=peer["compile_ahead_s"] / took["compile_ahead_s"] if case == "second_start" else None,
            device=there[0] if there else None,
            driver=there[1] if there else None,
            packages=("jax", "flax", "numpy"),
            shapes={
                "device_pages": args.device_pages,
                "host_pages": args.host_pages,
                "open_s": took["open_s"],
                "programs_traced": took["programs_traced"],
                "traced_with_jax_cache_alone": peer["programs_traced"],
            },
        )
        for case, took in starts.items()
    ]
    place = "cpu" if peer["device"] == "cpu" else peer["device"].split()[-1].lower()
    replace_records(args.results or RESULTS / f"starts-{place}.jsonl", records)
    for entry in records:
        print(
            f"{entry['case']}: {entry['value']:.1f} s, {entry['shapes']['programs_traced']} programs traced"
        )


if __name__ == "__main__":
    main()
