"""What the engine keeps in memory of a conversation; the log has it all."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pensieve_jax.core.messages import Message
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.answer import Answer
from pensieve_jax.engine.turn import Turn
from pensieve_jax.scheduler.request import Request
from pensieve_jax.store.log import ConversationRecord, TurnRecord


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveTurn:
    """A turn that waits or runs in the scheduler."""

    state: "ConversationState"
    turn: Turn
    request: Request
    answer: Answer
    messages: tuple[Message, ...] | None
    note: str | None


@dataclass(slots=True, kw_only=True, eq=False)
class ConversationState:
    """Finished turns of a conversation, and the turn that isn't."""

    id: str
    logged: bool
    """Whether the log has it; False for the throw-away conversations of batch generation."""
    tokens: np.ndarray
    """i32[n]: all tokens of all finished turns."""
    turn_ends: list[int]
    """Tokens up to and including each finished turn."""
    history: list[tuple[Message, ...] | None]
    """Messages of each finished turn, the answer last; None for a turn given as tokens."""
    tenant: str = ""
    """Its KV is shared with nobody of another tenant."""
    active: ActiveTurn | None = None
    queued: deque[tuple[Turn, Any, SamplingParams | None]] = field(default_factory=deque)
    """(turn, input, sampling parameters) of turns that came while another one ran."""

    @property
    def num_turns(self) -> int:
        """Finished turns."""
        return len(self.turn_ends)

    @property
    def busy(self) -> bool:
        """Whether a turn is unfinished."""
        return self.active is not None

    def messages(self) -> tuple[Message, ...] | None:
        """All messages so far; None if a turn was given as tokens, so that nobody knows them all."""
        known: list[Message] = []
        for turn in self.history:
            if turn is None:
                return None
            known.extend(turn)
        return tuple(known)

    def append(self, record: TurnRecord) -> None:
        """Add a finished turn."""
        self.tokens = np.concatenate([self.tokens, record.input_ids, record.output_ids])
        self.turn_ends.append(len(self.tokens))
        self.history.append(_with_answer(record))

    def cut(self, num_turns: int) -> None:
        """Keep the first `num_turns` finished turns."""
        self.tokens = self.tokens[: self.tokens_of(num_turns)]
        del self.turn_ends[num_turns:], self.history[num_turns:]

    def tokens_of(self, num_turns: int) -> int:
        """Tokens of the first `num_turns` finished turns."""
        return self.turn_ends[num_turns - 1] if num_turns else 0


def new_state(conversation_id: str, *, logged: bool, tenant: str = "") -> ConversationState:
    """A conversation without turns."""
    empty = np.zeros(0, np.int32)
    return ConversationState(
        id=conversation_id, logged=logged, tokens=empty, turn_ends=[], history=[], tenant=tenant
    )


def state_of(record: ConversationRecord) -> ConversationState:
    """A conversation as the log has it."""
    ends = np.cumsum([len(t.input_ids) + len(t.output_ids) for t in record.turns], dtype=np.int64)
    return ConversationState(
        id=record.id,
        logged=True,
        tenant=record.tenant,
        tokens=record.token_ids,
        turn_ends=[int(end) for end in ends],
        history=[_with_answer(turn) for turn in record.turns],
    )


def copy_of(source: ConversationState, new_id: str, num_turns: int) -> ConversationState:
    """A fork of the first `num_turns` finished turns."""
    return ConversationState(
        id=new_id,
        logged=source.logged,
        tenant=source.tenant,
        tokens=source.tokens[: source.tokens_of(num_turns)],
        turn_ends=source.turn_ends[:num_turns],
        history=source.history[:num_turns],
    )


def _with_answer(record: TurnRecord) -> tuple[Message, ...] | None:
    if record.messages is None:
        return None
    return (*record.messages, Message(role="assistant", content=record.output_text))
