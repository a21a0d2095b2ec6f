"""A turn as its caller holds it: tokens as they come, the result, cancelling."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.types import FinishReason, SampledToken, TurnReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDelta:
    """What came since the last delta."""

    text: str
    """New text, safe to show: no half character, no beginning of a stop string."""
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """A turn that has ended."""

    conversation_id: str
    text: str
    """The answer's text; empty without a tokenizer, and after a cancel."""
    tokens: tuple[SampledToken, ...]
    """The answer's tokens, the end token included."""
    finish_reason: FinishReason
    receipt: TurnReceipt | None
    """None if the turn never ran."""
    note: str | None
    """Why the conversation's tokens differ from encoding the whole chat at once; None if they don't."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's token ids."""
        return tuple(token.token_id for token in self.tokens)


class TurnDriver(Protocol):
    """What a turn needs of its engine."""

    def advance(self, turn: "Turn", seen: int) -> None:
        """Return when the turn may have news beyond `seen`: wait for the engine's thread, or run a step."""
        ...

    @property
    def has_thread(self) -> bool:
        """Whether a thread runs the steps, so that nobody needs to call `advance`."""
        ...

    def cancel(self, turn: "Turn") -> None:
        """End the turn and roll its conversation back, if it hasn't ended."""
        ...

    def cancel_soon(self, turn: "Turn") -> None:
        """As `cancel`, before the next step, without waiting for the one that is under way."""
        ...


class Turn:
    """Handle of one turn. Iterate for deltas (`for` or `async for`), or take `result()` (or `await` it).

    Leaving an iteration before its end cancels the turn, so that nobody decodes for a caller who is gone.
    """

    def __init__(self, driver: TurnDriver, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self._driver = driver
        self._deltas: deque[TurnDelta] = deque()
        self._result: TurnResult | None = None
        self._error: PensieveError | None = None
        self.news = 0
        """How often something came: a delta or the end."""
        self._listeners: list[Callable[[], None]] = []
        """Called after each news. No lock guards them: a caller who is interrupted while he holds one would
        stop the engine's thread. So a listener is added first, and `news` is looked at after."""

    @property
    def done(self) -> bool:
        """Whether the turn has ended."""
        return self._result is not None or self._error is not None

    def cancel(self) -> None:
        """End the turn now and put its conversation back to the end of its last finished turn. KV of earlier
        turns stays. Nothing happens if the turn has ended."""
        if not self.done:
            self._driver.cancel(self)

    def result(self) -> TurnResult:
        """Wait for the end.

        Returns:
            the result; its `finish_reason` tells a cancelled turn.

        Raises:
            PensieveError: the turn failed; the conversation is back at its last finished turn.
        """
        while not self.done:
            self._driver.advance(self, self.news)
        return self._outcome()

    def __iter__(self) -> Iterator[TurnDelta]:
        try:
            ended = False
            while not ended:
                seen, ended = self.news, self.done
                while self._deltas:
                    yield self._deltas.popleft()
                if not ended:
                    self._driver.advance(self, seen)
            self._outcome()
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[TurnDelta]:
        try:
            async for _ in self._wake_ups():
                while self._deltas:
                    yield self._deltas.popleft()
            self._outcome()
        finally:
            self._abandon()

    def __await__(self) -> Generator[None, None, TurnResult]:
        return self._wait().__await__()

    async def _wait(self) -> TurnResult:
        try:
            async for _ in self._wake_ups():
                pass
            return self._outcome()
        finally:
            self._abandon()  # of a task that is cancelled while it waits

    async def _wake_ups(self) -> AsyncIterator[None]:
        """Yields whenever there may be news, the last time after the end."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        self._listeners.append(wake)
        try:
            while True:
                woken.clear()
                seen, ended = self.news, self.done
                yield
                if ended:
                    return
                if self._driver.has_thread:
                    await woken.wait()
                else:
                    await asyncio.to_thread(self._driver.advance, self, seen)
        finally:
            self._listeners.remove(wake)

    def _abandon(self) -> None:
        """Nobody waits for the turn any more. The event loop must not wait for a step here."""
        if not self.done:
            self._driver.cancel_soon(self)

    def _outcome(self) -> TurnResult:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    # -- for the engine --------------------------------------------------------------------------

    def push(self, delta: TurnDelta) -> None:
        """Give a delta to whoever iterates."""
        self._tell(lambda: self._deltas.append(delta))

    def end(self, outcome: TurnResult | PensieveError) -> None:
        """Give the result, or the error it ended with."""

        def settle() -> None:
            if isinstance(outcome, PensieveError):
                self._error = outcome
            else:
                self._result = outcome

        self._tell(settle)

    def wait_for_news(self, seen: int) -> None:
        """Sleep until `news` is more than `seen`."""
        bell: SimpleQueue[None] = SimpleQueue()

        def ring() -> None:
            bell.put(None)

        self._listeners.append(ring)
        try:
            while self.news <= seen:
                bell.get()
        finally:
            self._listeners.remove(ring)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call a function after each news, in the engine's thread."""
        self._listeners.append(listener)

    def _tell(self, change: Callable[[], None]) -> None:
        change()
        self.news += 1
        for listener in tuple(self._listeners):
            listener()
