"""Reads real conversations from a file in ShareGPT's or UltraChat's format, as a stream.

A file in ShareGPT's format is one JSON list of objects
{"id": "QWJhYvA_15", "conversations": [{"from", "value"}, ...]}. Long conversations come in several parts, one
after another. The number after the last underscore is the index of the part's first message in its
conversation; a part that begins with an answer repeats the last message of the part before it. A file that is
cut off at its end is read up to the cut.

A file in UltraChat's format has a JSON object on each line: {"id": "0", "data": [text, ...]}, the person's
and the model's texts in turn. The filtered edition's {"prompt_id", "messages": [{"role", "content"}, ...]} is
read as well.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

_READ_CHARACTERS = 1 << 20
_PART_ID = re.compile(r"(?P<conversation>.+)_(?P<first_message>\d+)")
_SEPARATORS = re.compile(r"[\s,\[]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTurn:
    """What the person wrote, and what the recorded model answered."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConversation:
    """One whole recorded conversation, its parts joined; at least one turn."""

    id: str
    turns: tuple[SourceTurn, ...]


@dataclass(slots=True, kw_only=True)
class ReadReport:
    """What the reader saw. Valid for what has been read so far; final once the iterator is exhausted."""

    objects: int = 0
    """JSON objects (parts of conversations) read."""
    conversations: int = 0
    """Conversations yielded."""
    turns: int = 0
    """Turns in them."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Conversations (or, for `bad object` and `stray part`, objects) left out, by reason."""
    cut_characters: int = 0
    """Characters after the last whole object of a file that is cut off; 0 for a whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    conversation: str
    first_message: int
    messages: list[_Message]


class ConversationReader:
    """Iterates over the conversations of one file, in file order, and keeps a report.

    Iterating again reads the file again and starts a new report.

    Args:
        path: a JSON file in ShareGPT's format, UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = ReadReport()

    def __iter__(self) -> Iterator[SourceConversation]:
        """Raises OSError when the file can't be read; anything wrong inside it is counted, not raised."""
        report = self.report = ReadReport()
        closed: set[str] = set()
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for parts in _neighbours(_parts(file, report)):
                name = parts[0].conversation
                if name in closed:
                    report.dropped["stray part"] += len(parts)
                    continue
                closed.add(name)
                turns = _turns(parts)
                if isinstance(turns, str):
                    report.dropped[turns] += 1
                    continue
                report.conversations += 1
                report.turns += len(turns)
                yield SourceConversation(id=name, turns=turns)
        logger.info("%s: %s", self.path.name, report)


class UltraChatReader:
    """Iterates over the conversations of one file in UltraChat's format, as `ConversationReader` does.

    Args:
        path: a JSON-lines file in UltraChat's format, UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = ReadReport()

    def __iter__(self) -> Iterator[SourceConversation]:
        """Raises OSError when the file can't be read; anything wrong inside it is counted, not raised."""
        report = self.report = ReadReport()
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                if not line.strip():
                    continue
                messages = _ultrachat_messages(line)
                if messages is None:
                    report.dropped["bad object"] += 1
                    continue
                report.objects += 1
                turns = _turns_of(messages)
                if isinstance(turns, str):
                    report.dropped[turns] += 1
                    continue
                report.conversations += 1
                report.turns += len(turns)
                yield SourceConversation(id=f"ultrachat {number}", turns=turns)
        logger.info("%s: %s", self.path.name, report)


