"""Runs steps of a model with random weights, and times them."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from host_cache.plan import PageCopy
from pallas_kernels.kv_write import kv_write
from pensieve_jax.bench.cases import Case, Kind
from pensieve_jax.bench.floor import Floor, step_floor
from pensieve_jax.bench.presets import Preset
from pensieve_jax.bench.timing import Ceilings, measure_ceilings, one_more_s, seconds_each
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.core.plans import Row, SampleRequest, StepPlan
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.models.presets import random_model
from pensieve_jax.models.shape import num_parameters, shape_of
from pensieve_jax.parallel import make_mesh
from pensieve_jax.worker.batch import (
    BatchArrays,
    BatchShapes,
    PreviousSamples,
    batch_sampling,
    pack,
    planned_heads,
    query_block,
)
from pensieve_jax.worker.compilations import compile_together
from pensieve_jax.worker.sampling import SampleOutput, SamplingArrays
from pensieve_jax.worker.worker import Worker, build_worker

PAGE_TOKENS = 32
SWAP_OUT_PAGES = 8
"""Pages that each step of a swap-out case copies to the host."""
PIECES = 5
"""Pieces in which a prompt beside decoding rows is computed: so an engine cuts 2,000 tokens beside 64 rows
that takes 512 tokens in a step, as it does unless told otherwise."""
FILL_PAGES = 64
"""Pages that are copied at once to fill the host pool before a swap-in case."""
HITS = 8
"""Steps of one measurement with a past on the device."""
STEPS = 16
"""Steps of one measurement through the worker."""
GREEDY = SampleRequest(
    params=SamplingParams(temperature=0.0), num_generated=0, context_ids=np.zeros(0, np.int32)
)

type StepArrays = tuple[BatchArrays, SamplingArrays]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One measured case.

    Attributes:
        case: as it ran, scaled for a small model.
        seconds: all its steps.
        floor: the least time of the compute.
        beside_s: what the case is compared with: by the name of the comparison, seconds.
        dispatch_s: the host's share, hidden behind the device's work as long as it is shorter.
        first_call_s: the first run, with whatever is left to compile.
        moved_bytes: what is copied between host and device in that time.
        peak_bytes: of the device's memory so far; None where the device doesn't tell.
    """

    case: Case
    seconds: float
    floor: Floor
    beside_s: dict[str, float]
    dispatch_s: float | None = None
    first_call_s: float
    moved_bytes: int = 0
    peak_bytes: int | None

    @property
    def tokens_per_s(self) -> float:
        """Query tokens a second."""
        return self.case.tokens / self.seconds


