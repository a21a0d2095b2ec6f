"""Executes step plans: the only part that touches the device."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_cache.config import TransferFaults
from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer import (
    MOST_STORES,
    ChecksumCounters,
    FaultCounters,
    FaultyMover,
    Mover,
    PageChecksums,
    PageMover,
    kernels_read_pinned,
)
from pallas_kernels.dispatch import runs_here
from pallas_kernels.page_move import address_halves
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import SampleRequest, StepPlan, StepResult, StepStart
from pensieve_jax.core.types import SampledToken
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.parallel import TENSOR_AXIS
from pensieve_jax.worker.arrivals import Arrivals
from pensieve_jax.worker.batch import (
    BatchArrays,
    BatchShapes,
    PreviousSamples,
    batch_sampling,
    blank,
    pack,
    padded,
)
from pensieve_jax.worker.compilations import compile_together
from pensieve_jax.worker.host_pool import host_pool
from pensieve_jax.worker.programs import Call
from pensieve_jax.worker.runner import ModelRunner
from pensieve_jax.worker.sampling import SampleOutput, SamplingArrays, to_sampled_tokens
from pensieve_jax.worker.step_functions import KV_SPEC

COPIED_AT_ONCE = 64
"""Pages that are gathered at once for the host: on their way they take device memory a second time."""

MOST_GATHERED = (MOST_STORES + 1) * COPIED_AT_ONCE
"""Pages that copies to the host may hold a second time, at most."""

READ_BYTES, SCATTERED_BYTES = 256 << 20, 4 << 30
"""Bytes of KV, on each device, up to which the device itself reads a step's pages from host memory, before
the step: of pages in one run, and of scattered ones. It takes 5 ms for 256 MB. Copies layer by layer are
meant to hide behind the step, but however little comes, the host takes 10 ms and more for such a step, as
long as a decode step; and scattered pages have to be collected first, at a seventh of the link's rate."""
READ_SIZES = (32, 512)
"""Pages of one such call: fewer cost a larger call next to nothing, so that few shapes are enough."""

type Execution = Literal["auto", "layered", "resident"]
"""How a step without swap-ins runs: layer by layer, in one call, or the better for the platform: one call on
a GPU; layer by layer on a CPU, where a layer takes longer than its dispatch and one layer compiles faster."""


