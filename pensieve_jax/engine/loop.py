"""The engine's thread: it alone touches the engine's state. Callers send it calls and wait for replies."""

import asyncio
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Protocol

logger = logging.getLogger(__name__)

LINGER_S, LONGEST_LINGER_S = 0.0005, 0.005
"""After a call the thread waits so long for another before it steps, and no longer in all. Who starts many
turns one after the other has them in one step then, not each in a step of its own; the device still computes
the step before."""

type _Outcome = tuple[bool, Any]
"""(True, result) or (False, what was raised)."""


class Steppable(Protocol):
    """What the thread drives."""

    def step(self) -> bool:
        """Run one step; False if there was nothing to do."""
        ...

    def give_up(self, error: Exception) -> None:
        """End everything: a step raised, so nothing can be trusted any more."""
        ...


class EngineThread:
    """Runs calls in the order in which they come and, if it is to, steps between them while there is work.

    All device work comes from this thread, so an interrupt of a caller (Ctrl-C) never hits the middle of a
    step. No caller holds a lock that the thread or another caller needs either: there is none. Whoever is
    interrupted while he waits for a reply breaks off his own waiting alone; his call is carried out.

    The thread doesn't keep its engine alive and ends with it.
    """

    def __init__(self, engine: Steppable, *, steps_alone: bool) -> None:
        """Args:
        engine: what to drive.
        steps_alone: run steps whenever there is work; False: run calls alone, some of which may be steps.
        """
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        alone = weakref.ref(engine) if steps_alone else None
        self._thread = threading.Thread(
            target=_run, args=(self._calls, alone), name="pensieve-engine", daemon=True
        )
        weakref.finalize(engine, self._calls.put, None)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def call[T](self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between steps, and wait for its result or its error."""
        if self.is_current:
            return function()
        replies: SimpleQueue[_Outcome] = SimpleQueue()
        self._calls.put(functools.partial(_answer, function, replies.put))
        ok, value = replies.get()
        if ok:
            return value
        try:
            raise value
        finally:
            del value  # its traceback holds this frame

    async def acall[T](self, function: Callable[[], T]) -> T:
        """As `call`, for asyncio. If the task is cancelled, the function is run all the same."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def reply(outcome: _Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, outcome)

        self._calls.put(functools.partial(_answer, function, reply))
        return await future

    def post(self, function: Callable[[], object]) -> None:
        """Run a function in the thread after the calls that came before. Doesn't wait; errors are logged."""
        self._calls.put(functools.partial(_answer, function, _log_error))


class HasThread(Protocol):
    """Whose methods may be marked `between_steps`."""

    _thread: EngineThread


def between_steps[S: HasThread, **P, T](
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Let a method run in the engine's thread, whichever thread calls it."""

    @functools.wraps(method)
    def call(engine: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return engine._thread.call(functools.partial(method, engine, *args, **kwargs))

    return call


def _run(calls: SimpleQueue, alone: weakref.ref[Steppable] | None) -> None:
    busy = False
    while True:
        with contextlib.suppress(Empty):
            call = calls.get(block=not busy)
            until = time.perf_counter() + LONGEST_LINGER_S
            while True:
                if call is None:
                    return
                call()
                del call  # it holds the engine
                call = calls.get(timeout=LINGER_S if time.perf_counter() < until else 0)
        engine = None if alone is None else alone()
        busy = engine is not None and _step(engine)
        del engine


def _step(engine: Steppable) -> bool:
    try:
        return engine.step()
    except Exception as error:
        logger.exception("a step can't be recovered from; the engine ends")
        engine.give_up(error)
        return False


def _answer(function: Callable[[], object], reply: Callable[[_Outcome], None]) -> None:
    try:
        outcome = (True, function())
    except BaseException as error:  # noqa: BLE001  (whatever it is, it belongs to the one who called)
        outcome = (False, error)
    reply(outcome)


def _settle(future: asyncio.Future, outcome: _Outcome) -> None:
    ok, value = outcome
    if future.done():
        return
    if ok:
        future.set_result(value)
    else:
        future.set_exception(value)


def _log_error(outcome: _Outcome) -> None:
    ok, value = outcome
    if not ok:
        logger.error("a call that nobody waits for failed", exc_info=value)
