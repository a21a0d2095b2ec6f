"""Cost of planning a step with many conversations known, on one core.

    python benchmarks/cache/planning.py --out benchmarks/results/cache-cpu.jsonl
    python benchmarks/cache/planning.py --growth --out benchmarks/results/cache-cpu.jsonl

The second compares 100,000, 1,000,000 and 10,000,000 chunks at equal load and takes some ten minutes.

A world of conversations with chunks in both tiers, full to the brim, so that every page that is needed is
evicted from somebody; 512 turns (with `--growth` 256) decode, and each that ends is followed by the next
turn of an idle conversation. Timed is what `Scheduler.schedule` takes, by the clock and in time of its
thread, which other processes on the machine disturb less. Nothing computes: the plan's result is made up.
"""

import argparse
import gc
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from host_cache.config import CacheConfig
from host_cache.cost_model import analytic_cost
from host_cache.manager import CacheManager
from host_cache.policies import make_policy
from pensieve_jax.core.plans import StepResult, StepStart
from pensieve_jax.core.types import SampledToken, SamplingParams
from pensieve_jax.records import record, replace_records
from pensieve_jax.scheduler.request import Request
from pensieve_jax.scheduler.scheduler import Scheduler, SchedulerConfig

RUNNING = 512
"""Turns that run at once where the planning of a step has its bars."""
GROWTH = {100_000: 2_000, 1_000_000: 20_000, 10_000_000: 200_000}
"""Chunks -> conversations. With 256 turns running even the smallest world has a place for each."""
GROWTH_RUNNING = 256
PAGE_TOKENS = 32
TOKEN = SampledToken(token_id=1)


class Took(NamedTuple):
    """Time of one planning."""

    wall_s: float
    cpu_s: float
    """Of this thread alone: what other processes on the machine take isn't counted."""


