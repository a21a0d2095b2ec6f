"""The scheduler: unified batches, first come first served, suspension (paper, sections 4.2 and 4.3)."""

from collections.abc import Iterable
from dataclasses import dataclass

from host_cache.manager import CacheManager
from host_cache.plan import CachePlan, PageCopy
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.plans import StepPlan, StepResult
from pensieve_jax.scheduler.queue import WaitingQueue
from pensieve_jax.scheduler.request import AdmissionCounts, Request, RequestOutput
from pensieve_jax.scheduler.rows import row_of, rows_of


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

    def __post_init__(self) -> None:
        if not isinstance(self.max_rows, int) or self.max_rows < 1:
            raise InvalidArgumentError(f"max_rows: got {self.max_rows!r}, expected an integer of at least 1")
        if not isinstance(self.step_tokens, int) or self.step_tokens < self.max_rows:
            expected = f"an integer of at least max_rows, {self.max_rows}"
            raise InvalidArgumentError(f"step_tokens: got {self.step_tokens!r}, expected {expected}")


class Scheduler:
    """Decides each step's rows and copies, and takes in what the step brought.

    Call `schedule`, let a worker execute the plan, then `apply` its result, in turn.
    """

    def __init__(self, cache: CacheManager, config: SchedulerConfig) -> None:
        self.cache = cache
        self.config = config
        self._waiting = WaitingQueue()
        self._running: dict[int, Request] = {}
        """By id, hence in the order of arrival when sorted."""
        self._admitted: list[tuple[Request, CachePlan]] = []
        """Admitted in the step that is under way."""
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
        """End a request between steps, whether it waits or runs. The KV it has computed stays."""
        if request.running:
            self._stop_running(request)
            tokens = request.tokens[: request.num_tokens]
            self.cache.finish(request.conversation_id, now, tokens)
        else:
            self._waiting.remove(request)

    def schedule(self, now: float) -> StepPlan:
        """Plan one step: decode rows first, then prompts in the order of arrival, then newcomers.

        Returns:
            the plan; without rows if nothing can run before copies to the host have ended, or if nothing
            runs and a hint asks for copies to the device.
        """
        running = sorted(self._running.values(), key=_arrival)
        if self._give_next_pages(running, now):
            running = [request for request in running if request.running]
        # A decoding request needs the row of its last token: no budget to ask, since max_rows fit a step.
        rows = [
            row_of(request, self.cache, request.num_tokens - 1, request.num_tokens)
            for request in running
            if request.decoding
        ]
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
        swap_ins.extend(self.cache.take_swap_ins(now))
        if not swap_ins:  # copies in both directions at once slow each other by a fifth (paper, section 5)
            self.cache.plan_ahead(now)
        return StepPlan(rows=tuple(rows), swap_ins=tuple(swap_ins), swap_outs=self.cache.take_swap_outs())

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> tuple[RequestOutput, ...]:
        """Take in what a step brought.

        If swap-ins failed, nothing counts as computed, and the requests that were admitted with the step
        return to the queue; the next admission recomputes what could not be loaded.

        Returns:
            an output for every request that got a token.
        """
        self.cache.swap_outs_ended(result.finished_swap_outs, ok=True)
        self.cache.swap_outs_ended(result.failed_swap_outs, ok=False)
        failed = frozenset(result.failed_swap_ins)
        self.cache.swap_ins_ended((copy for copy in plan.swap_ins if copy not in failed), ok=True)
        self.cache.swap_ins_ended(failed, ok=False)
        if failed:
            for request, _ in self._admitted:
                if not request.num_computed:
                    request.counts = None
                self._suspend(request, now)
            return ()
        for request, cache_plan in self._admitted:
            self.cache.admitted(cache_plan)
            request.swap_in_wait_s += result.swap_in_wait_s
        self._admitted = []
        for row in plan.rows:
            request = self._running[row.request_id]
            self.cache.computed(request.conversation_id, row.start, row.kv_len)
            request.computed(row.start, row.kv_len)
        return tuple(self._outputs(result, now))

    def _outputs(self, result: StepResult, now: float) -> Iterable[RequestOutput]:
        for request_id, token in result.samples.items():
            request = self._running[request_id]
            request.append(token.token_id)
            request.first_token_s = request.first_token_s if request.first_token_s is not None else now
            request.last_token_s = now
            stopped = token.token_id in request.stop_token_ids
            assert request.params.max_tokens is not None
            finished = stopped or request.num_output_tokens >= request.params.max_tokens
            if finished:
                self.end(request, now)
            yield RequestOutput(request_id=request_id, token=token, finished=finished, stopped=stopped)

    def _give_next_pages(self, running: list[Request], now: float) -> bool:
        """Give every running request a page for its next token, suspending the latest arrivals if pages
        are short (paper 4.3.5).

        Returns:
            whether any was suspended.
        """
        suspended = False
        for request in running:
            if request.num_tokens <= request.capacity_tokens:
                continue
            while request.running and not self.cache.grow(request.conversation_id, request.num_tokens, now):
                latest = max(self._running.values(), key=_arrival)
                latest.suspensions += 1
                self.num_suspensions += 1
                self._suspend(latest, now)
                suspended = True
            if request.running:
                request.capacity_tokens = self.cache.capacity(request.conversation_id)
        return suspended

    def _admit_first(self, now: float) -> tuple[Request, tuple[PageCopy, ...]] | None:
        request = self._waiting.first()
        if request is None or len(self._running) >= self.config.max_rows:
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
        request.capacity_tokens = self.cache.capacity(request.conversation_id)
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

    def _suspend(self, request: Request, now: float) -> None:
        self._stop_running(request)
        self.cache.suspend(request.conversation_id, now)
        self._waiting.push(request)

    def _stop_running(self, request: Request) -> None:
        del self._running[request.id]
        request.running = False
        request.pending.clear()


def _arrival(request: Request) -> int:
    return request.id
