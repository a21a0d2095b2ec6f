"""Takes the worker's place: how long each step takes, and when its copies have ended."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from host_cache.plan import PageCopy
from pensieve_jax.simulator.step_time import StepTimeModel, StepWork

STAGING_PAGES = 128
"""Pages that wait for their copy to the host at most; a step that would have more waits (two steps' worth of
the cache's `max_swap_outs_per_step`)."""


class StepOutcome(NamedTuple):
    """When a step ends and what has ended by then."""

    end_s: float
    swap_in_wait_s: float
    """Time that compute waited for swap-ins."""
    finished_swap_outs: Sequence[PageCopy]
    """Copies to the host, of this step or earlier ones, that have ended."""


class VirtualWorker:
    """Compute and the link to the host on a virtual clock.

    Swap-ins go layer by layer ahead of the compute, so that a step takes the longer of both and one layer of
    the shorter (paper, section 4.3.3). Swap-outs run behind the compute and cost time only if more than
    `STAGING_PAGES` wait. While swap-ins run they pause (`hold_swap_outs`), or both directions slow down.
    """

    def __init__(self, times: StepTimeModel, *, page_tokens: int, hold_swap_outs: bool = True) -> None:
        """Args:
        times: compute time of a step.
        page_tokens: tokens of a page.
        hold_swap_outs: whether copies to the host pause while swap-ins run (paper, section 5).
        """
        device, page_bytes = times.device, times.model.kv_page_bytes(page_tokens)
        self._times = times
        self._hold = hold_swap_outs
        self._both_ways_share = device.both_ways_share
        self._num_layers = times.model.num_layers
        self._load_s = page_bytes / device.load_bytes_per_s
        self._store_s = page_bytes / device.store_bytes_per_s
        self._staging_s = STAGING_PAGES * self._store_s
        self._queued_s = 0.0
        """Time that all copies to the host since the start take on the link."""
        self._stored_s = 0.0
        """How much of that time has passed."""
        self._under_way: deque[tuple[float, tuple[PageCopy, ...]]] = deque()
        """Copies to the host, and the queued time at their end."""
        self.compute_s = 0.0
        """Compute time of all steps so far."""
        self.swap_in_wait_s = 0.0
        """Time that compute has waited for swap-ins so far."""
        self.swap_out_stall_s = 0.0
        """Time that steps have waited for room for their swap-outs so far."""

    @property
    def copies_under_way(self) -> bool:
        """Whether any copy to the host hasn't ended."""
        return bool(self._under_way)

    def execute(
        self, work: StepWork, num_swap_ins: int, swap_outs: tuple[PageCopy, ...], now: float
    ) -> StepOutcome:
        """Run one step.

        Args:
            work: of its rows.
            num_swap_ins: pages that it loads.
            swap_outs: copies that begin with it.
            now: when it begins.
        """
        compute_s = self._times.compute_s(work)
        self.compute_s += compute_s
        duration_s = compute_s
        if swap_outs:
            self._queue(swap_outs)
            stall_s = self._queued_s - self._stored_s - self._staging_s
            if stall_s > 0:
                self.swap_out_stall_s += stall_s
                duration_s += stall_s
                self._stored_s += stall_s
        if not num_swap_ins:
            if not self._under_way:
                return StepOutcome(now + duration_s, 0.0, ())
            self._store(compute_s)
            return StepOutcome(now + duration_s, 0.0, self._ended())
        load_s, share = num_swap_ins * self._load_s, 0.0
        if not self._hold and self._under_way:
            share = self._both_ways_share
            load_s /= share
        longer, shorter = max(compute_s, load_s), min(compute_s, load_s)
        wait_s = longer + shorter / self._num_layers - compute_s
        self.swap_in_wait_s += wait_s
        self._store(load_s * share + max(0.0, compute_s + wait_s - load_s))
        return StepOutcome(now + duration_s + wait_s, wait_s, self._ended())

    def wait(self, swap_outs: tuple[PageCopy, ...], now: float) -> StepOutcome:
        """Run no step, but wait for all copies to the host."""
        self._queue(swap_outs)
        end_s = now + self._queued_s - self._stored_s
        self._stored_s = self._queued_s
        return StepOutcome(end_s, 0.0, self._ended())

    def pass_time(self, seconds: float) -> tuple[PageCopy, ...]:
        """Let time pass in which no step runs.

        Returns:
            copies to the host that have ended.
        """
        self._store(seconds)
        return tuple(self._ended())

    def _queue(self, copies: tuple[PageCopy, ...]) -> None:
        if copies:
            self._queued_s += len(copies) * self._store_s
            self._under_way.append((self._queued_s, copies))

    def _store(self, seconds: float) -> None:
        self._stored_s = min(self._queued_s, self._stored_s + seconds)

    def _ended(self) -> Sequence[PageCopy]:
        if not self._under_way or self._under_way[0][0] > self._stored_s:
            return ()
        ended: list[PageCopy] = []
        while self._under_way and self._under_way[0][0] <= self._stored_s:
            ended.extend(self._under_way.popleft()[1])
        return tuple(ended)
