"""Compiling several programs at once, and counting what is compiled."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax.monitoring

from pensieve_jax.worker.programs import Call

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX reports it for every program, read from the persistent cache or not."""


MOST_AT_ONCE = 8
"""Programs compiled at once at most: each takes host memory."""


def compile_together(steps: Iterable[Sequence[Call]]) -> Iterator[None]:
    """Make programs ready, as many at once as the host has cores: from the store, or compiled while the next
    ones are traced.

    A call of a program with arguments alike finds it ready.

    Args:
        steps: the programs of each; traced one after the other in this thread, for Python gains nothing by
            several.

    Yields:
        once for each of `steps`, as soon as its programs and those before it are ready.

    Raises:
        Exception: whatever tracing or compiling raised; compilations under way are waited for.
    """
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1), "compile") as pool:
        found = [[(call, pool.submit(call.load)) for call in calls] for calls in steps]
        waiting: deque[list[Future]] = deque()
        for calls in found:
            missing = [call for call, stored in calls if not stored.result()]
            waiting.append([pool.submit(call.finish, call.lower()) for call in missing])
            while waiting and all(future.done() for future in waiting[0]):
                _results(waiting.popleft())
                yield
        while waiting:
            _results(waiting.popleft())
            yield


def _results(futures: Iterable[Future]) -> None:
    for future in futures:
        future.result()


class CompilationCounter:
    """Programs that this process has compiled, or read from the persistent cache."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Count no more."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