class World:
    """A scheduler and as many idle conversations as fill both tiers."""

    def __init__(self, *, conversations: int, chunks: int, running: int, policy: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        each = chunks // conversations
        cost = analytic_cost(
            num_layers=40,
            num_heads=40,
            head_dim=128,
            num_parameters=13 * 10**9,
            chunk_tokens=PAGE_TOKENS,
            max_context_tokens=16_384,
            flops_per_s=3e14,
        )
        # A fifth of the chunks is on the device, the rest in the host.
        config = CacheConfig(device_pages=chunks // 5, host_pages=chunks - chunks // 5)
        self.cache = CacheManager(config, make_policy(policy, cost))
        self.scheduler = Scheduler(self.cache, SchedulerConfig(step_tokens=2048, max_rows=running))
        self.now = 0.0
        self.num_requests = 0
        self.lengths = {}
        self.requests = {}
        for number in range(conversations):
            name = f"c{number}"
            tokens = int(each * PAGE_TOKENS * self.random.uniform(0.5, 1.5))
            self.submit(name, tokens, output=1)
            while self.scheduler.has_work:
                self.step()
        for number in self.random.permutation(conversations)[:running]:
            self.next_turn(f"c{number}")
        for _ in range(200):  # until all of them are in
            self.step()

    def submit(self, name: str, tokens: int, output: int) -> None:
        history = self.lengths.get(name, 0)
        request = Request(
            id=self.num_requests,
            conversation_id=name,
            params=SamplingParams(seed=0, max_tokens=output),
            stop_token_ids=frozenset(),
            tokens=self.random.integers(50_000, size=history + tokens, dtype=np.int32),
            num_tokens=history + tokens,
            num_prompt_tokens=history + tokens,
            num_history_tokens=max(0, history - 1),
            arrived_s=self.now,
        )
        self.num_requests += 1
        self.requests[request.id] = request
        self.scheduler.submit(request, self.now)

    def next_turn(self, name: str) -> None:
        self.submit(name, int(self.random.integers(20, 200)), output=int(self.random.integers(100, 400)))

    def step(self) -> "tuple[Took, int]":
        """One step; returns what planning it took, and its rows."""
        self.now += 0.03
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        plan = self.scheduler.schedule(self.now)
        took = Took(time.perf_counter() - begin, time.thread_time() - begin_cpu)
        assert plan is not None, "no step is under way"
        result = StepResult(
            samples={row.request_id: TOKEN for row in plan.rows if row.sample is not None},
            finished_swap_outs=plan.swap_outs,
            failed_swap_outs=(),
        )
        self.scheduler.advance(plan, StepStart(), self.now)
        for output in self.scheduler.apply(result, self.now):
            if output.finished:
                request = self.requests.pop(output.request_id)
                self.lengths[request.conversation_id] = request.num_tokens
        return took, len(plan.rows)


def measure(conversations: int, chunks: int, running: int, policy: str, steps: int) -> dict[str, float]:
    """Seconds of planning and bytes a chunk."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world = World(conversations=conversations, chunks=chunks, running=running, policy=policy, seed=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = world.cache.num_chunks
    gc.collect()
    gc.freeze()
    for _ in range(50):
        world.step()
    took: list[Took] = []
    rows = []
    dropped = world.cache.counters.chunks_dropped + world.cache.counters.pages_reclaimed
    for _ in range(steps):
        seconds, count = world.step()
        took.append(seconds)
        rows.append(count)
        busy = {r.conversation_id for r in world.requests.values()}
        while len(busy) < running:
            name = f"c{int(world.random.integers(conversations))}"
            if name not in busy:
                world.next_turn(name)
                busy.add(name)
    evicted = world.cache.counters.chunks_dropped + world.cache.counters.pages_reclaimed - dropped
    wall, cpu = sorted(t.wall_s for t in took), sorted(t.cpu_s for t in took)
    return {
        "median_ms": 1e3 * statistics.median(wall),
        "p99_ms": 1e3 * wall[int(0.99 * len(wall))],
        "cpu_median_ms": 1e3 * statistics.median(cpu),
        "cpu_p99_ms": 1e3 * cpu[int(0.99 * len(cpu))],
        "bytes_per_chunk": (peak - before) * 1024 / held,
        "rows": statistics.mean(rows),
        "evicted_per_step": evicted / steps,
        "chunks": held,
    }


def records_of(result: dict[str, float], case: str, shapes: dict[str, float], *, barred: bool) -> list[dict]:
    """Lines for the results file; with bars where the world has the size that they are for."""
    bars = {
        "median_ms": 2.0,
        "p99_ms": 6.0,
        "cpu_median_ms": 2.0,
        "cpu_p99_ms": 6.0,
        "bytes_per_chunk": 200.0,
    }
    return [
        record(
            bench="cache",
            case=case,
            metric=f"plan_{name}" if name.endswith("ms") else name,
            value=result[name],
            unit="ms" if name.endswith("ms") else "bytes",
            ceiling=bar if barred else None,
            ratio=bar / result[name] if barred else None,
            shapes=shapes,
        )
        for name, bar in bars.items()
    ]


def main() -> None:
    """Measure and print; put the results into a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON lines file to put the results into")
    parser.add_argument("--growth", action="store_true", help="with more and more chunks at equal load")
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--running", type=int, default=RUNNING)
    parser.add_argument("--policy", default="retention-value")
    parser.add_argument("--steps", type=int, default=2_000)
    args = parser.parse_args()
    worlds = [(args.chunks, args.conversations, args.running)]
    if args.growth:
        worlds = [(chunks, conversations, GROWTH_RUNNING) for chunks, conversations in GROWTH.items()]
    elif args.conversations < 2 * args.running:
        parser.error(f"--conversations: got {args.conversations}, expected at least {2 * args.running}")
    for chunks, conversations, running in worlds:
        # A process of its own: the most memory it has ever had is then this world's.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            result = process.submit(measure, conversations, chunks, running, args.policy, args.steps).result()
        case = f"plan_{conversations}x{chunks}_{running}running_{args.policy}"
        print(case, {name: round(value, 3) for name, value in result.items()}, flush=True)
        if args.out:
            shapes = {"conversations": conversations, "chunks": result["chunks"], "running": running}
            barred = (chunks, running) == (1_000_000, RUNNING)
            replace_records(args.out, records_of(result, case, shapes, barred=barred))


if __name__ == "__main__":
    main()
