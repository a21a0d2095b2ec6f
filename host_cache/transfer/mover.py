"""Copies of pages between the pinned host pool and the device, layer by layer.

The device half (gathering pages from the pool and scattering them into it) belongs to the step, which owns
the pool; here only staged arrays of whole pages come and go.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer.checksums import PageChecksums
from host_cache.transfer.pinned_pool import PinnedPool, register_pinned, unregister_pinned

logger = logging.getLogger(__name__)
STAGING_SLOTS = 4
"""Staging buffers per shard: how many layers' swap-ins may be under way before the host waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SwapOut:
    copies: tuple[PageCopy, ...]
    staged: list[jax.Array]
    """Per layer [padded, *page], in pinned host memory once ready; the first len(copies) pages count."""


class Mover(Protocol):
    """What a worker needs of whoever moves its pages; see `PageMover`."""

    pool: PinnedPool
    checksums: PageChecksums | None

    def swap_out(self, copies: Sequence[PageCopy], staged: list[jax.Array]) -> None: ...

    def ended(self, *, wait: bool) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]: ...

    def refused(self, copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]: ...

    def stage_in(self, layer: int, host_pages: np.ndarray, padded: int) -> jax.Array: ...

    def close(self) -> None: ...


class PageMover:
    """Moves whole pages."""

    def __init__(
        self, pool: PinnedPool, page_sharding: NamedSharding, checksums: PageChecksums | None = None
    ) -> None:
        """Args:
        pool: the host tier's memory.
        page_sharding: of a staged array [n, *page].
        checksums: of the same pool, to find pages whose bytes change in the host; None: don't look.
        """
        self.pool = pool
        self.checksums = checksums
        self._device = page_sharding
        self._host = page_sharding.with_memory_kind("pinned_host")
        devices = page_sharding.mesh.devices
        assert devices is not None, "a mesh of real devices"
        self._devices = list(devices.flat)
        self._in_flight: deque[_SwapOut] = deque()
        self._slots: deque[tuple[list[np.ndarray], jax.Array | None]] = deque()
        """Staging buffers, one array per shard, and the last array that was copied from them."""

    def swap_out(self, copies: Sequence[PageCopy], staged: list[jax.Array]) -> None:
        """Start copying pages that were gathered on the device to the host. Doesn't wait.

        Args:
            copies: where each page goes.
            staged: per layer [>= len(copies), *page], gathered in this order.
        """
        to_host = [jax.device_put(layer, self._host) for layer in staged]
        self._in_flight.append(_SwapOut(copies=tuple(copies), staged=to_host))

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
            if not wait and not all(_is_ready(layer) for layer in oldest.staged):
                break
            self._in_flight.popleft()
            try:
                self._store(oldest)
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
        """Start copying host pages of one layer to the device. Waits only for a free staging buffer.

        Args:
            layer: which layer.
            host_pages: i32[n].
            padded: pages of the result; those past n hold anything.

        Returns:
            [padded, *page] on the device, in the order of `host_pages`.

        Raises:
            TransferError: the copy can't be made.
        """
        slot: list[np.ndarray] | None = None
        try:
            slot, last = self._slot(padded)
            if last is not None:
                last.block_until_ready()
            parts = []
            for source, buffer, device in zip(self.pool.layers[layer], slot, self._devices, strict=True):
                filled = buffer[:padded]
                if device.platform == "cpu":
                    # The buffer is used again, but a CPU array shares the memory of an aligned NumPy array,
                    # with may_alias=False too (jax 0.11.2). So it gets memory of its own to share.
                    filled = np.empty_like(filled)
                np.take(source, host_pages, axis=0, out=filled[: len(host_pages)])
                parts.append(jax.device_put(filled, device))
            shape = (padded, *self._global_page_shape(parts[0].shape[1:]))
            staged = jax.make_array_from_single_device_arrays(shape, self._device, parts)
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if slot is not None:
                self._slots.append((slot, None))
            raise TransferError(
                f"swap-in of {len(host_pages)} pages of layer {layer} failed: {error}"
            ) from error
        self._slots.append((slot, staged))
        return staged

    def close(self) -> None:
        """Give the staging buffers and the pool's memory back, once nothing is copied from them any more."""
        self._drop_slots()
        self.pool.close()

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

    def _global_page_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """A page's shape over all shards; kv heads, axis 1, are the sharded one."""
        return (local[0], local[1] * len(self._devices), *local[2:])

    def _store(self, swap_out: _SwapOut) -> None:
        host_pages = np.fromiter((copy.host_page for copy in swap_out.copies), np.int64)
        arrived: list[list[np.ndarray]] = []
        for layer, staged in zip(self.pool.layers, swap_out.staged, strict=True):
            shards = sorted(staged.addressable_shards, key=lambda shard: shard.index[2].start or 0)
            arrived.append([np.asarray(shard.data) for shard in shards])
            for target, data in zip(layer, arrived[-1], strict=True):
                target[host_pages] = data[: len(host_pages)]
        if self.checksums is not None:
            self.checksums.note(host_pages.tolist(), arrived)


def _is_ready(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  (missing in the stubs)
