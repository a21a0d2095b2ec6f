"""The conversations an engine knows: the log has all of them, memory those in use."""

import uuid
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from pensieve_jax.core.errors import (
    ConversationBusyError,
    InvalidArgumentError,
    UnknownConversationError,
)
from pensieve_jax.engine.state import ConversationState, copy_of, new_state, state_of
from pensieve_jax.store.log import ConversationLog, TurnRecord

MAX_IDLE_STATES = 10_000
"""Conversations without an unfinished turn that stay in memory beside the log."""


class ConversationRegistry:
    """Finished turns of conversations, in the log first and in memory after. Knows nothing of the cache."""

    def __init__(self, log: ConversationLog) -> None:
        self._log = log
        self._states: OrderedDict[str, ConversationState] = OrderedDict()
        """The last used one last."""

    def get(self, conversation_id: str) -> ConversationState:
        """A conversation's state, from memory or from the log.

        Raises:
            UnknownConversationError: there is none of that id.
            LogError: its log is damaged.
        """
        _check_known(conversation_id)
        state = self._states.get(conversation_id)
        if state is None:
            state = self._states[conversation_id] = state_of(self._log.load(conversation_id))
        self._states.move_to_end(conversation_id)
        if len(self._states) > MAX_IDLE_STATES:
            oldest = next((s for s in self._states.values() if s.logged and not s.busy), state)
            if oldest is not state:
                del self._states[oldest.id]
        return state

    def busy(self, conversation_id: str) -> ConversationState | None:
        """A conversation that has an unfinished turn; None if it hasn't, or isn't known."""
        state = self._states.get(conversation_id)
        return state if state is not None and state.busy else None

    def check_idle(self, conversation_id: str) -> None:
        """Check that a conversation has no unfinished turn. It isn't read, so it may be damaged.

        Raises:
            ConversationBusyError: it has one.
        """
        _check_known(conversation_id)
        if self.busy(conversation_id) is not None:
            raise ConversationBusyError(f"conversation {conversation_id!r} has an unfinished turn")

    def open(self, conversation_id: str | None, tenant: str | None = None) -> ConversationState:
        """The conversation of that id, which begins now if there is none; None begins one with a fresh id.

        Args:
            conversation_id: of the one to open or begin.
            tenant: whose it is, for ever; None: nobody's, or as it is.

        Raises:
            InvalidArgumentError: it is another tenant's, or the id or the tenant is no text.
        """
        if tenant is not None and not (tenant == "" or _is_id(tenant)):
            raise InvalidArgumentError(f"tenant: got {tenant!r}, expected a text")
        if conversation_id is None:
            conversation_id = uuid.uuid4().hex
        _check_id("conversation_id", conversation_id)
        try:
            state = self.get(conversation_id)
        except UnknownConversationError:
            self._log.create(conversation_id, tenant=tenant or "")
            state = new_state(conversation_id, logged=True, tenant=tenant or "")
            self._states[conversation_id] = state
            return state
        if tenant not in (None, state.tenant):
            raise InvalidArgumentError(
                f"tenant: got {tenant!r}, expected that of {conversation_id!r} or None"
            )
        return state

    def add_unlogged(self, state: ConversationState) -> None:
        """Know a conversation that the log doesn't have, until it is forgotten."""
        self._states[state.id] = state

    def ids(self) -> Iterator[str]:
        """Ids of all conversations of the log."""
        return self._log.ids()

    def logged_tokens(self, conversation_id: str) -> np.ndarray:
        """i32[n]: a conversation's tokens as the log has them now, whatever is in memory.

        Raises:
            UnknownConversationError: there is none of that id.
            LogError: its log is damaged.
        """
        return self._log.load(conversation_id).token_ids

    def append(self, state: ConversationState, record: TurnRecord) -> None:
        """Add a finished turn. It is durable when this returns.

        Raises:
            LogError: it could not be written; nothing changed.
        """
        if state.logged:
            self._log.append_turn(state.id, record)
        state.append(record)

    def fork(
        self, conversation_id: str, new_id: str | None, num_turns: int | None
    ) -> tuple[ConversationState, ConversationState]:
        """Begin a conversation with the first turns of another.

        Returns:
            (source, new one).
        """
        source = self.get(conversation_id)
        if num_turns is None:
            num_turns = source.num_turns
        if not isinstance(num_turns, int) or not 0 <= num_turns <= source.num_turns:
            raise InvalidArgumentError(f"num_turns: got {num_turns}, expected 0 to {source.num_turns}")
        new_id = uuid.uuid4().hex if new_id is None else new_id
        _check_id("new_id", new_id)
        self._log.fork(conversation_id, new_id, num_turns)
        new = self._states[new_id] = copy_of(source, new_id, num_turns)
        return source, new

    def rewind(self, conversation_id: str, num_turns: int) -> ConversationState:
        """Keep the first turns of an idle conversation."""
        self.check_idle(conversation_id)
        if not isinstance(num_turns, int):
            raise InvalidArgumentError(f"num_turns: got {num_turns!r}, expected an integer")
        self._log.rewind(conversation_id, num_turns)  # before it is read: this may cut damaged turns off
        state = self.get(conversation_id)
        state.cut(num_turns)
        return state

    def delete(self, conversation_id: str) -> None:
        """Remove an idle conversation from the log and from memory."""
        self.check_idle(conversation_id)
        self._log.delete(conversation_id)
        self.forget(conversation_id)

    def forget(self, conversation_id: str) -> None:
        """Remove a conversation from memory, if it is there."""
        self._states.pop(conversation_id, None)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _is_id(value: object) -> bool:
    """Whether it is a text that the log can hold: half a surrogate pair has no encoding."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_id(name: str, conversation_id: object) -> None:
    if not _is_id(conversation_id):
        raise InvalidArgumentError(f"{name}: got {conversation_id!r}, expected a text that is not empty")


def _check_known(conversation_id: object) -> None:
    """What can't be an id is the id of no conversation."""
    if not _is_id(conversation_id):
        raise UnknownConversationError(f"conversation {conversation_id!r}: there is none of this id")
