"""Copies of pages between the pinned host pool and the device, layer by layer.

The device half (gathering pages from the pool and scattering them into it) belongs to the step, which owns
the pool; here only staged arrays of whole pages come and go.
"""

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer.checksums import PageChecksums
from host_cache.transfer.pinned_pool import PinnedPool, register_pinned, unregister_pinned

logger = logging.getLogger(__name__)
STAGING_SLOTS = 4
"""Staging buffers per shard: how many layers' swap-ins may be under way before the host waits."""


COPY_THREADS = 8
"""Threads beside a GPU that copy between staging memory and the pool: one is slower than the link."""
MOST_STORES = 4
"""Copies to the host under way before the host waits: each holds device memory and staging memory."""


@dataclass(slots=True, kw_only=True)
class _SwapOut:
    copies: tuple[PageCopy, ...]
    staged: jax.Array | None
    """[num_layers, padded, *page] in pinned host memory once ready, of which the first len(copies) pages
    count; None once they are in the pool."""
    stored: Future[None] | None = None
    """Its way into the pool, if a thread has it."""

    @property
    def is_ready(self) -> bool:
        """Whether taking it into the pool waits for nothing."""
        return self.stored.done() if self.stored else self.staged is None or _is_ready(self.staged)


class Mover(Protocol):
    """What a worker needs of whoever moves its pages; see `PageMover`."""

    pool: PinnedPool
    checksums: PageChecksums | None

    def swap_out(self, copies: Sequence[PageCopy], staged: jax.Array) -> None: ...

    def ended(self, *, wait: bool) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]: ...

    def refused(self, copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]: ...

    def stage_in(self, layer: int, host_pages: np.ndarray, padded: int) -> jax.Array: ...

    def wait_for_loads(self) -> None: ...

    def close(self) -> None: ...


