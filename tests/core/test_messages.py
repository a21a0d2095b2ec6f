"""What is accepted as messages, and what is said about the rest."""

import pytest

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.messages import Message, parse_messages


def test_a_text_is_a_user_message() -> None:
    assert parse_messages("Hi") == (Message(role="user", content="Hi"),)


def test_mappings_messages_and_parts_mix() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "system", "content": ""},
        Message(role="user", content="x"),
        {"role": "tool", "content": parts},
    ]
    assert parse_messages(given) == (
        Message(role="system", content=""),
        Message(role="user", content="x"),
        Message(role="tool", content="ab"),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "messages: got an empty text"),
        ([], "messages: got none"),
        (b"Hi", "messages: got bytes"),
        (7, "messages: got int"),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\].message: got str"),
        (
            [{"role": "robot", "content": "a"}],
            r"messages\[0\].role: got 'robot', expected one of system, user",
        ),
        ([{"role": 3, "content": "a"}], r"messages\[0\].role: got 3"),
        ([{"role": "user"}], r"messages\[0\].content: got none"),
        ([{"content": "a"}], r"messages\[0\].role: got none"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: got NoneType"),
        ([{"role": "user", "content": "a", "tool_calls": []}], r"messages\[0\].tool_calls: got this key"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content: got the part"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\].content: got an unpaired surrogate at 1"),
    ],
)
def test_what_is_refused(given: object, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_messages(given)  # type: ignore[arg-type]
