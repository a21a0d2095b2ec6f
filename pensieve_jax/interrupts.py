"""Ctrl-C as a request instead of an exception."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pensieve_jax.core.errors import PensieveError


@contextmanager
def on_interrupt(action: Callable[[], None]) -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C calls `action` in a thread of its own and raises nothing.

    An exception in the middle of anything would be hard to recover from, and a signal handler must not take
    locks, hence the thread. Later Ctrl-Cs do nothing: the first one is being obeyed. Leaving waits for the
    action's end. Outside the main thread signals can't be handled, so nothing is changed there.

    Args:
        action: may be called while the main thread is anywhere inside.

    Yields:
        an event that Ctrl-C sets before it calls `action`.
    """
    interrupted = threading.Event()
    worker = threading.Thread(target=action, name="pensieve-interrupt", daemon=True)

    def handle(_number: int, _frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            worker.start()

    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        if interrupted.is_set():
            worker.join()
        signal.signal(signal.SIGINT, before)


@contextmanager
def closing_on_interrupt(close: Callable[[], None]) -> Iterator[None]:
    """While inside, Ctrl-C closes an engine, and what is inside ends with the errors of a closed engine.

    Args:
        close: the engine's method.

    Raises:
        KeyboardInterrupt: in place of those errors, after the engine is closed.
    """
    with on_interrupt(close) as interrupted:
        try:
            yield
        except PensieveError:
            if not interrupted.is_set():
                raise
    if interrupted.is_set():
        raise KeyboardInterrupt