class PageMover:
    """Moves whole pages."""

    def __init__(
        self,
        pool: PinnedPool,
        page_sharding: NamedSharding,
        checksums: PageChecksums | None = None,
        *,
        copy_threads: int | None = None,
    ) -> None:
        """Args:
        pool: the host tier's memory.
        page_sharding: of a staged array [n, *page].
        checksums: of the same pool, to find pages whose bytes change in the host; None: don't look.
        copy_threads: threads that copy within the host; 0: the caller's own. None: for the platform.
        """
        self.pool = pool
        self.checksums = checksums
        self._device = page_sharding
        of_layers = NamedSharding(page_sharding.mesh, PartitionSpec(None, *page_sharding.spec))
        self._host = of_layers.with_memory_kind("pinned_host")
        devices = page_sharding.mesh.devices
        assert devices is not None, "a mesh of real devices"
        self._devices = list(devices.flat)
        self._on_cpu = self._devices[0].platform == "cpu"
        if copy_threads is None:
            copy_threads = 0 if self._on_cpu else COPY_THREADS
        self._threads = ThreadPoolExecutor(copy_threads, "pensieve-copy") if copy_threads else None
        self._in_flight: deque[_SwapOut] = deque()
        self._direct: deque[jax.Array] = deque()
        """Arrays that may still be copied from the pool itself."""
        self._slots: deque[tuple[list[np.ndarray], jax.Array | None]] = deque()
        """Staging buffers, one array per shard, and the last array that was copied from them."""

    def swap_out(self, copies: Sequence[PageCopy], staged: jax.Array) -> None:
        """Start copying pages that were gathered on the device to the host. Doesn't wait, unless many such
        copies are under way.

        Args:
            copies: where each page goes; host pages in ascending order are copied in runs.
            staged: [num_layers, >= len(copies), *page], gathered in this order: one array, since each takes
                the host some 0.1 ms (H200).
        """
        swap_out = _SwapOut(copies=tuple(copies), staged=jax.device_put(staged, self._host))
        if self._threads is not None:
            swap_out.stored = self._threads.submit(self._store, swap_out)
        self._in_flight.append(swap_out)
        if (
            len(self._in_flight) > MOST_STORES
            and (oldest := self._in_flight[-MOST_STORES].stored) is not None
        ):
            wait_for([oldest])

    def ended(self, *, wait: bool) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """Take copies to the host that have ended into the pool.

        Args:
            wait: wait for all of them.

        Returns:
            (done, failed): copies whose host page holds the bytes now, and those that came to nothing.
        """
        done: list[PageCopy] = []
        failed: list[PageCopy] = []
        while self._in_flight:
            oldest = self._in_flight[0]
            if not wait and not oldest.is_ready:
                break
            self._in_flight.popleft()
            try:
                if oldest.stored is None:
                    self._store(oldest)
                else:
                    oldest.stored.result()
                done.extend(oldest.copies)
            except Exception:
                logger.exception(
                    "a copy of %d pages to the host failed; they are dropped", len(oldest.copies)
                )
                failed.extend(oldest.copies)
        return tuple(done), tuple(failed)

    def refused(self, copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]:
        """Those of some copies to the device that must not be made: their host pages hold other bytes than
        were copied there. To be asked once per copy, before `stage_in`."""
        if self.checksums is None or not copies:
            return ()
        damaged = frozenset(self.checksums.damaged([copy.host_page for copy in copies]))
        if damaged:
            logger.error("host pages %s hold other bytes than came: they are not loaded", sorted(damaged))
        return tuple(copy for copy in copies if copy.host_page in damaged)

    def stage_in(self, layer: int, host_pages: np.ndarray, padded: int) -> jax.Array:
        """Start copying host pages of one layer to the device: from the pool itself if they are one run of
        pages, else through a staging buffer, for which it may wait.

        Args:
            layer: which layer.
            host_pages: i64[n]; in ascending order, runs are found.
            padded: pages of the result; those past n hold anything.

        Returns:
            [padded, *page] on the device, in the order of `host_pages`.

        Raises:
            TransferError: the copy can't be made.
        """
        runs = _runs(host_pages)
        slot: list[np.ndarray] | None = None
        try:
            if len(runs) == 1 and not self._on_cpu and runs[0][0] + padded <= self.pool.num_pages:
                return self._stage_run(layer, runs[0][0], padded)
            slot, last = self._slot(padded)
            if last is not None:
                last.block_until_ready()
            parts = []
            for source, buffer, device in zip(self.pool.layers[layer], slot, self._devices, strict=True):
                filled = buffer[:padded]
                if self._on_cpu:
                    # The buffer is used again, but a CPU array shares the memory of an aligned NumPy array,
                    # with may_alias=False too (jax 0.11.2). So it gets memory of its own to share.
                    filled = np.empty_like(filled)
                self._collect(source, runs, filled)
                parts.append(jax.device_put(filled, device))
            staged = self._joined(parts)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if slot is not None:
                self._slots.append((slot, None))
            raise TransferError(
                f"swap-in of {len(host_pages)} pages of layer {layer} failed: {error}"
            ) from error
        self._slots.append((slot, staged))
        return staged

    def wait_for_loads(self) -> None:
        """Wait until nothing is copied from the pool itself any more."""
        jax.block_until_ready(list(self._direct))
        self._direct.clear()

    def close(self) -> None:
        """Give the staging buffers and the pool's memory back, once nothing is copied from them any more."""
        if self._threads is not None:
            self._threads.shutdown()
        self.wait_for_loads()
        self._drop_slots()
        self.pool.close()

    def _stage_run(self, layer: int, first: int, padded: int) -> jax.Array:
        """Copy from the pool itself. A page that is freed meanwhile is written only behind the step that
        takes this array, since what is written there comes from the device and steps run in order."""
        shards = zip(self.pool.layers[layer], self._devices, strict=True)
        parts = [jax.device_put(source[first : first + padded], device) for source, device in shards]
        while self._direct and _is_ready(self._direct[0]):
            self._direct.popleft()
        self._direct.append(self._joined(parts))
        return self._direct[-1]

    def _joined(self, parts: list[jax.Array]) -> jax.Array:
        """One array of the shards'."""
        num_pages, *local = parts[0].shape
        shape = (num_pages, local[0], local[1] * len(self._devices), *local[2:])  # kv heads are sharded
        return jax.make_array_from_single_device_arrays(shape, self._device, parts)

    def _collect(self, source: np.ndarray, runs: Sequence[tuple[int, int]], target: np.ndarray) -> None:
        """Copy runs of pages, one behind the other: as bytes, since not all dtypes leave Python's lock."""
        pages, to, at = _as_bytes(source), _as_bytes(target), 0
        pieces = []
        for first, count in runs:
            pieces.append((pages[first : first + count], to[at : at + count]))
            at += count
        if self._threads is None or len(runs) == 1:
            for piece in pieces:
                _copy(piece)
        else:
            list(self._threads.map(_copy, pieces))

    def _drop_slots(self) -> None:
        for buffers, last in self._slots:
            if last is not None:
                last.block_until_ready()
            for buffer, device in zip(buffers, self._devices, strict=True):
                unregister_pinned(buffer, device)
        self._slots.clear()

    def _slot(self, pages: int) -> tuple[list[np.ndarray], jax.Array | None]:
        """The staging buffers that were used longest ago, or new ones."""
        if self._slots and len(self._slots[0][0][0]) < pages:
            self._drop_slots()
        if len(self._slots) >= STAGING_SLOTS:
            return self._slots.popleft()
        buffers = []
        for layer, device in zip(self.pool.layers[0], self._devices, strict=True):
            buffer = np.empty((pages, *layer.shape[1:]), layer.dtype)
            register_pinned(buffer, device)
            buffers.append(buffer)
        return buffers, None

    def _store(self, swap_out: _SwapOut) -> None:
        """Take what has come to the host into the pool. Waits for it."""
        assert swap_out.staged is not None, "stored once"
        host_pages = np.fromiter((copy.host_page for copy in swap_out.copies), np.int64)
        runs = _runs(host_pages)
        shards = sorted(swap_out.staged.addressable_shards, key=lambda shard: shard.index[3].start or 0)
        arrived = [np.asarray(shard.data) for shard in shards]
        for layer, targets in enumerate(self.pool.layers):
            for target, data in zip(targets, arrived, strict=True):
                pages, came, at = _as_bytes(target), _as_bytes(data[layer]), 0
                for first, count in runs:
                    pages[first : first + count] = came[at : at + count]
                    at += count
        if self.checksums is not None:
            by_layer = [[data[layer] for data in arrived] for layer in range(len(self.pool.layers))]
            self.checksums.note(host_pages.tolist(), by_layer)
        swap_out.staged = None  # its memory is free for the next


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, how many), in the order given."""
    if not len(pages):
        return []
    starts = np.flatnonzero(np.diff(pages) != 1) + 1
    edges = [0, *starts.tolist(), len(pages)]
    return [(int(pages[a]), b - a) for a, b in itertools.pairwise(edges)]


def _as_bytes(pages: np.ndarray) -> np.ndarray:
    """u8[pages, bytes of a page], the same memory."""
    return pages.reshape(len(pages), -1).view(np.uint8)


def _copy(piece: tuple[np.ndarray, np.ndarray]) -> None:
    source, target = piece
    target[...] = source


def _is_ready(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  (missing in the stubs)
