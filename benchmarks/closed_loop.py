"""Conversations in a closed loop: each sends its next turn as soon as it may.

`python -m benchmarks.closed_loop --model llama-2-13b-kv10 --cases closed_64x5 pressure_256x4`

A case has so many conversations of so many turns, so many of them active at a time; a conversation that has
its answer goes to the end of the queue. Prompts are random token ids, answers have a fixed length. Every
case is served with the state kept and, where it says so, by the same engine without.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.records import ROOT, gpu, record, replace_records
from benchmarks.serving.models import ModelChoice
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.plans import StepPlan
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.models.presets import PRESETS
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from pensieve_jax.worker.worker import PendingStep

PAGE_TOKENS = 32
POLL_S = 0.0005
"""How often the client looks whether turns have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of a workload."""

    conversations: int
    turns: int
    active: int
    """Turns under way at once at most."""
    new_tokens: int = 200
    output_tokens: int = 200
    bar_s: float | None = None
    """The time that the project asks for on one H200 with the model of the paper."""
    stateless: bool = False
    """Serve it without state, too."""
    host: bool = False
    """Use the host tier."""

    @property
    def tokens_each(self) -> int:
        """Tokens of a conversation at its end."""
        return self.turns * (self.new_tokens + self.output_tokens)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "closed_64x5": Case(conversations=64, turns=5, active=64, bar_s=13.2, stateless=True),
        "pressure_256x4": Case(conversations=256, turns=4, active=64, bar_s=43.0, host=True),
        "tiny_closed": Case(
            conversations=4, turns=2, active=4, new_tokens=20, output_tokens=5, stateless=True
        ),
        "tiny_pressure": Case(conversations=6, turns=3, active=2, new_tokens=20, output_tokens=12, host=True),
    }
)
STATELESS_GAIN = 1.6
"""How much longer serving without state has to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What serving a case has shown."""

    seconds: float
    output_tokens: int
    compiled: int
    """Programs compiled meanwhile; 0 in a run that counts."""
    counters: Mapping[str, int]


def serve(engine: Engine, case: Case, *, seed: int = 0) -> Outcome:
    """Serve a case once."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(engine.spec.vocab_size, size=(case.conversations, case.turns, case.new_tokens))
    params = SamplingParams(max_tokens=case.output_tokens, ignore_eos=True)
    conversations = [engine.conversation() for _ in range(case.conversations)]
    queue = deque((number, 0) for number in range(case.conversations))
    active: dict[int, tuple[int, Turn]] = {}
    compiled, before, output = engine.num_compilations, asdict(engine.counters), 0
    begin = time.perf_counter()
    while queue or active:
        while queue and len(active) < case.active:
            number, turn = queue.popleft()
            active[number] = turn, engine.submit(conversations[number].id, prompts[number, turn], params)
        if not engine.has_thread:
            engine.step()
        else:
            time.sleep(POLL_S)
        for number, (turn, handle) in list(active.items()):
            if handle.done:
                output += len(handle.result().token_ids)
                del active[number]
                if turn + 1 < case.turns:
                    queue.append((number, turn + 1))
    seconds = time.perf_counter() - begin
    counters = {name: value - before[name] for name, value in asdict(engine.counters).items()}
    compiled = engine.num_compilations - compiled
    for conversation in conversations:
        conversation.delete()
    return Outcome(seconds=seconds, output_tokens=output, compiled=compiled, counters=counters)


class StepTimes:
    """When each step of an engine was handed over to the device, and what was in it."""

    COLUMNS = ("begin_s", "handed_over_s", "rows", "tokens", "pages_in", "pages_out")

    def __init__(self, engine: Engine) -> None:
        worker = engine._turns.parts.worker
        dispatch, self.lines = worker.dispatch, [self.COLUMNS]

        def timed(plan: StepPlan) -> PendingStep:
            begin = time.perf_counter()
            step = dispatch(plan)
            tokens = sum(len(row.token_ids) for row in plan.rows)
            sizes = len(plan.rows), tokens, len(plan.swap_ins), len(plan.swap_outs)
            self.lines.append((round(begin, 5), round(time.perf_counter(), 5), *sizes))
            return step

        worker.dispatch = timed

    def write(self, path: Path) -> None:
        """As CSV, a line for each step."""
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in self.lines))


