"""Compiling several programs at once, and counting what is compiled."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX reports it for every program, read from the persistent cache or not."""


MOST_AT_ONCE = 8
"""Programs compiled at once at most: each takes host memory."""


def compile_together(traces: Iterable[Callable[[], Sequence[jax.stages.Lowered]]]) -> Iterator[None]:
    """Compile programs, as many at once as the host has cores, while the next ones are traced.

    A call of the jitted function that a program was lowered from, with arguments alike, finds it compiled.

    Args:
        traces: each traces programs; called one after the other in this thread, for Python gains nothing
            by several.

    Yields:
        once for each of `traces`, as soon as its programs and those before it are compiled.

    Raises:
        Exception: whatever tracing or compiling raised; compilations under way are waited for.
    """
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1), "compile") as pool:
        waiting: deque[list[Future]] = deque()
        for trace in traces:
            waiting.append([pool.submit(program.compile) for program in trace()])
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
