"""A mover whose copies come late, in another order, or not at all: for tests of what stands on it."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from host_cache.config import TransferFaults
from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer.mover import Mover

MOST_CALLS_LATE = 5
"""A late copy to the host is held back for at most so many calls of `ended`."""
MOST_SECONDS_LATE = 0.002
"""A late copy to the device begins at most so much later."""


@dataclass(slots=True, kw_only=True)
class FaultCounters:
    """What was done to copies since the start."""

    failed_loads: int = 0
    """Copies to the device that were refused before they began."""
    broken_loads: int = 0
    """Steps' copies to the device that broke off at some layer."""
    late_loads: int = 0
    failed_stores: int = 0
    late_stores: int = 0
    reordered: int = 0
    """Calls of `ended` whose copies were given in another order."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in FaultCounters.__slots__)


@dataclass(slots=True, kw_only=True)
class _LateStore:
    copy: PageCopy
    calls: int
    """Calls of `ended` until it ends."""
    pages: list[np.ndarray]
    """Its bytes, per layer and shard."""


class FaultyMover:
    """Stands before another mover and lets some of its copies fail, come late or change their order.

    A host page holds no sense (all bits set, which is NaN) from the moment a copy into it begins until that
    copy has ended well, and a late copy writes its bytes when it ends: whoever loads a page too early, takes
    a failed copy for done, or frees a page while a copy is under way, shows it by a wrong answer.

    Loads of one step are one staged array a layer, so they fail singly or break off together, and have no
    order that could be changed.
    """

    def __init__(self, mover: Mover, faults: TransferFaults) -> None:
        """Args:
        mover: makes the copies.
        faults: how often what happens.
        """
        self._mover = mover
        self.pool = mover.pool
        self.checksums = mover.checksums
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._late: list[_LateStore] = []
        self._breaks_at: int | None = None
        """Layer at which the loads of the step under way break off."""
        self.counters = FaultCounters()

    def swap_out(self, copies: Sequence[PageCopy], staged: jax.Array) -> None:
        """As `PageMover.swap_out`."""
        self._mover.wait_for_loads()  # which may read host pages that are used again for these copies
        for copy in copies:
            self._scribble(copy.host_page)
        self._mover.swap_out(copies, staged)

    def ended(self, *, wait: bool) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """As `PageMover.ended`; some copies fail now, and some are held back unless `wait`."""
        fresh, broken = self._mover.ended(wait=wait)
        done: list[PageCopy] = []
        failed = list(broken)
        for late in self._late:
            late.calls -= 1
        for late in [late for late in self._late if wait or late.calls <= 0]:
            self._late.remove(late)
            for pages, saved in zip(self._arrays(), late.pages, strict=True):
                pages[late.copy.host_page] = saved
            done.append(late.copy)
        for copy in fresh:
            if self._drawn(self._faults.fail):
                self.counters.failed_stores += 1
                self._scribble(copy.host_page)
                failed.append(copy)
            elif not wait and self._drawn(self._faults.delay):
                self.counters.late_stores += 1
                saved = [pages[copy.host_page].copy() for pages in self._arrays()]
                self._scribble(copy.host_page)
                calls = self._random.randint(1, MOST_CALLS_LATE)
                self._late.append(_LateStore(copy=copy, calls=calls, pages=saved))
            else:
                done.append(copy)
        if len(done) > 1 and self._drawn(self._faults.reorder):
            self.counters.reordered += 1
            self._random.shuffle(done)
        return tuple(done), tuple(failed)

    def refused(self, copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]:
        """As `PageMover.refused`, and some more."""
        refused = set(self._mover.refused(copies))
        drawn = {copy for copy in copies if self._drawn(self._faults.fail)} - refused
        self.counters.failed_loads += len(drawn)
        return tuple(copy for copy in copies if copy in refused or copy in drawn)

    def stage_in(self, layer: int, host_pages: np.ndarray, padded: int) -> jax.Array:
        """As `PageMover.stage_in`; a step's loads may break off at any layer."""
        num_layers = len(self.pool.layers)
        if layer == 0:
            breaks = self._drawn(self._faults.fail)
            self._breaks_at = self._random.randrange(num_layers) if breaks else None
        if layer == self._breaks_at:
            self.counters.broken_loads += 1
            raise TransferError(f"swap-in of {len(host_pages)} pages broken off at layer {layer} on purpose")
        if self._drawn(self._faults.delay / num_layers):
            self.counters.late_loads += 1
            time.sleep(self._random.uniform(0, MOST_SECONDS_LATE))
        return self._mover.stage_in(layer, host_pages, padded)

    def wait_for_loads(self) -> None:
        """As `PageMover.wait_for_loads`."""
        self._mover.wait_for_loads()

    def close(self) -> None:
        """As `PageMover.close`."""
        self._mover.close()

    def _drawn(self, share: float) -> bool:
        return self._random.random() < share

    def _arrays(self) -> list[np.ndarray]:
        return [pages for shards in self.pool.layers for pages in shards]

    def _scribble(self, host_page: int) -> None:
        for pages in self._arrays():
            pages[host_page].reshape(-1).view(np.uint8)[...] = 0xFF
