"""Times steps and copies as the worker runs them, without what the host does for a step meanwhile."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer import MOST_STORES, PageMover
from pensieve_jax.core.plans import Row
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, batch_sampling, pack
from pensieve_jax.worker.host_pool import host_pool
from pensieve_jax.worker.runner import ModelRunner
from pensieve_jax.worker.step_functions import KV_SPEC

LEAST_S = 0.05
"""Steps are dispatched one after the other for at least this long, so that the host's work hides."""

type Dispatch = Callable[[], Any]
"""Starts something on the device and returns arrays to wait for."""


class StepTimer:
    """A model with a pool of its own, whose steps are timed."""

    def __init__(self, model: ServableModel, *, shapes: BatchShapes, mesh: Mesh, layered: bool) -> None:
        """Args:
        model: what is timed.
        shapes: size of the pool and limits of a batch.
        mesh: the devices to spread over.
        layered: run layer by layer, as the worker does on a CPU, not in one call.

        Raises:
            InvalidArgumentError: the model doesn't divide over the mesh.
        """
        self._runner = ModelRunner(
            model,
            num_pages=shapes.num_pages,
            page_tokens=shapes.page_tokens,
            mesh=mesh,
            kv_dtype=shapes.kv_dtype,
        )
        self._shapes = shapes
        self._layered = layered
        self._on_cpu = mesh.devices.flat[0].platform == "cpu"

    def step(self, rows: Sequence[Row]) -> Dispatch:
        """A step with these rows, its arrays on the device, to be dispatched any number of times."""
        everywhere = NamedSharding(self._runner.mesh, P())
        nothing = jax.device_put(np.zeros(self._shapes.max_samples, np.int32), everywhere)
        batch, samples = pack(rows, self._shapes, PreviousSamples(token_ids=nothing, places={}))
        requests = [request for _, request in samples]
        sampling = batch_sampling(batch, requests, vocab_size=self._runner.spec.vocab_size)
        batch = jax.device_put(batch, everywhere)
        nowhere = np.full(1, self._shapes.num_pages, np.int32)

        def dispatch() -> Any:
            if self._layered:
                return self._runner.run_layered(batch, sampling, None, nowhere)
            return self._runner.run_resident(batch, sampling)

        # Several CPU devices hang if more than one step is under way: each step's threads wait for others.
        return (lambda: jax.block_until_ready(dispatch())) if self._on_cpu else dispatch

    def link_rates(self, num_pages: int, rounds: int) -> tuple[float, float]:
        """How fast pages move, copied as steps copy them: through staging memory, all layers of a page.

        Args:
            num_pages: pages that are copied at once, at most the pool's.
            rounds: measurements of which the median is taken.

        Returns:
            bytes per second to each device, and from each device.

        Raises:
            TransferError: the host can't give the memory.
        """
        runner, spec, mesh = self._runner, self._runner.spec, self._runner.mesh
        page_tokens, kv_dtype = self._shapes.page_tokens, self._shapes.kv_dtype
        pool = host_pool(spec, num_pages=num_pages, page_tokens=page_tokens, mesh=mesh, kv_dtype=kv_dtype)
        mover = PageMover(pool, NamedSharding(mesh, KV_SPEC))
        pages = np.arange(num_pages, dtype=np.int32)
        plan = tuple(PageCopy(device_page=int(page), host_page=int(page)) for page in pages)
        num_bytes = sum(shards[0].nbytes for shards in pool.layers)

        def load() -> list[jax.Array]:
            return [mover.stage_in(layer, pages, num_pages) for layer in range(spec.num_layers)]

        def store() -> tuple[()]:
            for _ in range(MOST_STORES):  # one alone waits for a single thread of the host
                mover.swap_out(plan, runner.gather(pages))
            _, failed = mover.ended(wait=True)
            if failed:
                raise TransferError(f"{len(failed)} of {num_pages} pages could not be copied to the host")
            return ()

        def rate(copy: Dispatch, num_bytes: int) -> float:
            count = repeats(copy)
            return num_bytes / float(np.median([seconds(copy, count) for _ in range(rounds)]))

        try:
            return rate(load, num_bytes), rate(store, MOST_STORES * num_bytes)
        finally:
            mover.close()


def repeats(dispatch: Dispatch) -> int:
    """How often to dispatch for a measurement of `LEAST_S`. Compiles and warms up."""
    jax.block_until_ready(dispatch())
    return max(1, round(LEAST_S / max(seconds(dispatch, 1), 1e-6)))


def seconds(dispatch: Dispatch, count: int) -> float:
    """Seconds of one of `count` dispatches, one behind the other, all of them waited for."""
    begin = time.perf_counter()
    done: Any = ()
    for _ in range(count):
        done = dispatch()
    jax.block_until_ready(done)
    return (time.perf_counter() - begin) / count