class PendingStep:
    """A step that was handed to the device."""

    def __init__(
        self,
        start: StepStart,
        mover: Mover | None,
        output: SampleOutput | None = None,
        samples: Sequence[tuple[int, SampleRequest]] = (),
        *,
        wait_for_copies: bool = False,
    ) -> None:
        """Args:
        start: what is known at once.
        mover: copies to the host that have ended are taken from it; None without a host tier.
        output: the tokens, on their way; None: the step computes nothing.
        samples: request id and how to choose, for each of them.
        wait_for_copies: whether the result waits for all copies to the host.
        """
        self.start = start
        self._mover = mover
        self._output = output
        self._samples = samples
        self._wait_for_copies = wait_for_copies
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the step's tokens. To be called once, and in the order of the steps.

        Raises:
            Exception: whatever the device raised; the pool is lost then and `Worker.reset` has to be called.
        """
        tokens: Sequence[SampledToken] = ()
        unsound: frozenset[int] = frozenset()
        if self._output is not None:
            tokens = to_sampled_tokens(self._output, [request for _, request in self._samples])
            sound = np.asarray(self._output.sound)[: len(tokens)]
            if not sound.all():
                unsound = frozenset(self._samples[row][0] for row in np.flatnonzero(~sound).tolist())
        done, failed = self._mover.ended(wait=self._wait_for_copies) if self._mover else ((), ())
        return StepResult(
            samples={request_id: token for (request_id, _), token in zip(self._samples, tokens, strict=True)},
            finished_swap_outs=done,
            failed_swap_outs=failed,
            unsound=unsound,
        )


class Worker:
    """Owns the device pool through its runner, and the copies between the tiers."""

    def __init__(
        self,
        runner: ModelRunner,
        mover: Mover | None,
        shapes: BatchShapes,
        execution: Execution,
        *,
        reads: bool = False,
    ) -> None:
        """Args:
        runner: holds weights and device pool.
        mover: copies to and from the host tier; None without one.
        shapes: limits of a batch.
        execution: how steps without swap-ins run.
        reads: whether the device itself can read host pages.
        """
        self._runner = runner
        self._mover = mover
        self._shapes = shapes
        self._addresses: jax.Array | None = None
        self.pages_read = 0
        """Pages that the device itself has read from host memory."""
        if mover is not None and reads:
            halves = [
                address_halves([shards[shard].ctypes.data for shards in mover.pool.layers])
                for shard in range(runner.mesh.size)
            ]
            by_shard = NamedSharding(runner.mesh, PartitionSpec(TENSOR_AXIS))
            self._addresses = jax.device_put(np.concatenate(halves), by_shard)
        on_cpu = runner.mesh.devices.flat[0].platform == "cpu"
        self._layered = execution == "layered" or (execution == "auto" and on_cpu)
        self._loading = None if on_cpu or mover is None else ThreadPoolExecutor(1, "pensieve-load")
        self._previous = self._nothing_chosen()

    @property
    def runner(self) -> ModelRunner:
        """What holds weights and device pool; for measurements."""
        return self._runner

    def dispatch(self, plan: StepPlan) -> PendingStep:
        """Hand a step to the device, without waiting for its tokens. Steps run one after the other.

        The order on the device: swap-outs read their pages; then, layer by layer, swap-ins are written
        and the layer runs. A plan without rows only moves pages; the result of one without swap-ins either
        waits for all copies to the host.

        Raises:
            Exception: whatever the device raised; the pool is lost then and `reset` has to be called.
        """
        if plan.swap_outs:
            assert self._mover is not None, "swap-outs need a host tier"
            by_host_page = sorted(plan.swap_outs, key=lambda copy: copy.host_page)
            for copies in itertools.batched(by_host_page, COPIED_AT_ONCE):
                staged = self._runner.gather(self._pad_pages([copy.device_page for copy in copies]))
                self._mover.swap_out(copies, staged)
        refused = self._mover.refused(plan.swap_ins) if self._mover else ()
        try:
            if refused:  # no row can run; what can be loaded is there for the next step
                self._load([copy for copy in plan.swap_ins if copy not in refused])
                return PendingStep(StepStart(failed_swap_ins=refused), self._mover)
            if plan.rows:
                return self._compute(plan)
            if plan.swap_ins:
                self._load(plan.swap_ins)
        except TransferError:
            return PendingStep(StepStart(failed_swap_ins=plan.swap_ins), self._mover)
        return PendingStep(StepStart(), self._mover, wait_for_copies=not plan.swap_ins)

    @property
    def checksum_counters(self) -> ChecksumCounters:
        """What the host pages' checksums have shown."""
        checksums = self._mover.checksums if self._mover else None
        return replace(checksums.counters) if checksums else ChecksumCounters()

    @property
    def fault_counters(self) -> FaultCounters:
        """What was made to go wrong."""
        return replace(self._mover.counters) if isinstance(self._mover, FaultyMover) else FaultCounters()

    def reset(self) -> None:
        """Start over with an empty pool, after a step has raised. What is under way comes to nothing."""
        if self._mover is not None:
            self._mover.ended(wait=True)
        self._previous = self._nothing_chosen()
        self._runner.reset_pool()

    def set_weights(self, model: ServableModel) -> None:
        """Use other weights of the same structure from the next step on. What both tiers hold is stale then.

        Raises:
            InvalidArgumentError: the model has other dimensions.
        """
        self._runner.set_weights(model)

    def close(self) -> None:
        """Wait for copies under way and give pinned memory back."""
        if self._loading is not None:
            self._loading.shutdown()
        if self._mover is not None:
            self._mover.ended(wait=True)
            with suppress(RuntimeError):  # a lost device, or a pool that was given away, reads nothing more
                self._runner.wait()
            self._mover.close()

    def copy_page(self, source: int, target: int) -> None:
        """Copy a device page to another in all layers, behind the steps that were dispatched.

        Raises:
            Exception: whatever the device raised; the pool is lost then and `reset` has to be called.
        """
        self._runner.copy_page(np.int32(source), np.int32(target))

    def poison(self, pages: Sequence[int]) -> None:
        """Fill device pages with NaN: whoever reads them from now on gives himself away."""
        if pages:
            self._runner.poison(self._pad_pages(pages))

    def compile(
        self,
        choices: Sequence[SampleRequest],
        *,
        max_turns: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile and run every padded shape, so that no step waits for the compiler. Changes nothing.

        Args:
            choices: ways of choosing tokens.
            max_turns: turns that run at once at most; None: as many as a step has rows.
            progress: called with (shapes done, shapes in all).

        Raises:
            Exception: whatever the device raised; `reset` has to be called then.
        """
        shapes = self._shapes
        last = padded(min(max_turns or shapes.max_rows, shapes.max_rows), shapes.decode_sizes)
        decode_sizes = [size for size in shapes.decode_sizes if size <= last]
        if shapes.batch_invariant:
            decode_sizes = shapes.prefill_sizes
        sizes = [(size, True) for size in decode_sizes] + [(size, False) for size in shapes.prefill_sizes]
        batches = [blank(size, shapes, self._previous, decode=decode) for size, decode in sizes]
        copies = [] if self._mover is None else shapes.page_sizes
        total = len(batches) + len(copies) + 1
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        report(0)
        with self._runner.filling():
            for _ in compile_together([self._calls(batch) for batch in batches]):
                report(1)
            first_prefill = len(decode_sizes)  # as many tokens are chosen, whatever the size
            for i, batch in enumerate(batches):
                self._run_blank(batch, choices if i <= first_prefill else choices[:1])
            self.copy_page(0, 0)
            report(1)
            for size in copies:
                self._compile_copies(size)
                report(1)
        if self._addresses is not None:
            # These programs depend on the size of the host tier: JAX's own cache keeps them.
            for count in READ_SIZES:
                self._read(np.zeros(count, np.int64), np.full(count, self._shapes.num_pages, np.int32))

    def _calls(self, batch: BatchArrays) -> list[Call]:
        ways = [self._layered] if self._mover is None or self._layered else [False, True]
        return [call for layered in ways for call in self._runner.calls(batch, layered=layered)]

    def _run_blank(self, batch: BatchArrays, choices: Sequence[SampleRequest]) -> None:
        nowhere = self._pad_pages(())
        for choice in choices:
            sampling = self._sampling(batch, [choice])
            if not self._layered:
                self._runner.run_resident(batch, sampling)
            if self._layered or self._mover is not None:
                self._runner.run_layered(batch, sampling, None, nowhere)

    def _compile_copies(self, num_pages: int) -> None:
        nowhere = np.full(num_pages, self._shapes.num_pages, np.int32)
        assert self._mover is not None
        if num_pages <= COPIED_AT_ONCE:  # as many as will be under way: the memory on their way is kept
            for _ in range(MOST_STORES):
                self._mover.swap_out((), self._runner.gather(nowhere))
            self._mover.ended(wait=True)
        staged = self._mover.stage_in(0, np.zeros(0, np.int64), num_pages)
        self._runner.scatter(0, staged, nowhere)

    def _sampling(self, batch: BatchArrays, requests: Sequence[SampleRequest]) -> SamplingArrays:
        return batch_sampling(batch, requests, vocab_size=self._runner.spec.vocab_size)

    def _compute(self, plan: StepPlan) -> PendingStep:
        batch, samples = pack(plan.rows, self._shapes, self._previous)
        sampling = self._sampling(batch, [request for _, request in samples])
        wait_s = 0.0
        host_pages, pages = self._in_runs(plan.swap_ins)
        if plan.swap_ins and not self._reads(host_pages):
            with self._arrivals(host_pages, pages) as arrivals:
                output = self._runner.run_layered(batch, sampling, arrivals, pages)
            wait_s = arrivals.wait_s
        else:
            if plan.swap_ins:
                self._read(host_pages, pages)
            if self._layered:
                output = self._runner.run_layered(batch, sampling, None, pages)
            else:
                output = self._runner.run_resident(batch, sampling)
        assert output.for_next_step is not None
        places = {request_id: place for place, (request_id, _) in enumerate(samples)}
        self._previous = PreviousSamples(token_ids=output.for_next_step, places=places)
        output = replace(output, for_next_step=None)
        return PendingStep(StepStart(swap_in_wait_s=wait_s), self._mover, output, samples)

    def _nothing_chosen(self) -> PreviousSamples:
        # Placed as a step's output is, which spares compiling for another placement.
        everywhere = NamedSharding(self._runner.mesh, PartitionSpec())
        token_ids = jax.device_put(np.zeros(self._shapes.max_samples, np.int32), everywhere)
        return PreviousSamples(token_ids=token_ids, places={})

    def _load(self, copies: Sequence[PageCopy]) -> None:
        """Copy host pages to the device, and nothing else."""
        if not copies:
            return
        host_pages, pages = self._in_runs(copies)
        if self._reads(host_pages):
            self._read(host_pages, pages)
            return
        with self._arrivals(host_pages, pages) as arrivals:
            self._runner.load(arrivals, pages)

    def _arrivals(self, host_pages: np.ndarray, pages: np.ndarray) -> Arrivals:
        mover = self._mover
        assert mover is not None, "swap-ins need a host tier"
        num_layers = self._runner.spec.num_layers
        return Arrivals(
            lambda layer: mover.stage_in(layer, host_pages, len(pages)), num_layers, self._loading
        )

    def _reads(self, host_pages: np.ndarray) -> bool:
        """Whether the device reads these pages, in ascending order, by itself."""
        if self._addresses is None or self._mover is None:
            return False
        in_one_run = host_pages[-1] - host_pages[0] + 1 == len(host_pages)
        most = READ_BYTES if in_one_run else SCATTERED_BYTES
        return len(host_pages) * self._mover.pool.page_bytes <= most

    def _read(self, host_pages: np.ndarray, pages: np.ndarray) -> None:
        """Let the device read host pages by itself. One that is freed meanwhile is written only behind this:
        what is written there comes from the device, which works in order."""
        assert self._mover is not None and self._addresses is not None, "there is a host tier to read"
        for some in itertools.batched(range(len(host_pages)), READ_SIZES[-1]):
            count = padded(len(some), READ_SIZES)
            sources, targets = np.zeros(count, np.int32), np.full(count, self._shapes.num_pages, np.int32)
            sources[: len(some)] = host_pages[some[0] : some[-1] + 1]
            targets[: len(some)] = pages[some[0] : some[-1] + 1]
            self._runner.read(self._addresses, targets, sources, num_host_pages=self._mover.pool.num_pages)
        self.pages_read += int(np.count_nonzero(pages < self._shapes.num_pages))

    def _in_runs(self, copies: Sequence[PageCopy]) -> tuple[np.ndarray, np.ndarray]:
        """Host pages in ascending order, and the padded device pages that go with them."""
        copies = sorted(copies, key=lambda copy: copy.host_page)
        host_pages = np.array([copy.host_page for copy in copies], np.int64)
        return host_pages, self._pad_pages([copy.device_page for copy in copies])

    def _pad_pages(self, pages: Sequence[int]) -> np.ndarray:
        """i32[one of `page_sizes`]: the pages, then the pool's size, which means nowhere."""
        array = np.full(padded(len(pages), self._shapes.page_sizes), self._shapes.num_pages, np.int32)
        array[: len(pages)] = pages
        return array


def workspace_bytes(
    model: ServableModel, *, shapes: BatchShapes, mesh: Mesh, programs: Path | None = None
) -> int:
    """Device memory that the largest step takes beside weights and pool, by the compiler's account.

    Args:
        model: its weights are where steps want them.
        shapes: limits of a batch.
        mesh: the devices to spread over.
        programs: folder of compiled programs; None: keep none.
    """
    runner = ModelRunner(
        model,
        num_pages=0,
        page_tokens=shapes.page_tokens,
        mesh=mesh,
        kv_dtype=shapes.kv_dtype,
        programs=programs,
    )
    nothing = PreviousSamples(token_ids=np.zeros(shapes.max_samples, np.int32), places={})
    largest = blank(shapes.prefill_sizes[-1], shapes, nothing, decode=False)
    return runner.memory(largest, num_pages=shapes.num_pages).workspace_bytes


def build_worker(
    model: ServableModel,
    *,
    shapes: BatchShapes,
    host_pages: int,
    mesh: Mesh,
    execution: Execution,
    check_host_memory: bool,
    checksums: bool,
    transfer_faults: TransferFaults | None,
    programs: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Worker:
    """Allocate both tiers' memory and build the worker that owns it.

    Args:
        model: what to run.
        shapes: sizes of the device pool and limits of a batch.
        host_pages: pages of the host tier; 0 for none.
        mesh: the devices to spread over.
        execution: how steps without swap-ins run.
        check_host_memory: refuse a host tier larger than the memory that is available.
        checksums: keep a checksum of every host page and load none whose bytes have changed.
        transfer_faults: make copies between the tiers go wrong; None: don't.
        programs: folder of compiled programs; None: keep none.
        progress: called with (bytes of host memory done, bytes in all).

    Raises:
        InvalidArgumentError: the model doesn't divide over the mesh, or the device can't give the memory.
        TransferError: the host can't give the memory.
    """
    try:
        runner = ModelRunner(
            model,
            num_pages=shapes.num_pages,
            page_tokens=shapes.page_tokens,
            mesh=mesh,
            kv_dtype=shapes.kv_dtype,
            programs=programs,
        )
    except jax.errors.JaxRuntimeError as error:
        raise InvalidArgumentError(
            f"device_pages: got {shapes.num_pages}, but the device refuses the memory: {error}"
        ) from error
    mover: Mover | None = None
    if host_pages:
        pool = host_pool(
            model.spec,
            num_pages=host_pages,
            page_tokens=shapes.page_tokens,
            mesh=mesh,
            kv_dtype=shapes.kv_dtype,
            check_memory=check_host_memory,
            progress=progress,
        )
        mover = PageMover(pool, NamedSharding(mesh, KV_SPEC), PageChecksums(pool) if checksums else None)
        if transfer_faults is not None:
            mover = FaultyMover(mover, transfer_faults)
    reads = transfer_faults is None and runs_here("triton") and kernels_read_pinned(mesh.devices.flat[0])
    return Worker(runner, mover, shapes, execution, reads=reads)
