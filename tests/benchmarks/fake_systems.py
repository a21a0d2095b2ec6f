"""Systems whose behaviour is known, for tests of the driver."""

from collections import deque

import numpy as np

from benchmarks.serving.systems.base import (
    ContextCounts,
    Ended,
    FirstToken,
    RefusedError,
    SystemFacts,
)


class StepClock:
    """A clock that a fake system moves; skipping is recorded."""

    def __init__(self):
        self.now_s = 100.0
        self.skipped_s = 0.0

    def __call__(self):
        return self.now_s

    def pass_until(self, time_s):
        if time_s > self.now_s:
            self.skipped_s += time_s - self.now_s
            self.now_s = time_s


class OneAtATime:
    """Answers one turn after the other: a first token after `prefill_s`, each further one after `token_s`."""

    def __init__(self, clock, *, prefill_s=1.0, token_s=0.5, largest=1000, keeps=False, leaks=False):
        self.facts = SystemFacts(name="fake", versions={}, tells_tiers=True)
        self.clock, self.prefill_s, self.token_s, self.largest = clock, prefill_s, token_s, largest
        self.keeps, self.leaks = keeps, leaks
        self.waiting, self.seen, self.resets, self.settled = deque(), [], 0, 0
        self.step = 0
        self.polls = 0

    def submit(self, request):
        if len(request.prompt()) + request.output_tokens > self.largest:
            raise RefusedError("too large")
        self.seen.append((self.clock() - 100.0, request))
        self.waiting.append(request)

    def poll(self, timeout_s):
        self.polls += 1
        request = self.waiting[0]
        first = self.step == 0
        self.clock.now_s += self.prefill_s if first else self.token_s
        self.step += 1
        events = []
        if first:
            events.append(FirstToken(conversation_id=request.conversation_id, time_s=self.clock()))
        if self.step == request.output_tokens:
            self.step = 0
            self.waiting.popleft()
            history = sum(map(len, request.history))
            kept = max(0, history - 1) if self.keeps else 0
            kept += 5 if self.leaks and not history else 0
            counts = ContextCounts(
                new=len(request.new), from_device=kept, recomputed=0 if self.keeps else max(0, history - 1)
            )
            output = np.full(request.output_tokens, 7, np.int32)
            events.append(
                Ended(
                    conversation_id=request.conversation_id,
                    time_s=self.clock(),
                    output=output,
                    counts=counts,
                )
            )
        return events

    def settle(self):
        self.settled += 1

    def reset(self):
        self.resets += 1
        self.waiting.clear()
        self.step = 0

    def counters(self):
        return {"polls": self.polls}

    def memory_bytes(self):
        return 12

    def close(self):
        pass
