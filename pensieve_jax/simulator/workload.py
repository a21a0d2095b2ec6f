"""Conversations as the simulator sees them: token counts and times, no text; and their JSON-lines form.

One line is one conversation:

    {"id": "a", "turns": [{"input_tokens": 1120, "output_tokens": 300, "arrival_s": 0.5},
                          {"input_tokens": 40, "output_tokens": 210, "gap_s": 31.2}],
     "prefix": [{"id": "system prompt", "tokens": 1000}]}

`arrival_s`, `gap_s` and `prefix` may be left out.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pensieve_jax.core.errors import InvalidArgumentError

MAX_CONTEXT_TOKENS = 16_384
"""Longest conversation of the paper's evaluation (section 6.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTurn:
    """One turn: what comes new and what is answered.

    It arrives at `arrival_s`, but not before `gap_s` have passed since the answer before it.
    """

    input_tokens: int
    """New tokens of the user, at least 1; in a first turn with the conversation's prefix."""
    output_tokens: int
    """Tokens of the answer, at least 1."""
    gap_s: float | None = None
    """Seconds between the last answer and this turn; None for 0. Has no meaning in a first turn."""
    arrival_s: float | None = None
    """Seconds since the start of the simulation; None: whenever `gap_s` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSegment:
    """A run of tokens at the start of a conversation. Equal ids in equal places are equal tokens."""

    id: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConversation:
    """One conversation; at least one turn."""

    id: str
    turns: tuple[SimTurn, ...]
    prefix: tuple[PrefixSegment, ...] = ()
    """What the first turn's input begins with, as far as others may begin with it too."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns together: the context at the end."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)


def cut_to_context(conversation: SimConversation, max_tokens: int) -> SimConversation | None:
    """The conversation's first turns, as many as fit a context.

    A first turn that doesn't fit loses the end of its input. None if even that leaves no token of it.
    """
    used, kept = 0, 0
    for turn in conversation.turns:
        used += turn.input_tokens + turn.output_tokens
        if used > max_tokens:
            break
        kept += 1
    if kept == len(conversation.turns):
        return conversation
    if kept:
        return replace(conversation, turns=conversation.turns[:kept])
    first = conversation.turns[0]
    room = max_tokens - first.output_tokens
    if room < 1:
        return None
    return replace(conversation, turns=(replace(first, input_tokens=min(room, first.input_tokens)),))


def read_jsonl(path: Path) -> list[SimConversation]:
    """Read conversations in the form of this module's text.

    Raises:
        InvalidArgumentError: a line is not of that form; the text says which and why.
        OSError: the file can't be read.
    """
    conversations = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                conversations.append(conversation_of(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgumentError(f"{path.name}, line {number}: {_reason(error)}") from error
    return conversations


def write_jsonl(path: Path, conversations: Iterable[SimConversation]) -> None:
    """Write conversations in the form of this module's text.

    Raises:
        OSError: the file can't be written.
    """
    with path.open("w", encoding="utf-8") as file:
        for conversation in conversations:
            file.write(json.dumps(as_json(conversation)) + "\n")


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def conversation_of(value: Any) -> SimConversation:
    """A conversation from the value of a line.

    Raises:
        ValueError, KeyError, TypeError: the value is not of that form.
    """
    _check_keys(value, {"id", "turns", "prefix"})
    turns = tuple(_turn(turn) for turn in value["turns"])
    if not turns:
        raise ValueError("turns: got none, expected at least one")
    prefix = []
    for segment in value.get("prefix", ()):
        _check_keys(segment, {"id", "tokens"})
        prefix.append(PrefixSegment(id=str(segment["id"]), tokens=_count(segment, "tokens")))
    return SimConversation(id=str(value["id"]), turns=turns, prefix=tuple(prefix))


def _turn(value: Any) -> SimTurn:
    _check_keys(value, {"input_tokens", "output_tokens", "gap_s", "arrival_s"})
    return SimTurn(
        input_tokens=_count(value, "input_tokens"),
        output_tokens=_count(value, "output_tokens"),
        gap_s=_seconds(value, "gap_s"),
        arrival_s=_seconds(value, "arrival_s"),
    )


def _check_keys(value: Any, known: set[str]) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"got {value!r}, expected an object with the keys {', '.join(sorted(known))}")
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(f"{unknown[0]}: got this key, expected only {', '.join(sorted(known))}")


def _count(value: Mapping[str, Any], name: str) -> int:
    count = value[name]
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{name}: got {count!r}, expected an integer of at least 1")
    return count


def _seconds(value: Mapping[str, Any], name: str) -> float | None:
    seconds = value.get(name)
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise ValueError(f"{name}: got {seconds!r}, expected a number of at least 0")
    return float(seconds)


def as_json(conversation: SimConversation) -> dict[str, Any]:
    """The value of a conversation's line."""
    turns = []
    for turn in conversation.turns:
        fields: dict[str, Any] = {"input_tokens": turn.input_tokens, "output_tokens": turn.output_tokens}
        fields |= {} if turn.gap_s is None else {"gap_s": turn.gap_s}
        fields |= {} if turn.arrival_s is None else {"arrival_s": turn.arrival_s}
        turns.append(fields)
    value: dict[str, Any] = {"id": conversation.id, "turns": turns}
    if conversation.prefix:
        value["prefix"] = [{"id": segment.id, "tokens": segment.tokens} for segment in conversation.prefix]
    return value
