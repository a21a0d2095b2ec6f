"""Executes step plans: the only part that touches the device."""

import time
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer import PageMover, PinnedPool
from pensieve_jax.core.plans import StepPlan, StepResult
from pensieve_jax.core.types import SampledToken
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.worker.batch import BatchShapes, bucket, pack
from pensieve_jax.worker.runner import KV_SPEC, ModelRunner
from pensieve_jax.worker.sampling import sampling_arrays, to_sampled_tokens

type Execution = Literal["auto", "layered", "resident"]
"""How a step without swap-ins runs: layer by layer, in one call, or the better for the platform: one call on
a GPU; layer by layer on a CPU, where a layer takes longer than its dispatch and one layer compiles faster."""


class Worker:
    """Owns the device pool through its runner, and the copies between the tiers."""

    def __init__(
        self, runner: ModelRunner, mover: PageMover | None, shapes: BatchShapes, execution: Execution
    ) -> None:
        """Args:
        runner: holds weights and device pool.
        mover: copies to and from the host tier; None without one.
        shapes: limits of a batch.
        execution: how steps without swap-ins run.
        """
        self._runner = runner
        self._mover = mover
        self._shapes = shapes
        on_cpu = runner.mesh.devices.flat[0].platform == "cpu"
        self._layered = execution == "layered" or (execution == "auto" and on_cpu)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens.

        The order on the device: swap-outs read their pages; then, layer by layer, swap-ins are written
        and the layer runs. A plan without rows only moves pages; one without swap-ins either waits for all
        copies to the host.

        Raises:
            Exception: whatever the device raised; the pool is lost then and `reset` has to be called.
        """
        if plan.swap_outs:
            assert self._mover is not None, "swap-outs need a host tier"
            staged = self._runner.gather(self._pad_pages([copy.device_page for copy in plan.swap_outs]))
            self._mover.swap_out(plan.swap_outs, staged)
        samples: dict[int, SampledToken] = {}
        wait_s = 0.0
        failed_swap_ins: tuple[PageCopy, ...] = ()
        try:
            if plan.rows:
                samples, wait_s = self._compute(plan)
            elif plan.swap_ins:
                self._load(plan.swap_ins)
        except TransferError:
            failed_swap_ins = plan.swap_ins
        idle = not plan.rows and not plan.swap_ins
        done, failed = self._mover.ended(wait=idle) if self._mover else ((), ())
        return StepResult(
            samples=samples,
            finished_swap_outs=done,
            failed_swap_outs=failed,
            failed_swap_ins=failed_swap_ins,
            swap_in_wait_s=wait_s,
        )

    def reset(self) -> None:
        """Start over with an empty pool, after `execute` has raised. Copies under way come to nothing."""
        if self._mover is not None:
            self._mover.ended(wait=True)
        self._runner.reset_pool()

    def set_weights(self, model: ServableModel) -> None:
        """Use other weights of the same structure from the next step on. What both tiers hold is stale then.

        Raises:
            InvalidArgumentError: the model has other dimensions.
        """
        self._runner.set_weights(model)

    def close(self) -> None:
        """Wait for copies under way and give pinned memory back."""
        if self._mover is not None:
            self._mover.ended(wait=True)
            self._mover.close()

    def poison(self, pages: Sequence[int]) -> None:
        """Fill device pages with NaN: whoever reads them from now on gives himself away."""
        if pages:
            self._runner.fill(self._pad_pages(pages), float("nan"))

    def _compute(self, plan: StepPlan) -> tuple[dict[int, SampledToken], float]:
        batch, samples = pack(plan.rows, self._shapes)
        requests = [request for _, request in samples]
        sampling = sampling_arrays(
            requests, padded_rows=len(batch.sample_tokens), vocab_size=self._runner.spec.vocab_size
        )
        wait_s = 0.0
        if plan.swap_ins or self._layered:
            host_pages = np.array([copy.host_page for copy in plan.swap_ins], np.int64)
            pages = self._pad_pages([copy.device_page for copy in plan.swap_ins])

            def stage_in(layer: int) -> jax.Array:
                nonlocal wait_s
                assert self._mover is not None, "swap-ins need a host tier"
                begin = time.perf_counter()
                staged = self._mover.stage_in(layer, host_pages, len(pages))
                wait_s += time.perf_counter() - begin
                return staged

            output = self._runner.run_layered(batch, sampling, stage_in if plan.swap_ins else None, pages)
        else:
            output = self._runner.run_resident(batch, sampling)
        tokens = to_sampled_tokens(output, requests)
        return {request_id: token for (request_id, _), token in zip(samples, tokens, strict=True)}, wait_s

    def _load(self, copies: Sequence[PageCopy]) -> None:
        """Copy host pages to the device, and nothing else."""
        mover = self._mover
        assert mover is not None, "swap-ins need a host tier"
        host_pages = np.array([copy.host_page for copy in copies], np.int64)
        pages = self._pad_pages([copy.device_page for copy in copies])
        self._runner.load(lambda layer: mover.stage_in(layer, host_pages, len(pages)), pages)

    def _pad_pages(self, pages: Sequence[int]) -> np.ndarray:
        """i32[power of two]: the pages, then the pool's size, which means nowhere."""
        padded = np.full(bucket(len(pages)), self._shapes.num_pages, np.int32)
        padded[: len(pages)] = pages
        return padded


def build_worker(
    model: ServableModel,
    *,
    shapes: BatchShapes,
    host_pages: int,
    mesh: Mesh,
    execution: Execution,
    check_host_memory: bool,
) -> Worker:
    """Allocate both tiers' memory and build the worker that owns it.

    Args:
        model: what to run.
        shapes: sizes of the device pool and limits of a batch.
        host_pages: pages of the host tier; 0 for none.
        mesh: the devices to spread over.
        execution: how steps without swap-ins run.
        check_host_memory: refuse a host tier larger than the memory that is available.

    Raises:
        InvalidArgumentError: the model doesn't divide over the mesh.
        TransferError: the host can't give the memory.
    """
    spec = model.spec
    runner = ModelRunner(model, num_pages=shapes.num_pages, page_tokens=shapes.page_tokens, mesh=mesh)
    mover = None
    if host_pages:
        pool = PinnedPool(
            num_layers=spec.num_layers,
            num_pages=host_pages,
            page_shape=(2, spec.num_kv_heads // mesh.devices.size, shapes.page_tokens, spec.head_dim),
            dtype=spec.dtype,
            devices=list(mesh.devices.flat),
            check_memory=check_host_memory,
        )
        mover = PageMover(pool, NamedSharding(mesh, KV_SPEC))
    return Worker(runner, mover, shapes, execution)
