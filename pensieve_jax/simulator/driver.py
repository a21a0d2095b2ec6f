"""The simulation: conversations, the real scheduler and cache manager, a virtual worker and clock."""

import functools
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from host_cache.counters import CacheCounters
from host_cache.manager import CacheManager
from host_cache.policies import make_policy
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.plans import StepResult, StepStart
from pensieve_jax.core.types import SampledToken, SamplingParams
from pensieve_jax.scheduler.request import Request
from pensieve_jax.scheduler.scheduler import Scheduler
from pensieve_jax.simulator.decode_run import DecodeRun, lacks_pages
from pensieve_jax.simulator.live import LiveTurn
from pensieve_jax.simulator.metrics import RequestRecord
from pensieve_jax.simulator.settings import SimulationConfig
from pensieve_jax.simulator.step_time import StepTimeModel, work_of
from pensieve_jax.simulator.worker import VirtualWorker
from pensieve_jax.simulator.workload import SimConversation, cut_to_context

NO_STOP: frozenset[int] = frozenset()


class StuckError(PensieveError):
    """Requests wait that no step can ever admit. Always a fault of the scheduler or the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What has happened."""

    records: tuple[RequestRecord, ...]
    """Turns in the order in which they ended."""
    counters: CacheCounters
    """The cache manager's own counts."""
    arrivals_s: tuple[float, ...]
    """When each turn arrived, also of those that haven't ended."""
    refused: int
    """Turns that no empty device could hold; their conversations ended there."""
    end_s: float
    steps: int
    fast_steps: int
    """Those of the steps that were taken many at once."""
    rows: int
    """Rows of all steps."""
    compute_s: float
    swap_in_wait_s: float
    swap_out_stall_s: float


