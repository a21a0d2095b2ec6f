"""Steps and copies that fail or come late, as a test wants it."""

import numpy as np

from host_cache.errors import TransferError
from host_cache.transfer import PageMover


class TroubledMover(PageMover):
    """Copies fail or end late, as a test wants it. Host pages hold NaN until their bytes have come."""

    def __init__(self, mover):
        super().__init__(mover.pool, mover._device)
        for shards in self.pool.layers:
            for pages in shards:
                pages[...] = np.nan
        self.fails_in = self.fails_out = self.late = lambda: False

    def stage_in(self, layer, host_pages, padded):
        if self.fails_in():
            raise TransferError("swap-in failed in a test")
        return super().stage_in(layer, host_pages, padded)

    def ended(self, *, wait):
        return ((), ()) if self.late() else super().ended(wait=wait)

    def _store(self, swap_out):
        if self.fails_out():
            raise TransferError("swap-out failed in a test")
        super()._store(swap_out)


def nth(n):
    """True in the n-th call alone."""
    calls = iter(range(1, 1 << 30))
    return lambda: next(calls) == n


def trouble(engine):
    """Put a troubled mover in place of an engine's own."""
    worker = engine._turns.parts.worker
    worker._mover = TroubledMover(worker._mover)
    return worker._mover


def break_once(monkeypatch, runner, way):
    """The next step raises, as a device does that runs out of memory or breaks off."""
    whole, broken = runner.run_layered, []

    def run_layered(*args):
        if broken:
            return whole(*args)
        broken.append(True)
        if way == "after":
            whole(*args)
        elif way == "pool lost":
            for pool in runner._pools:
                pool.delete()
        raise RuntimeError("the device broke off in a test")

    monkeypatch.setattr(runner, "run_layered", run_layered)
