"""The scheduler: unified batches, first come first served, suspension (paper, sections 4.2 and 4.3)."""

from collections.abc import Iterable
from dataclasses import dataclass

from host_cache.manager import CacheManager
from host_cache.plan import CachePlan, PageCopy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import StepPlan, StepResult, StepStart
from pensieve_jax.scheduler.queue import WaitingQueue
from pensieve_jax.scheduler.request import AdmissionCounts, Request, RequestOutput
from pensieve_jax.scheduler.rows import decode_row, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step.

    Raises:
        InvalidArgumentError: a limit is out of range.
    """

    step_tokens: int = 512
    """Query tokens of a step at most; longer prompts are computed in pieces."""
    max_rows: int = 64
    """Rows of a step at most, hence also requests that run at once."""
    separate_phases: bool = False
    """Never decode in a step that computes prompts, which then come first, as servers did that the paper
    compares with (figure 13). For comparison: unified batches are better."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_rows, int) or self.max_rows < 1:
            raise InvalidArgumentError(f"max_rows: got {self.max_rows!r}, expected an integer of at least 1")
        if not isinstance(self.step_tokens, int) or self.step_tokens < self.max_rows:
            expected = f"an integer of at least max_rows, {self.max_rows}"
            raise InvalidArgumentError(f"step_tokens: got {self.step_tokens!r}, expected {expected}")