class StepBench:
    """A worker with random weights and a device pool of random KV."""

    def __init__(
        self,
        preset: Preset,
        cases: Sequence[Case],
        *,
        num_shards: int,
        step_tokens: int,
        kv_dtype: KvDtype | None = None,
        programs: Path | None = None,
    ) -> None:
        """Measure the ceilings, make the model and both pools.

        Args:
            preset: the model.
            cases: what will be measured: it sizes the pools.
            num_shards: devices to spread over.
            step_tokens: query tokens of a step at most; longer cases run in several.
            kv_dtype: how keys and values are kept; None: in the model's dtype.
            programs: folder of compiled programs; None: keep none.

        Raises:
            InvalidArgumentError: the model doesn't divide over the devices, or there are fewer.
            TransferError: the host can't give the memory.
        """
        self.mesh = make_mesh(num_shards)
        self.device = self.mesh.devices.flat[0]
        self.step_tokens = max(1, step_tokens // preset.scale)
        self.ceilings: Ceilings = measure_ceilings(self.device, scale=preset.scale)
        self.cases = [case.scaled(preset.scale) for case in cases]
        model = random_model(preset.config, dtype=np.dtype(jnp.dtype(preset.dtype)), mesh=self.mesh)
        self.model_shape = shape_of(model, num_shards, kv_dtype=kv_dtype)
        self._head_parameters = num_parameters(model.head)
        self.spec = model.spec
        needed = [_pages(case.past_tokens + case.new_tokens) for case in self.cases]
        prompts = [_pages(case.prompt_tokens) for case in self.cases]
        swapped = [case.rows * _pages(case.past_tokens) for case in self.cases if case.kind is Kind.SWAP_IN]
        leaving = [SWAP_OUT_PAGES * STEPS for case in self.cases if case.kind in (Kind.SWAP_OUT, Kind.HIT)]
        self.shapes = BatchShapes(
            num_pages=max(
                case.rows * pages + prompt
                for case, pages, prompt in zip(self.cases, needed, prompts, strict=True)
            ),
            page_tokens=PAGE_TOKENS,
            max_rows=max(case.rows + (case.prompt_tokens > 0) for case in self.cases),
            max_tokens=max(min(case.tokens, self.step_tokens) + case.prompt_tokens for case in self.cases),
            max_pages=max(needed + prompts),
            planned_heads=planned_heads(model.spec, num_shards),
            block_q=query_block(model.spec),
            kv_dtype=kv_dtype,
        )
        self.worker = build_worker(
            model,
            shapes=self.shapes,
            # With room for the padding of a copy, which comes from the pool itself then.
            host_pages=max([0, *swapped, *leaving]) * 5 // 4,
            mesh=self.mesh,
            execution="resident",
            check_host_memory=False,
            checksums=False,
            transfer_faults=None,
            programs=programs,
        )
        self.runner = self.worker.runner
        self.runner.fill(np.arange(self.shapes.num_pages, dtype=np.int32), self._random_page())
        self._order = np.random.default_rng(0).permutation(self.shapes.num_pages).astype(np.int32)

    def compile(self) -> Iterator[None]:
        """Compile the steps that run without a worker, several at once; yields once for each shape."""
        shapes = {}
        for case in self.cases:
            for rows in [*self._split(case)[:1], *self._mixed_rows(case)]:
                batch = self._arrays(rows)[0]
                shapes[str(jax.tree.map(jnp.shape, batch))] = batch
        with self.runner.filling():
            yield from compile_together(
                [self.runner.calls(batch, layered=False) for batch in shapes.values()]
            )

    def measure(self, case: Case) -> StepTime:
        """Time one of `cases`."""
        run = {
            Kind.STEP: self._measure_steps,
            Kind.HIT: self._measure_hit,
            Kind.SWAP_IN: self._measure_swap_in,
            Kind.SWAP_OUT: self._measure_swap_out,
            Kind.MIXED: self._measure_mixed,
            Kind.HOST: self._measure_host,
        }[case.kind]
        return run(case)

    def run(self, steps: Sequence[StepArrays]) -> SampleOutput:
        """Run steps one after the other. Doesn't wait."""
        return [self.runner.run_resident(batch, sampling) for batch, sampling in steps][-1]

    def once(self, case: Case) -> None:
        """Run a case's steps once and wait; for a trace. A swap-in case has to be measured before."""
        if case.kind is Kind.SWAP_IN:
            self._finish(self._swap_in_plans(case)["step"])
        elif case.kind is Kind.MIXED:
            jax.block_until_ready(self.run([self._arrays(rows) for rows in self._mixed_rows(case)]))
        elif case.kind in (Kind.STEP, Kind.HIT):
            jax.block_until_ready(self.run(self.steps(case)))
        else:
            self._run_ahead(self._worker_plans(case))

    def steps(self, case: Case) -> list[StepArrays]:
        """The arguments of the case's steps, on the device: rows whole while they fit, else in pieces."""
        return [self._arrays(rows) for rows in self._split(case)]

    def close(self) -> None:
        """Give the host pool's memory back."""
        self.worker.close()

    def _random_page(self) -> jax.Array:
        page = self.runner.page
        tokens = (PAGE_TOKENS, self.spec.num_kv_heads, self.spec.head_dim)
        k, v = jax.random.normal(jax.random.key(1), (2, *tokens), jnp.dtype(self.spec.dtype))
        slots = np.arange(PAGE_TOKENS, dtype=np.int32)
        return kv_write(jnp.zeros((1, *page.shape), page.dtype), k, v, np.zeros_like(slots), slots)[0]

    def _measure_steps(self, case: Case) -> StepTime:
        steps = self.steps(case)
        begin = time.perf_counter()
        jax.block_until_ready(self.run(steps))
        first_call_s = time.perf_counter() - begin
        dispatches = []

        def run() -> SampleOutput:
            begin = time.perf_counter()
            output = self.run(steps)
            dispatches.append(time.perf_counter() - begin)
            return output

        few, many = (4, STEPS) if case.is_decode else (1, 4)
        seconds = seconds_each(run, repeats=3, few=few, many=many, wait=jax.block_until_ready)
        return self._result(case, seconds, {}, first_call_s, dispatch_s=min(dispatches))

    def _measure_hit(self, case: Case) -> StepTime:
        plans = [StepPlan(rows=tuple(self._split(case)[0]), swap_outs=(), swap_ins=())] * HITS
        without_tier = Worker(self.runner, None, self.shapes, "resident")
        begin = time.perf_counter()
        self._run_ahead(plans)
        first_call_s = time.perf_counter() - begin
        with_s = _median_s(partial(self._run_ahead, plans)) / HITS
        without_s = _median_s(partial(self._run_ahead, plans, without_tier)) / HITS
        return self._result(case, with_s, {"without host tier": without_s}, first_call_s)

    def _measure_mixed(self, case: Case) -> StepTime:
        decode = self._split(case)[0]
        rows = self._mixed_rows(case)
        mixed = [self._arrays(step) for step in rows]
        begin = time.perf_counter()
        jax.block_until_ready(self.run(mixed))
        first_call_s = time.perf_counter() - begin
        decode_s = self._seconds([self._arrays(decode)])
        alone_s = len(rows) * decode_s + self._seconds([self._arrays(step[-1:]) for step in rows])
        longest_s = max(self._seconds([step]) for step in mixed)
        beside = {"parts alone": alone_s, "longest step": longest_s, "decode step": decode_s}
        return self._result(case, self._seconds(mixed), beside, first_call_s)

    def _mixed_rows(self, case: Case) -> list[list[Row]]:
        """Steps of the decoding rows, each with a piece of the prompt; none where there is no prompt."""
        if not case.prompt_tokens:
            return []
        rows, first_page = self._split(case)[0], case.rows * _pages(case.past_tokens + case.new_tokens)
        prompt_pages = self._order[first_page : first_page + _pages(case.prompt_tokens)]
        bounds = np.linspace(0, case.prompt_tokens, PIECES + 1).astype(int).tolist()
        return [
            [
                *rows,
                Row(
                    request_id=case.rows,
                    token_ids=np.arange(start, stop, dtype=np.int32) % self.spec.vocab_size,
                    start=start,
                    page_ids=prompt_pages[: _pages(stop)],
                    sample=GREEDY if stop == case.prompt_tokens else None,
                ),
            ]
            for start, stop in itertools.pairwise(bounds)
        ]

    def _seconds(self, steps: Sequence[StepArrays]) -> float:
        return seconds_each(partial(self.run, steps), repeats=3, few=2, many=8, wait=jax.block_until_ready)

    def _measure_swap_in(self, case: Case) -> StepTime:
        plans = self._swap_in_plans(case)
        swap_ins = plans["step"].swap_ins
        for some in itertools.batched(swap_ins, FILL_PAGES):
            self._finish(StepPlan(rows=(), swap_outs=some, swap_ins=()))
        begin = time.perf_counter()
        for plan in plans.values():
            self._finish(plan)
        first_call_s = time.perf_counter() - begin
        times = {name: _median_s(partial(self._finish, plan)) for name, plan in plans.items()}
        moved = len(swap_ins) * self.model_shape.kv_page_bytes(PAGE_TOKENS)
        return self._result(case, times.pop("step"), times, first_call_s, moved_bytes=moved)

    def _swap_in_plans(self, case: Case) -> dict[str, StepPlan]:
        rows = tuple(self._split(case)[0])
        copies = [page for row in rows for page in row.page_ids[: _pages(case.past_tokens)].tolist()]
        swap_ins = tuple(PageCopy(page, host_page) for host_page, page in enumerate(copies))
        return {
            "step": StepPlan(rows=rows, swap_outs=(), swap_ins=swap_ins),
            "compute alone": StepPlan(rows=rows, swap_outs=(), swap_ins=()),
            "transfer alone": StepPlan(rows=(), swap_outs=(), swap_ins=swap_ins),
        }

    def _measure_swap_out(self, case: Case) -> StepTime:
        leaving = self._worker_plans(case)
        plain = [replace(plan, swap_outs=()) for plan in leaving]
        begin = time.perf_counter()
        self._run_ahead(leaving)
        first_call_s = time.perf_counter() - begin
        without = _median_s(partial(self._run_ahead, plain)) / STEPS
        seconds = _median_s(partial(self._run_ahead, leaving)) / STEPS
        moved = len(leaving[0].swap_outs) * self.model_shape.kv_page_bytes(PAGE_TOKENS)
        return self._result(case, seconds, {"without": without}, first_call_s, moved_bytes=moved)

    def _measure_host(self, case: Case) -> StepTime:
        plans = self._worker_plans(case)
        begin = time.perf_counter()
        self._run_ahead(plans)
        first_call_s = time.perf_counter() - begin
        few, many = plans[: STEPS // 4], plans
        some_s, all_s = (_median_s(partial(self._run_ahead, some)) for some in (few, many))
        alone = self._measure_steps(case).seconds
        seconds = one_more_s(len(few), some_s, len(many), all_s)
        return self._result(case, seconds, {"device alone": alone}, first_call_s)

    def _worker_plans(self, case: Case) -> list[StepPlan]:
        """Steps in a row, as the engine hands them over."""
        rows = tuple(self._split(case)[0])
        count = min(SWAP_OUT_PAGES, self.shapes.num_pages) if case.kind is Kind.SWAP_OUT else 0
        pages = np.resize(self._order, STEPS * count).tolist()
        copies = [PageCopy(page, host_page) for host_page, page in enumerate(pages)]
        return [
            StepPlan(rows=rows, swap_outs=tuple(copies[step * count : (step + 1) * count]), swap_ins=())
            for step in range(STEPS)
        ]

    def _result(
        self,
        case: Case,
        seconds: float,
        beside_s: dict[str, float],
        first_call_s: float,
        *,
        dispatch_s: float | None = None,
        moved_bytes: int = 0,
    ) -> StepTime:
        stats = self.device.memory_stats() or {}
        return StepTime(
            case=case,
            seconds=seconds,
            floor=step_floor(case, self.model_shape, self._head_parameters, self.ceilings),
            beside_s=beside_s,
            first_call_s=first_call_s,
            peak_bytes=stats.get("peak_bytes_in_use"),
            dispatch_s=dispatch_s,
            moved_bytes=moved_bytes,
        )

    def _finish(self, plan: StepPlan) -> None:
        """Run a plan and wait until the device is done with it."""
        self.worker.dispatch(plan).result()
        jax.block_until_ready(self.runner.gather(np.zeros(1, np.int32)))

    def _run_ahead(self, plans: Sequence[StepPlan], worker: Worker | None = None) -> None:
        """Run plans as the engine does: the next is handed over before the result of one is taken."""
        pending = None
        for plan in plans:
            following = (worker or self.worker).dispatch(plan)
            if pending is not None:
                pending.result()
            pending = following
        if pending is not None:
            pending.result()

    def _split(self, case: Case) -> list[list[Row]]:
        """Rows of each step, at most `step_tokens` tokens."""
        pages = _pages(case.past_tokens + case.new_tokens)
        rng = np.random.default_rng(len(case.name))
        steps: list[list[Row]] = [[]]
        room = self.step_tokens
        for i in range(case.rows):
            start, stop = case.past_tokens, case.past_tokens + case.new_tokens
            while start < stop:
                if room == 0:
                    steps.append([])
                    room = self.step_tokens
                count = min(room, stop - start)
                row = Row(
                    request_id=i,
                    token_ids=rng.integers(0, self.spec.vocab_size, count).astype(np.int32),
                    start=start,
                    page_ids=self._order[i * pages : i * pages + _pages(start + count)],
                    sample=GREEDY if start + count == stop else None,
                )
                steps[-1].append(row)
                start, room = start + count, room - count
        return steps

    def _arrays(self, rows: Sequence[Row]) -> StepArrays:
        nothing = PreviousSamples(token_ids=np.zeros(self.shapes.max_samples, np.int32), places={})
        batch, samples = pack(rows, self.shapes, nothing)
        requests = [request for _, request in samples]
        sampling = batch_sampling(batch, requests, vocab_size=self.spec.vocab_size)
        put = partial(jax.device_put, device=NamedSharding(self.mesh, P()))
        return jax.tree.map(put, batch), jax.tree.map(put, sampling)


def _median_s(run: Callable[[], None], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