def engine_config(case: Case, choice: ModelChoice, args: argparse.Namespace, *, keep: bool) -> EngineConfig:
    """Tiers of so many bytes, steps of so many tokens."""
    page_bytes = choice.kv_bytes_per_token * PAGE_TOKENS
    return EngineConfig(
        tiers=TierConfig(
            device_pages=int(args.device_gb * 1e9) // page_bytes,
            host_pages=int(args.host_gb * 1e9) // page_bytes if case.host and keep else 0,
            page_tokens=PAGE_TOKENS,
            keep_state=keep,
            share_prefixes=False,
        ),
        scheduler=SchedulerConfig(step_tokens=args.step_tokens, max_rows=min(case.active, args.max_rows)),
        max_context_tokens=-(-(case.tokens_each + 1) // PAGE_TOKENS) * PAGE_TOKENS,
    )


def run_case(
    name: str,
    choice: ModelChoice,
    model: ServableModel,
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure a case in all its ways."""
    case, records, kept_s = CASES[name], [], None
    for keep in (True, False) if case.stateless else (True,):
        way = name if keep else f"{name}_stateless"
        config = engine_config(case, choice, args, keep=keep)
        begin = time.perf_counter()
        with Engine(model, None, config, end_token_ids=()) as engine:
            say(f"{way}: engine after {time.perf_counter() - begin:.1f} s")
            if args.rehearse:
                serve(engine, replace(case, turns=min(2, case.turns)), seed=1)
            else:
                warm_up(engine, SamplingParams(), progress=lambda done, total: say(f"  {done}/{total}"))
            say(f"{way}: compiled after {time.perf_counter() - begin:.1f} s")
            steps = StepTimes(engine) if args.steps else None
            outcome = serve(engine, case)
            if steps is not None:
                steps.write(args.steps / f"{way}.csv")
        del engine, steps
        gc.collect()
        say(f"{way}: {outcome}")
        ceiling = case.bar_s if keep else kept_s
        ratio = None
        if ceiling is not None:
            ratio = ceiling / outcome.seconds if keep else outcome.seconds / ceiling / STATELESS_GAIN
        if keep:
            kept_s = outcome.seconds
        records += _records(way, outcome, ceiling, ratio, case, config, choice.label)
    return records


def _records(
    way: str,
    outcome: Outcome,
    ceiling: float | None,
    ratio: float | None,
    case: Case,
    config: EngineConfig,
    model: str,
) -> list[dict[str, Any]]:
    device = gpu() or (None, None)
    shapes = {
        "model": model,
        **{name: value for name, value in asdict(case).items() if name != "bar_s"},
        "device_pages": config.tiers.device_pages,
        "host_pages": config.tiers.host_pages,
        **asdict(config.scheduler),
        "compiled_while_serving": outcome.compiled,
    }
    rates = [
        ("time", outcome.seconds, "s", ceiling, ratio),
        ("output_rate", outcome.output_tokens / outcome.seconds, "tokens/s", None, None),
        ("chunks_swapped_in", outcome.counters["chunks_swapped_in"], "chunks", None, None),
    ]
    return [
        record(
            bench="serving",
            case=way,
            metric=metric,
            value=value,
            unit=unit,
            ceiling=peer,
            ratio=share,
            device=device[0],
            driver=device[1],
            packages=("jax", "jaxlib", "numpy"),
            shapes=shapes,
        )
        for metric, value, unit, peer, share in rates
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-2-13b-kv10", choices=["tiny", *PRESETS])
    parser.add_argument("--cases", nargs="+", default=["closed_64x5", "pressure_256x4"], choices=[*CASES])
    parser.add_argument("--device-gb", type=float, help="KV on the device; 40, less for tiny")
    parser.add_argument("--host-gb", type=float, help="KV in the host, if a case uses it; 72, less for tiny")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument(
        "--rehearse", action="store_true", help="compile what two turns meet, not all shapes: starts sooner"
    )
    parser.add_argument("--steps", type=Path, help="folder of tables that tell when each step began")
    results = ROOT / "benchmarks" / "results" / "serving-h200.jsonl"
    parser.add_argument("--results", type=Path, default=results)
    args = parser.parse_args(arguments)
    for tier, size, tiny in (("device_gb", 40.0, 0.0002), ("host_gb", 72.0, 0.0006)):
        if getattr(args, tier) is None:
            setattr(args, tier, tiny if args.model == "tiny" else size)
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {text}", flush=True)

    choice = ModelChoice(name=args.model, dtype="float32" if args.model == "tiny" else "bfloat16")
    model = choice.load()
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    say("weights")
    for name in args.cases:
        replace_records(args.results, run_case(name, choice, model, args, say))


if __name__ == "__main__":
    main()
