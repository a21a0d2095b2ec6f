"""Reads recorded conversations and traces into the simulator's one form."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from pensieve_jax.conversations import ConversationReader, SourceConversation, UltraChatReader
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.mooncake import link_requests
from pensieve_jax.simulator.workload import PrefixSegment, SimConversation, SimTurn, read_jsonl

type CountTokens = Callable[[str], int]

TOKENS_PER_ASCII, TOKENS_PER_OTHER = 0.243, 2.37
"""Tokens of a character: least squares over 400 ShareGPT conversations with the tokenizer of SmolLM2."""
RAGPULSE_TOKENS = {
    "sys_prompt": 191,
    "passages_ids": 330,
    "history": 554,
    "web_search": 417,
    "user_input": 64,
}
"""Tokens of a block of each kind in RAGPulse, which doesn't give them: least squares over its requests."""


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has."""
    ascii_count = len(text.encode("ascii", "ignore"))
    return max(1, round(ascii_count * TOKENS_PER_ASCII + (len(text) - ascii_count) * TOKENS_PER_OTHER))


def read_sharegpt(path: Path, count_tokens: CountTokens = estimate_tokens) -> list[SimConversation]:
    """Conversations of a file in ShareGPT's format; they have no times.

    Args:
        path: a JSON file, see `pensieve_jax.conversations`.
        count_tokens: the length of a message; a tokenizer's is exact.
    """
    return _counted(ConversationReader(path), count_tokens)


def read_ultrachat(path: Path, count_tokens: CountTokens = estimate_tokens) -> list[SimConversation]:
    """Conversations of a file in UltraChat's format; they have no times. Arguments as of `read_sharegpt`."""
    return _counted(UltraChatReader(path), count_tokens)


def _counted(conversations: Iterable[SourceConversation], count_tokens: CountTokens) -> list[SimConversation]:
    return [
        SimConversation(
            id=conversation.id,
            turns=tuple(
                SimTurn(
                    input_tokens=max(1, count_tokens(turn.user)),
                    output_tokens=max(1, count_tokens(turn.assistant)),
                )
                for turn in conversation.turns
            ),
        )
        for conversation in conversations
    ]


def read_mooncake(path: Path) -> list[SimConversation]:
    """Requests of a Mooncake trace (FAST'25), joined to conversations by their chained block hashes."""
    return link_requests(list(_json_lines(path)))


def read_ragpulse(path: Path) -> list[SimConversation]:
    """Sessions of a RAGPulse trace as conversations.

    Every request of the trace brings its whole prompt. What a stateful server would be sent is the prompt
    less the history and, from the second turn on, less the system prompt. The blocks of the system prompt,
    the first of which requests have in common, are the prefix.
    """
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in _json_lines(path):
        sessions.setdefault(str(row["session_id"]), []).append(row)
    conversations = []
    for session, rows in sessions.items():
        rows.sort(key=lambda row: float(row["timestamp"]))
        turns = tuple(_ragpulse_turn(row, first=index == 0) for index, row in enumerate(rows))
        blocks = rows[0]["hash_ids"]["sys_prompt"]
        size = RAGPULSE_TOKENS["sys_prompt"]
        prefix = tuple(PrefixSegment(id=f"block {block}", tokens=size) for block in blocks)
        conversations.append(SimConversation(id=session, turns=turns, prefix=prefix))
    return conversations


def _ragpulse_turn(row: dict[str, Any], *, first: bool) -> SimTurn:
    kept = ("history",) if first else ("history", "sys_prompt")
    known = sum(RAGPULSE_TOKENS[kind] * len(row["hash_ids"][kind]) for kind in kept)
    least = RAGPULSE_TOKENS["user_input"]
    return SimTurn(
        input_tokens=max(least, int(row["input_length"]) - known),
        output_tokens=max(1, int(row["output_length"])),
        arrival_s=float(row["timestamp"]),
    )


def read_azure(path: Path) -> list[SimConversation]:
    """Requests of an Azure LLM inference trace (Splitwise, ISCA'24). It has no sessions: each is a
    conversation of one turn."""
    conversations: list[SimConversation] = []
    begin: datetime | None = None
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])  # microseconds; the trace has one digit more
            begin = begin or time
            turn = SimTurn(
                input_tokens=max(1, int(row["ContextTokens"])),
                output_tokens=max(1, int(row["GeneratedTokens"])),
                arrival_s=max(0.0, (time - begin).total_seconds()),
            )
            conversations.append(SimConversation(id=f"azure {len(conversations)}", turns=(turn,)))
    return conversations


READERS: dict[str, Callable[[Path], list[SimConversation]]] = {
    "jsonl": read_jsonl,
    "sharegpt": read_sharegpt,
    "ultrachat": read_ultrachat,
    "mooncake": read_mooncake,
    "ragpulse": read_ragpulse,
    "azure": read_azure,
}
"""Readers by the name of their format."""


def read_workload(path: Path, format_name: str) -> list[SimConversation]:
    """Read a file of a named format.

    Raises:
        InvalidArgumentError: the format is unknown, or the file is not of it, or holds no conversation.
        OSError: the file can't be read.
    """
    if format_name not in READERS:
        raise InvalidArgumentError(f"format: got {format_name!r}, expected one of {', '.join(READERS)}")
    try:
        conversations = READERS[format_name](path)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path.name} is not of the format {format_name}: {error!r}") from error
    if not conversations:
        raise InvalidArgumentError(f"{path.name}: got no conversation, expected at least one")
    return conversations


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
