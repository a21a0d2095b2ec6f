"""The open-loop driver: turns come when they are due, whatever the system makes of them.

Conversations begin at their times; a further turn comes its think time after the answer before it. A turn's
times count from when it was due, not from when the system found a moment to take it.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.serving.clock import RunClock
from benchmarks.serving.systems.base import (
    ContextCounts,
    Ended,
    FirstToken,
    RefusedError,
    ServingError,
    System,
    TurnRequest,
)
from benchmarks.workloads import TokenConversation, Workload
from pensieve_jax.simulator.metrics import RequestRecord

POLL_S = 0.25
"""Longest wait for a system that runs elsewhere, so that progress is shown."""
CHECKED_TOKENS = 16
"""Conversations whose first so many tokens differ share nothing in pages of that size or larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    now_s: float
    arrived: int
    ended: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What has happened. Times are seconds since the start of the run."""

    records: tuple[RequestRecord, ...]
    """Turns in the order in which they ended."""
    arrivals_s: tuple[float, ...]
    """When each turn came, also of those that haven't ended."""
    refused: int
    """Turns that were too large for the system; their conversations ended there."""
    unfinished: int
    """Turns that were given up at the end of the time for draining."""
    end_s: float
    skipped_s: float
    """Time in which nothing ran and which was not waited for."""
    latest_s: float
    """How much later than due a turn was handed over at most."""


@dataclass(slots=True)
class _InFlight:
    index: int
    turn: int
    due_s: float
    first_token_s: float | None = None


@dataclass(slots=True)
class _Run:
    """A run under way."""

    system: System
    conversations: tuple[TokenConversation, ...]
    clock: RunClock
    begin_s: float
    last_arrival_s: float
    due: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of (time, conversation, turn)."""
    history: dict[int, list[np.ndarray]] = field(default_factory=dict)
    in_flight: dict[str, _InFlight] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    refused: int = 0
    latest_s: float = 0.0

    def now(self) -> float:
        return self.clock() - self.begin_s

    def next_due_s(self) -> float:
        return self.due[0][0] if self.due else math.inf

    def push(self, time_s: float, index: int, turn: int) -> None:
        if time_s <= self.last_arrival_s:
            heapq.heappush(self.due, (time_s, index, turn))
        else:
            self.history.pop(index, None)

    def submit_due(self) -> None:
        while self.due and self.due[0][0] <= self.now():
            due_s, index, turn = heapq.heappop(self.due)
            conversation = self.conversations[index]
            history = self.history.setdefault(index, [])
            request = TurnRequest(
                conversation_id=conversation.id,
                turn=turn,
                history=tuple(history),
                new=conversation.inputs[turn],
                output_tokens=conversation.shape.turns[turn].output_tokens,
            )
            self.arrivals_s.append(due_s)
            self.latest_s = max(self.latest_s, self.now() - due_s)
            try:
                self.system.submit(request)
            except RefusedError:
                self.refused += 1
                del self.history[index]
                continue
            history.append(request.new)
            self.in_flight[conversation.id] = _InFlight(index=index, turn=turn, due_s=due_s)

    def take(self, event: FirstToken | Ended) -> None:
        flight = self.in_flight[event.conversation_id]
        time_s = event.time_s - self.begin_s
        if isinstance(event, FirstToken):
            flight.first_token_s = time_s
            return
        del self.in_flight[event.conversation_id]
        conversation = self.conversations[flight.index]
        expected = conversation.shape.turns[flight.turn].output_tokens
        if len(event.output) != expected:
            raise ServingError(
                f"{self.system.facts.name}: a turn ended with {len(event.output)} tokens, expected {expected}"
            )
        self.records.append(_record(flight, event, time_s))
        following = flight.turn + 1
        if following == conversation.num_turns:
            del self.history[flight.index]
            return
        self.history[flight.index].append(event.output)
        turn = conversation.shape.turns[following]
        self.push(max(turn.arrival_s or 0.0, time_s + (turn.gap_s or 0.0)), flight.index, following)


def serve(
    system: System,
    workload: Workload,
    clock: RunClock,
    *,
    stop_s: float = math.inf,
    drain_s: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
) -> ServedRun:
    """Serve a workload once. The system is empty when it begins and when it ends.

    Args:
        system: what to measure; it is reset before and after.
        workload: what comes.
        clock: of the run, and of the system if it takes one.
        stop_s: turns that would come later don't.
        drain_s: how long after `stop_s` unfinished turns are waited for.
        progress: is told how far it is, after each step or wait.

    Raises:
        ServingError: the system failed, broke its promise of lengths, or held what it should not have.
    """
    system.reset()
    skipped_s = clock.skipped_s
    run = _Run(system, workload.conversations, clock, begin_s=clock(), last_arrival_s=stop_s)
    for index, conversation in enumerate(workload.conversations):
        run.push(conversation.shape.turns[0].arrival_s or 0.0, index, 0)
    while run.in_flight or run.due:
        run.submit_due()
        if run.in_flight:
            wait_s = min(POLL_S, max(0.0, run.next_due_s() - run.now()))
            for event in system.poll(wait_s):
                run.take(event)
        elif run.due:
            system.settle()
            clock.pass_until(run.begin_s + run.next_due_s())
        if progress is not None:
            progress(
                Progress(
                    now_s=run.now(),
                    arrived=len(run.arrivals_s),
                    ended=len(run.records),
                    in_flight=len(run.in_flight),
                )
            )
        if run.now() > stop_s + drain_s:
            break
    end_s, unfinished = run.now(), len(run.in_flight)
    system.reset()
    _check_no_leak(run)
    return ServedRun(
        records=tuple(run.records),
        arrivals_s=tuple(run.arrivals_s),
        refused=run.refused,
        unfinished=unfinished,
        end_s=end_s,
        skipped_s=clock.skipped_s - skipped_s,
        latest_s=run.latest_s,
    )


def _record(flight: _InFlight, event: Ended, end_s: float) -> RequestRecord:
    counts: ContextCounts = event.counts
    first_s = end_s if flight.first_token_s is None else flight.first_token_s
    return RequestRecord(
        conversation_id=event.conversation_id,
        turn=flight.turn,
        arrived_s=flight.due_s,
        first_step_s=flight.due_s + event.queue_s,
        first_token_s=first_s,
        end_s=end_s,
        output_tokens=len(event.output),
        tokens_new=counts.new,
        tokens_from_device=counts.from_device,
        tokens_from_host=counts.from_host,
        tokens_recomputed=counts.recomputed,
        tokens_restored=counts.restored,
        suspensions=counts.suspensions,
        swap_in_wait_s=counts.swap_in_wait_s,
    )


def _check_no_leak(run: _Run) -> None:
    """The first turn of a conversation that begins like no other can't have been cached in this run."""
    begins: dict[bytes, int] = {}
    for conversation in run.conversations:
        key = conversation.inputs[0][:CHECKED_TOKENS].tobytes()
        begins[key] = begins.get(key, 0) + 1
    alone = {c.id for c in run.conversations if begins[c.inputs[0][:CHECKED_TOKENS].tobytes()] == 1}
    for record in run.records:
        cached = record.tokens_from_device + record.tokens_from_host
        if record.turn == 0 and cached and record.conversation_id in alone:
            raise ServingError(
                f"{run.system.facts.name}: {cached} tokens of the first turn of {record.conversation_id!r} "
                "were cached: something is left of an earlier run"
            )