def _ultrachat_messages(line: str) -> list[_Message] | None:
    """The messages of a line, or None when it isn't of UltraChat's form."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:  # also the last line of a file that is cut off
        return None
    if not isinstance(value, dict):
        return None
    pairs: list[tuple[object, object]]
    if isinstance(value.get("data"), list):
        pairs = [(("human", "gpt")[i % 2], text) for i, text in enumerate(value["data"])]
    elif isinstance(value.get("messages"), list) and all(isinstance(m, dict) for m in value["messages"]):
        names = {"user": "human", "assistant": "gpt"}
        pairs = [(names.get(m.get("role"), m.get("role")), m.get("content")) for m in value["messages"]]
    else:
        return None
    messages = [
        _Message(role=role, text=text)
        for role, text in pairs
        if isinstance(role, str) and isinstance(text, str)
    ]
    return messages if len(messages) == len(pairs) else None


def read_conversations(
    path: Path, *, limit: int | None = None, min_turns: int = 1
) -> tuple[list[SourceConversation], ReadReport]:
    """The first `limit` conversations of a file that have at least `min_turns` turns, and what was seen.

    Args:
        path: a JSON file in ShareGPT's format.
        limit: how many to return at most; None for all. Reading stops there.
        min_turns: shorter conversations are passed over (they count in the report).
    """
    reader = ConversationReader(path)
    chosen: list[SourceConversation] = []
    for conversation in reader if limit is None or limit > 0 else ():
        if len(conversation.turns) >= min_turns:
            chosen.append(conversation)
        if len(chosen) == limit:
            break
    return chosen, reader.report


def _objects(file: TextIO, report: ReadReport) -> Iterator[object]:
    """Decodes the objects of a JSON list one by one, holding one read and one object in memory."""
    decoder = json.JSONDecoder()
    text, start = "", 0
    while True:
        start = _end_of_separators(text, start)
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            more = file.read(_READ_CHARACTERS)
            if not more:
                break
            # Each retry decodes at least twice the text of the last, so a huge object stays linear.
            more += file.read(len(text) - start) if len(text) - start > _READ_CHARACTERS else ""
            text, start = text[start:] + more, 0
            continue
        report.objects += 1
        yield value
        start = end
    report.cut_characters = len(text[start:].removesuffix("\n").rstrip().removesuffix("]").rstrip())


def _end_of_separators(text: str, start: int) -> int:
    match = _SEPARATORS.match(text, start)
    return match.end() if match else start


def _parts(file: TextIO, report: ReadReport) -> Iterator[_Part]:
    for value in _objects(file, report):
        part = _as_part(value)
        if part is None:
            report.dropped["bad object"] += 1
        else:
            yield part


def _as_part(value: object) -> _Part | None:
    """The checked content of one JSON object, or None when it isn't a part of a conversation."""
    if not isinstance(value, dict):
        return None
    name, messages = value.get("id"), value.get("conversations")
    if not isinstance(name, str) or not isinstance(messages, list):
        return None
    checked: list[_Message] = []
    for message in messages:
        role = message.get("from") if isinstance(message, dict) else None
        text = message.get("value") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            return None
        checked.append(_Message(role=role, text=text))
    numbered = _PART_ID.fullmatch(name)
    if numbered is None:
        return _Part(conversation=name, first_message=0, messages=checked)
    return _Part(
        conversation=numbered["conversation"], first_message=int(numbered["first_message"]), messages=checked
    )


def _neighbours(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Groups the parts of one conversation, which follow each other in the file in any order."""
    group: list[_Part] = []
    for part in parts:
        if group and part.conversation != group[0].conversation:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _turns(parts: list[_Part]) -> tuple[SourceTurn, ...] | str:
    """Joins the parts into turns; a string says why that can't be done."""
    messages: list[_Message] = []
    for part in sorted(parts, key=lambda part: (part.first_message, len(part.messages))):
        repeated = len(messages) - part.first_message
        if repeated < 0:
            return "missing part"
        if messages[part.first_message :] != part.messages[:repeated]:
            return "parts disagree"
        messages += part.messages[repeated:]
    return _turns_of(messages)


def _turns_of(messages: list[_Message]) -> tuple[SourceTurn, ...] | str:
    """Pairs of questions and answers; a string says why there are none."""
    if not messages:
        return "no messages"
    if messages[-1].role == "human":
        return "ends without an answer"
    if [message.role for message in messages] != ["human", "gpt"] * (len(messages) // 2):
        return "roles do not alternate"
    if not all(message.text.strip() for message in messages):
        return "blank message"
    return tuple(
        SourceTurn(user=question.text, assistant=answer.text)
        for question, answer in zip(messages[::2], messages[1::2], strict=True)
    )
