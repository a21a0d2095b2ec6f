"""The engine's thread, and the door that it shares with callers."""

import logging
import threading
from typing import Protocol

logger = logging.getLogger(__name__)


class Turnstile:
    """A reentrant lock that lets waiting threads through in turn.

    A plain lock starves callers, because a thread that steps in a loop takes it again at once. Here
    whoever waits for the lock holds the entrance, so the loop has to let him pass.
    """

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._inside = threading.RLock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._inside.acquire()
            self._depth += 1
            return
        with self._entrance:
            self._inside.acquire()
        self._owner = threading.get_ident()
        self._depth = 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._inside.release()


class Steppable(Protocol):
    """What the loop drives."""

    def step(self) -> bool:
        """Run one step; False if there was nothing to do."""
        ...

    def wait_for_work(self) -> bool:
        """Sleep until there is work; False once there will be none any more."""
        ...

    def give_up(self, error: Exception) -> None:
        """End everything: a step raised, so nothing can be trusted any more."""
        ...


class EngineLoop:
    """Runs steps in a thread of its own while there is work.

    All device work comes from this thread, so an interrupt of the caller's thread (Ctrl-C) never hits
    the middle of a step.
    """

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="pensieve-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether steps are still run."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread's end."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._engine.wait_for_work():
            try:
                self._engine.step()
            except Exception as error:
                logger.exception("a step can't be recovered from; the engine ends")
                self._engine.give_up(error)
                return
