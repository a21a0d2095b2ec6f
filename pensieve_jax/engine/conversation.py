"""A conversation as its user holds it."""

from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.inputs import TurnInput
from pensieve_jax.engine.turn import Turn, TurnResult

if TYPE_CHECKING:
    from pensieve_jax.engine.engine import Engine


class Conversation:
    """Handle of one conversation. The engine's log holds the conversation; handles may come and go."""

    def __init__(self, engine: "Engine", conversation_id: str) -> None:
        """Not to be called directly: see `Engine.conversation`."""
        self._engine = engine
        self.id = conversation_id

    @overload
    def send(
        self, given: TurnInput, params: SamplingParams | None = None, *, stream: Literal[False] = False
    ) -> TurnResult: ...

    @overload
    def send(
        self, given: TurnInput, params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> Turn: ...

    def send(
        self, given: TurnInput, params: SamplingParams | None = None, *, stream: bool = False
    ) -> TurnResult | Turn:
        """Add a turn: only what is new, never the history.

        Args:
            given: the user's text, messages, or token ids.
            params: how to choose tokens and when to stop; None: greedy until an end token.
            stream: give the turn back at once, to be iterated with `for` or `async for`.

        Returns:
            the result, or with `stream` the turn.

        Raises:
            PensieveError: see `Engine.submit`; nothing has changed then.
        """
        if stream:
            return self._engine.submit(self.id, given, params)
        turn = Turn(self._engine, self.id)
        try:
            self._engine.begin(turn, given, params)
            return turn.result()
        finally:
            turn.cancel()  # of a caller who was interrupted, wherever that was

    async def asend(self, given: TurnInput, params: SamplingParams | None = None) -> TurnResult:
        """As `send`, for asyncio. A cancelled task cancels the turn."""
        return await (await self._engine.asubmit(self.id, given, params))

    def fork(self, new_id: str | None = None, *, num_turns: int | None = None) -> "Conversation":
        """Begin a new conversation with this one's first turns; see `Engine.fork`."""
        return self._engine.fork(self.id, new_id, num_turns=num_turns)

    def rewind(self, *, num_turns: int) -> None:
        """Go back to the end of an earlier turn; see `Engine.rewind`."""
        self._engine.rewind(self.id, num_turns=num_turns)

    def delete(self) -> None:
        """Forget the conversation; see `Engine.delete`."""
        self._engine.delete(self.id)

    def warm(self) -> int:
        """Say that the next turn is near, as when the user has begun to type: what only the host tier has of
        this conversation is loaded with the next step, or by itself if nothing runs.

        It takes pages that are free or hold idle conversations, never those of running turns. The
        conversation counts as active now. Nothing happens while it has an unfinished turn.

        Returns:
            chunks that are to be loaded, if there is room for all.

        Raises:
            UnknownConversationError: it was deleted.
        """
        return self._engine.warm(self.id)

    async def awarm(self) -> int:
        """As `warm`, for asyncio."""
        return await self._engine.arun(self.warm)

    def release(self) -> None:
        """Say that the next turn is far: the conversation's KV goes at once. Its tokens stay in the log, and
        a later turn computes them again.

        Raises:
            UnknownConversationError: it was deleted.
            ConversationBusyError: it has an unfinished turn.
        """
        self._engine.release(self.id)

    async def arelease(self) -> None:
        """As `release`, for asyncio."""
        await self._engine.arun(self.release)

    @property
    def priority(self) -> float:
        """Factor on what the conversation's KV is worth when pages are short, above 0; at first 1. Policies
        that look at time alone take no note of it. Lasts as long as the engine; a fork has its source's."""
        return self._engine.hints(self.id).priority

    @priority.setter
    def priority(self, value: float) -> None:
        self._engine.set_hints(self.id, priority=value)

    @property
    def time_to_live_s(self) -> float | None:
        """Seconds without activity after which the conversation's KV goes; None, as at first: no limit. Its
        tokens stay in the log. Lasts as long as the engine; a fork has its source's."""
        return self._engine.hints(self.id).time_to_live_s

    @time_to_live_s.setter
    def time_to_live_s(self, value: float | None) -> None:
        self._engine.set_hints(self.id, time_to_live_s=value)

    @property
    def num_turns(self) -> int:
        """Finished turns."""
        return self._engine.num_turns(self.id)

    @property
    def token_ids(self) -> np.ndarray:
        """i32[n]: all tokens of the finished turns."""
        return self._engine.token_ids(self.id)
