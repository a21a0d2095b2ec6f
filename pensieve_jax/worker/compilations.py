"""Counting what is compiled."""

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX reports it for every program, read from the persistent cache or not."""


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
