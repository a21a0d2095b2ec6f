"""Many decode steps at once, with the very result of taking them one by one.

While every running request decodes, a step changes little: each request is one token longer, one in
`page_tokens` of them needs a page, and chunks may be copied to the host ahead of time. Only that is done for
each step, by the manager itself and at the step's own time. What the requests and their chunks have become
is written down when the run ends.
"""

from collections.abc import Callable, Iterable, Sequence

from pensieve_jax.core.plans import StepPlan
from pensieve_jax.scheduler.request import Request
from pensieve_jax.scheduler.scheduler import Scheduler
from pensieve_jax.simulator.live import LiveTurn
from pensieve_jax.simulator.step_time import StepWork
from pensieve_jax.simulator.worker import VirtualWorker


def lacks_pages(plan: StepPlan, scheduler: Scheduler, copies_under_way: bool) -> bool:
    """Whether the first request that waits was not admitted to this plan for want of pages alone.

    Decoding gives no page back, so it stays out until a request ends. An admission fails also while a chunk
    is on its way to the host and has lost its device page; that may be over in the next step. Such a page is
    one that the plan copies and gives to a row as well.

    Args:
        plan: the step's plan, from `scheduler`, every request of which samples.
        scheduler: some request waited after it had planned.
        copies_under_way: whether copies of earlier steps had not ended when it planned.
    """
    tokens = sum(len(row.token_ids) for row in plan.rows)
    limits = scheduler.config
    if copies_under_way or plan.swap_ins or tokens >= limits.step_tokens or len(plan.rows) >= limits.max_rows:
        return False
    copied = {copy.device_page for copy in plan.swap_outs}
    size = scheduler.cache.config.page_tokens
    return not copied or not any(
        page in copied for row in plan.rows for page in row.page_ids[-(-row.start // size) :].tolist()
    )


class DecodeRun:
    """Takes decode steps until something else has to be decided. Make one for each run."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: VirtualWorker,
        running: Iterable[LiveTurn],
        *,
        starved: bool,
        submit_due: Callable[[float], None],
        next_arrival: Callable[[], float],
        finished: Callable[[LiveTurn, float], None],
        stop_s: float,
    ) -> None:
        """Args:
        scheduler: all of its running requests decode, and have produced a token.
        worker: runs the steps.
        running: the running requests, in the order of arrival.
        starved: whether requests wait that can't be admitted until one ends.
        submit_due: queues what has arrived until a time.
        next_arrival: when the next turn arrives.
        finished: takes a turn that has ended, and the time.
        stop_s: no step begins then or later.
        """
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._worker = worker
        self._starved = starved
        self._submit_due = submit_due
        self._next_arrival = next_arrival
        self._finished = finished
        self._stop_s = stop_s
        self._size = self._cache.config.page_tokens
        self._running = {live.request.id: (live, live.request.num_tokens) for live in running}
        """By id: the turn, and its tokens at the start."""
        self._need_page: list[dict[int, tuple[str, int]]] = [{} for _ in range(self._size)]
        """By number of the step modulo the page size: who needs a page then; its conversation and its tokens
        at the start."""
        self._ends: dict[int, list[LiveTurn]] = {}
        """By number of steps: who has ended then, in the order of arrival."""
        for live, tokens in self._running.values():
            need = self._need_page[(1 - tokens) % self._size]
            need[live.request.id] = (live.request.conversation_id, tokens)
            self._ends.setdefault(live.remaining, []).append(live)
        self._kv_tokens = sum(tokens for _, tokens in self._running.values())
        """Tokens that the next step attends to."""
        self._decoded_s = 0.0
        self.steps = 0
        """Steps taken so far."""
        self.tokens = 0
        """Tokens produced so far."""

    def run(self, now: float) -> float:
        """Take steps from `now` on, perhaps none.

        Returns:
            the time when the last step ended. The scheduler's state is what single steps would have left.
        """
        worker, cache = self._worker, self._cache
        while self._running and now < self._stop_s and self._give_pages(now):
            cache.plan_ahead(now)
            count = len(self._running)
            work = StepWork(count, self._kv_tokens, self._kv_tokens)
            outcome = worker.execute(work, 0, cache.take_swap_outs(), now)
            now = self._decoded_s = outcome.end_s
            if outcome.finished_swap_outs:
                cache.swap_outs_ended(outcome.finished_swap_outs, ok=True)
            self.steps += 1
            self.tokens += count
            self._kv_tokens += count
            ended = self._ends.pop(self.steps, None)
            if ended is not None:
                self._end(ended, now)
            arrived = self._next_arrival() <= now
            if arrived:
                self._submit_due(now)
            if (ended is not None or arrived) and not self._goes_on(ended):
                break
        for live, tokens in self._running.values():
            self._write_down(live, tokens)
        return now

    def _give_pages(self, now: float) -> bool:
        """Give a page to each request that begins one with the next step's token; False if they are short."""
        for conversation_id, tokens in self._need_page[self.steps % self._size].values():
            if not self._cache.grow(conversation_id, tokens + self.steps, now):
                return False
        return True

    def _goes_on(self, ended: Sequence[LiveTurn] | None) -> bool:
        """Whether the scheduler has nothing to decide still."""
        if not self._scheduler.num_waiting:
            return True
        if len(self._running) >= self._scheduler.config.max_rows:
            return True
        return self._starved and ended is None

    def _end(self, ended: Iterable[LiveTurn], now: float) -> None:
        for live in ended:
            request = live.request
            _, tokens = self._running.pop(request.id)
            del self._need_page[(1 - tokens) % self._size][request.id]
            self._kv_tokens -= tokens + self.steps
            self._write_down(live, tokens)
            self._scheduler.end(request, now)
            self._finished(live, now)

    def _write_down(self, live: LiveTurn, tokens: int) -> None:
        """Note what the steps have done to a request that had `tokens` tokens before them."""
        if self.steps:
            now = tokens + self.steps
            self._cache.computed(live.request.conversation_id, tokens - 1, now - 1)
            _set_decoded(live.request, now, self._decoded_s)


def _set_decoded(request: Request, num_tokens: int, now: float) -> None:
    """The state of a decoding request with so many tokens. Their ids are in its array already."""
    request.num_tokens = num_tokens
    request.num_computed = max(request.num_computed, num_tokens - 1)
    request.pending.clear()
    request.pending.append((num_tokens - 1, num_tokens))
    request.last_token_s = now