class Scheduler:
    """Decides each step's rows and copies, and takes in what the step brought.

    Call `schedule`, hand the plan to a worker, then `advance`; when the step's tokens have come, `apply` its
    result. The next step may be scheduled before that: its rows then stand over tokens whose values only the
    device knows.
    """

    def __init__(self, cache: CacheManager, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        """By id, hence in the order of arrival when sorted."""
        self._admitted: list[tuple[Request, CachePlan]] = []
        """Admitted in the plan that `advance` has not seen yet."""
        self._num_under_way = 0
        """Steps that were advanced and not applied."""
        self.num_suspensions = 0
        """Since the start."""

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a hint asks for copies to the device."""
        return bool(self._running) or len(self._waiting) > 0 or self.cache.has_hints

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, suspended ones included."""
        return len(self._waiting)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request that fits the pool. Its conversation counts as active from now on."""
        self.cache.open(request.conversation_id, now)
        self.cache.touch(request.conversation_id, now)
        self._waiting.push(request)

    def end(self, request: Request, now: float) -> None:
        """End a request, whether it waits or runs. The KV it has computed stays; a row of it in a step that
        is under way comes to nothing."""
        if request.running:
            ran_ahead = request.num_awaited > 0
            self._stop_running(request)
            request.forget_awaited()
            tokens = request.tokens[: request.num_tokens]
            self.cache.finish(request.conversation_id, now, tokens)
            if ran_ahead:  # what was computed past the end is given back: as if no step had run ahead
                self.cache.truncate(request.conversation_id, len(tokens) - 1)
        else:
            self._waiting.remove(request)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan one step: decode rows first, then prompts in the order of arrival, then newcomers. If phases
        are separate: decode rows only where there is nothing else.

        Returns:
            the plan, without rows if nothing can run before copies to the host have ended, or if nothing
            runs and a hint asks for copies to the device; None if the step that is under way has to be
            applied first.
        """
        running = sorted(self._running.values(), key=_arrival)
        if not self._give_next_pages(running, now):
            if self._num_under_way:  # it may end requests, so that none has to be suspended
                return None
            self._suspend_for_next_pages(running, now)
            running = [request for request in running if request.running]
        # A decoding request needs the row of its last token: no budget to ask, since max_rows fit a step.
        decode_rows = [decode_row(request) for request in running if request.decoding]
        rows = [] if self.config.separate_phases else decode_rows
        tokens = len(rows)

        def add(request: Request) -> None:
            nonlocal tokens
            new = rows_of(
                request,
                self.cache,
                max_tokens=self.config.step_tokens - tokens,
                max_rows=self.config.max_rows - len(rows),
            )
            rows.extend(new)
            tokens += sum(len(row.token_ids) for row in new)

        if tokens < len(running):
            for request in running:
                if not request.decoding:
                    add(request)
        self._admitted = []
        swap_ins: list[PageCopy] = []
        while tokens < self.config.step_tokens and len(rows) < self.config.max_rows:
            admission = self._admit_first(now)
            if admission is None:
                break
            request, copies = admission
            swap_ins.extend(copies)
            add(request)
        rows = rows or decode_rows
        if not rows and self._num_under_way:
            return None
        swap_ins.extend(self.cache.take_swap_ins(now))
        if not swap_ins:  # copies in both directions at once slow each other by a fifth (paper, section 5)
            self.cache.plan_ahead(now)
        return StepPlan(rows=tuple(rows), swap_ins=tuple(swap_ins), swap_outs=self.cache.take_swap_outs())

    def advance(self, plan: StepPlan, start: StepStart, now: float) -> None:
        """Take a step that was handed to the device for done, but for the values of its tokens.

        The device runs steps in order, so what a later step reads is computed by then. If swap-ins failed,
        nothing counts as computed, and the requests that were admitted with the step return to the queue; the
        next admission recomputes what could not be loaded.
        """
        self._num_under_way += 1
        failed = frozenset(start.failed_swap_ins)
        self.cache.swap_ins_ended((copy for copy in plan.swap_ins if copy not in failed), ok=True)
        self.cache.swap_ins_ended(failed, ok=False)
        admitted, self._admitted = self._admitted, []
        if failed:
            for request, _ in admitted:
                if not request.num_computed:
                    request.counts = None
                self._suspend(request, now)
            return
        for request, cache_plan in admitted:
            self.cache.admitted(cache_plan)
            request.swap_in_wait_s += start.swap_in_wait_s
        for row in plan.rows:
            request = self._running[row.request_id]
            self.cache.computed(request.conversation_id, row.start, row.kv_len)
            request.computed(row.start, row.kv_len)
            if row.sample is not None:
                request.await_token()

    def apply(self, result: StepResult, now: float) -> tuple[RequestOutput, ...]:
        """Take in what the oldest step that was advanced has brought.

        Returns:
            an output for every request that got a token and has not ended meanwhile.
        """
        self._num_under_way -= 1
        self.cache.swap_outs_ended(result.finished_swap_outs, ok=True)
        self.cache.swap_outs_ended(result.failed_swap_outs, ok=False)
        return tuple(self._outputs(result, now))

    def _outputs(self, result: StepResult, now: float) -> Iterable[RequestOutput]:
        for request_id, token in result.samples.items():
            request = self._running.get(request_id)
            if request is None:  # it ended after the step was planned
                continue
            request.learn(token.token_id)
            request.first_token_s = request.first_token_s if request.first_token_s is not None else now
            request.last_token_s = now
            stopped = token.token_id in request.stop_token_ids
            finished = stopped or not (request.pending or request.num_awaited)
            if finished:
                self.end(request, now)
            yield RequestOutput(request_id=request_id, token=token, finished=finished, stopped=stopped)

    def _give_next_pages(self, running: list[Request], now: float) -> bool:
        """Give every running request a page for its next token.

        Returns:
            False if pages are short: some requests may have theirs.
        """
        for request in running:
            if request.num_tokens > request.capacity_tokens and request.pending:
                if not self.cache.grow(request.conversation_id, request.num_tokens, now):
                    return False
                self._note_pages(request)
        return True

    def _suspend_for_next_pages(self, running: list[Request], now: float) -> None:
        """Suspend the latest arrivals until all others have a page for their next token (paper 4.3.5)."""
        while not self._give_next_pages([request for request in running if request.running], now):
            latest = max(self._running.values(), key=_arrival)
            latest.suspensions += 1
            self.num_suspensions += 1
            self._suspend(latest, now)

    def _admit_first(self, now: float) -> tuple[Request, tuple[PageCopy, ...]] | None:
        request = self._waiting.first()
        if request is None or self._num_busy() >= self.config.max_rows:
            return None
        again = request.counts is not None
        plan = self.cache.admit(
            request.conversation_id,
            num_tokens=request.num_tokens,
            history_tokens=max(request.num_history_tokens, request.num_computed),
            now=now,
            reserve_pages=self.cache.config.reserve_pages if self._running else 0,
            token_ids=request.tokens[: request.num_tokens],
        )
        if plan is None:
            return None
        self._waiting.remove(request)
        self._running[request.id] = request
        self._admitted.append((request, plan))
        request.running = True
        self._note_pages(request)
        request.pending.clear()
        request.pending.extend(plan.missing)
        if request.first_step_s is None:
            request.first_step_s = now
        if again:
            request.tokens_restored += plan.tokens_from_host + plan.tokens_recomputed
        else:
            cached = plan.tokens_from_device + plan.tokens_from_host + plan.tokens_recomputed
            request.counts = AdmissionCounts(
                new=request.num_tokens - cached,
                from_device=plan.tokens_from_device,
                from_host=plan.tokens_from_host,
                recomputed=plan.tokens_recomputed,
            )
        return request, plan.swap_ins

    def _note_pages(self, request: Request) -> None:
        request.capacity_tokens = self.cache.capacity(request.conversation_id)
        request.page_ids = self.cache.page_ids(request.conversation_id, request.capacity_tokens)

    def _num_busy(self) -> int:
        """Requests that run and have something left to compute."""
        if len(self._running) < self.config.max_rows:
            return len(self._running)
        return sum(bool(request.pending) for request in self._running.values())

    def _suspend(self, request: Request, now: float) -> None:
        assert not request.num_awaited, "whoever waits knows all of its tokens"
        self._stop_running(request)
        self.cache.suspend(request.conversation_id, now)
        self._waiting.push(request)

    def _stop_running(self, request: Request) -> None:
        del self._running[request.id]
        request.running = False
        request.pending.clear()


def _arrival(request: Request) -> int:
    return request.id
