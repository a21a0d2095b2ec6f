"""Chat messages, checked where they enter the system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pensieve_jax.core.errors import InvalidArgumentError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat.

    Raises:
        InvalidArgumentError: the role is unknown, or the content is no text that UTF-8 can hold.
    """

    role: str
    """One of `ROLES`."""
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgumentError(f"role: got {self.role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise InvalidArgumentError(f"content: got {type(self.content).__name__}, expected a text")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"content: got an unpaired surrogate at {error.start}, expected a text"
            ) from error


def parse_messages(given: str | Sequence[Message | Mapping[str, object]]) -> tuple[Message, ...]:
    """The messages of one turn, from any of the forms in which a caller may give them.

    Args:
        given: a text, which stands for one user message, or messages in order. A mapping has the keys `role`
            and `content`; as in OpenAI's API the content may also be a list of parts `{"type": "text",
            "text": ...}`, whose texts are joined.

    Raises:
        InvalidArgumentError: nothing was given, or a message is not acceptable; the text says which one.
    """
    if isinstance(given, str):
        if not given:
            raise InvalidArgumentError("messages: got an empty text, expected at least one character")
        return (Message(role="user", content=given),)
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise InvalidArgumentError(f"messages: got {type(given).__name__}, expected a text or messages")
    if not given:
        raise InvalidArgumentError("messages: got none, expected at least one")
    messages = []
    for index, item in enumerate(given):
        try:
            messages.append(item if isinstance(item, Message) else _from_mapping(item))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"messages[{index}].{error}") from error
    return tuple(messages)


def _from_mapping(item: Mapping[str, object]) -> Message:
    if not isinstance(item, Mapping):
        raise InvalidArgumentError(f"message: got {type(item).__name__}, expected a mapping")
    # Dropping what it does not understand would answer another question than the one that was asked.
    unknown = sorted(str(key) for key in item.keys() - {"role", "content"})
    if unknown:
        raise InvalidArgumentError(f"{unknown[0]}: got this key, expected only role and content")
    missing = [key for key in ("role", "content") if key not in item]
    if missing:
        raise InvalidArgumentError(f"{missing[0]}: got none, expected a text")
    role, content = item["role"], item["content"]
    if not isinstance(role, str):
        raise InvalidArgumentError(f"role: got {role!r}, expected one of {', '.join(ROLES)}")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise InvalidArgumentError(f"content: got {type(content).__name__}, expected a text")
    return Message(role=role, content=content)


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise InvalidArgumentError(f"content: got the part {part!r}, expected parts of type text")