class Simulation:
    """Runs conversations once. Deterministic: equal arguments give equal results."""

    def __init__(
        self,
        conversations: Iterable[SimConversation],
        config: SimulationConfig,
        *,
        stop_s: float = math.inf,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Args:
        conversations: what comes; they are cut to the context.
        config: the server.
        stop_s: when to stop, in seconds of the simulation, though turns may still come or be under way.
        progress: is told how many turns of how many have ended.

        Raises:
            ValueError: the policy is unknown.
        """
        cut = (cut_to_context(conversation, config.max_context_tokens) for conversation in conversations)
        self._conversations = [conversation for conversation in cut if conversation is not None]
        self._config = config
        self._stop_s = stop_s
        self._progress = progress
        times = StepTimeModel(config.model, config.device, config.profile)
        size = config.cache.page_tokens
        limit = config.max_context_tokens
        policy = make_policy(config.policy, times.recompute_cost(size, limit, config.attention_weight))
        self.cache = CacheManager(config.cache, policy, times.recompute_cost(size, limit))
        self.scheduler = Scheduler(self.cache, config.scheduler)
        self._worker = VirtualWorker(times, page_tokens=size, hold_swap_outs=config.hold_swap_outs)
        self._now = 0.0
        self._arrivals = [(c.turns[0].arrival_s or 0.0, i, 0) for i, c in enumerate(self._conversations)]
        """Heap of (time, conversation, turn)."""
        heapq.heapify(self._arrivals)
        self._live: dict[int, LiveTurn] = {}
        """By request id, ascending: turns that wait or run."""
        self._contents: dict[int, np.ndarray] = {}
        """By conversation: i32[tokens at its end], while it lasts."""
        self._segments: dict[str, int] = {}
        """Token id that stands for a prefix segment."""
        self._records: list[RequestRecord] = []
        self._arrived_s: list[float] = []
        self._turns = sum(len(conversation.turns) for conversation in self._conversations)
        self._next_id = self._refused = self._left_out = 0
        self._steps = self._fast_steps = self._rows = 0

    def run(self) -> SimulationResult:
        """Run to the end of all conversations, or to `stop_s`.

        Raises:
            StuckError: requests wait for ever.
        """
        while self._now < self._stop_s:
            self._submit_due(self._now)
            if not self.scheduler.has_work:
                if not self._arrivals:
                    break
                self._pass_time_until(self._next_arrival())
                continue
            decode_run = self._step()
            if decode_run is not None:
                self._now = decode_run.run(self._now)
                self._steps += decode_run.steps
                self._fast_steps += decode_run.steps
                self._rows += decode_run.tokens
        if self._progress is not None:
            self._progress(self._turns, self._turns)
        return SimulationResult(
            records=tuple(self._records),
            counters=self.cache.counters,
            arrivals_s=tuple(self._arrived_s),
            refused=self._refused,
            end_s=self._now,
            steps=self._steps,
            fast_steps=self._fast_steps,
            rows=self._rows,
            compute_s=self._worker.compute_s,
            swap_in_wait_s=self._worker.swap_in_wait_s,
            swap_out_stall_s=self._worker.swap_out_stall_s,
        )

    # -- steps -----------------------------------------------------------------------------------

    def _step(self) -> DecodeRun | None:
        """Plan, run and apply one step.

        Returns:
            a run to take from here on if the next step is known to decode and nothing else.
        """
        copies_under_way = self._worker.copies_under_way
        plan = self.scheduler.schedule(self._now)
        assert plan is not None, "no step is under way"
        waited = self.scheduler.num_waiting > 0
        if not plan.rows:
            self._wait_for_copies(plan.swap_outs)
            return None
        outcome = self._worker.execute(work_of(plan.rows), len(plan.swap_ins), plan.swap_outs, self._now)
        self._now = outcome.end_s
        self._steps += 1
        self._rows += len(plan.rows)
        live = self._live
        samples = {r.request_id: live[r.request_id].token for r in plan.rows if r.sample is not None}
        result = StepResult(
            samples=samples,
            finished_swap_outs=tuple(outcome.finished_swap_outs),
            failed_swap_outs=(),
        )
        all_sample = len(samples) == self.scheduler.num_running
        ended = False
        self.scheduler.advance(plan, StepStart(swap_in_wait_s=outcome.swap_in_wait_s), self._now)
        for output in self.scheduler.apply(result, self._now):
            if output.finished:
                ended = True
                self._finish(live[output.request_id], self._now)
        if not all_sample or not self._config.fast_decode:
            return None
        self._submit_due(self._now)
        starved = waited and not ended and lacks_pages(plan, self.scheduler, copies_under_way)
        full = self.scheduler.num_running >= self._config.scheduler.max_rows
        if self.scheduler.num_waiting and not full and not starved:
            return None
        running = [live[request_id] for request_id in sorted(samples) if request_id in live]
        return self._decode_run(running, starved=starved)

    def _decode_run(self, running: list[LiveTurn], *, starved: bool) -> DecodeRun:
        return DecodeRun(
            self.scheduler,
            self._worker,
            running,
            starved=starved,
            submit_due=self._submit_due,
            next_arrival=self._next_arrival,
            finished=self._finish,
            stop_s=self._stop_s,
        )

    def _wait_for_copies(self, swap_outs: tuple) -> None:
        """Nothing can run: wait for copies to the host, or else for somebody new."""
        if swap_outs or self._worker.copies_under_way:
            outcome = self._worker.wait(swap_outs, self._now)
            self._now = outcome.end_s
            self.cache.swap_outs_ended(outcome.finished_swap_outs, ok=True)
        elif self._arrivals:
            self._now = max(self._now, self._next_arrival())
        else:
            raise StuckError(
                f"{self.scheduler.num_waiting} requests wait and nothing runs at {self._now:.3f} s"
            )

    def _pass_time_until(self, time_s: float) -> None:
        ended = self._worker.pass_time(time_s - self._now)
        self.cache.swap_outs_ended(ended, ok=True)
        self._now = time_s

    # -- turns -----------------------------------------------------------------------------------

    def _next_arrival(self) -> float:
        return self._arrivals[0][0] if self._arrivals else math.inf

    def _submit_due(self, now: float) -> None:
        """Queue the turns that have arrived."""
        while self._arrivals and self._arrivals[0][0] <= now:
            arrived_s, index, turn = heapq.heappop(self._arrivals)
            self._submit(index, turn, arrived_s)

    def _submit(self, index: int, turn: int, arrived_s: float) -> None:
        self._arrived_s.append(arrived_s)
        conversation = self._conversations[index]
        history = sum(t.input_tokens + t.output_tokens for t in conversation.turns[:turn])
        new = conversation.turns[turn]
        prompt = history + new.input_tokens
        if self.cache.config.pages_for(prompt + new.output_tokens) > self.cache.config.device_pages:
            self._refused += 1
            self._left_out += len(conversation.turns) - turn
            self._contents.pop(index, None)
            return
        if turn == 0:
            self._contents[index] = self._content(conversation, index)
        request = Request(
            id=self._next_id,
            conversation_id=conversation.id,
            params=_params(new.output_tokens),
            stop_token_ids=NO_STOP,
            tokens=self._contents[index],
            num_tokens=prompt,
            num_prompt_tokens=prompt,
            num_history_tokens=max(0, history - 1),  # the last one was produced, but never computed
            arrived_s=arrived_s,
        )
        token = SampledToken(token_id=index)
        self._live[request.id] = LiveTurn(request=request, conversation=index, turn=turn, token=token)
        self._next_id += 1
        self.scheduler.submit(request, arrived_s)

    def _content(self, conversation: SimConversation, index: int) -> np.ndarray:
        """Stands for a conversation's tokens: equal where prefixes are equal, different everywhere else."""
        tokens = np.full(conversation.num_tokens, index, np.int32)
        start = 0
        for segment in conversation.prefix:
            end = min(start + segment.tokens, conversation.turns[0].input_tokens)
            tokens[start:end] = self._segments.setdefault(segment.id, -1 - len(self._segments))
            start = end
        return tokens

    def _finish(self, live: LiveTurn, now: float) -> None:
        request = live.request
        del self._live[request.id]
        conversation = self._conversations[live.conversation]
        self._records.append(_record(live, conversation.id))
        following = live.turn + 1
        if following == len(conversation.turns):
            del self._contents[live.conversation]
        else:
            turn = conversation.turns[following]
            arrival_s = max(turn.arrival_s or 0.0, now + (turn.gap_s or 0.0))
            heapq.heappush(self._arrivals, (arrival_s, live.conversation, following))
        if self._progress is not None and len(self._records) % 100 == 0:
            self._progress(len(self._records) + self._left_out, self._turns)


def _record(live: LiveTurn, conversation_id: str) -> RequestRecord:
    request, counts = live.request, live.request.counts
    assert counts is not None and request.last_token_s is not None
    assert request.first_step_s is not None and request.first_token_s is not None
    return RequestRecord(
        conversation_id=conversation_id,
        turn=live.turn,
        arrived_s=request.arrived_s,
        first_step_s=request.first_step_s,
        first_token_s=request.first_token_s,
        end_s=request.last_token_s,
        output_tokens=request.num_output_tokens,
        tokens_new=counts.new,
        tokens_from_device=counts.from_device,
        tokens_from_host=counts.from_host,
        tokens_recomputed=counts.recomputed,
        tokens_restored=request.tokens_restored,
        suspensions=request.suspensions,
        swap_in_wait_s=request.swap_in_wait_s,
    )


@functools.lru_cache(maxsize=1 << 16)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0)
