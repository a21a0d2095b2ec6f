"""What a caller may give as a turn, turned into tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.messages import Message, parse_messages
from pensieve_jax.engine.chat_template import ChatTemplate
from pensieve_jax.engine.state import ConversationState

type TurnInput = str | Sequence[Message | Mapping[str, object]] | Sequence[int] | np.ndarray
"""A text (one user message), messages, or token ids as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedInput:
    """A turn's tokens and what is known of them."""

    token_ids: np.ndarray
    """i32[n], at least one."""
    messages: tuple[Message, ...] | None
    """None if tokens were given."""
    note: str | None


class InputEncoder:
    """Encodes only the new turn; the history's tokens stay what they are."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        """Args:
        tokenizer: of `transformers`; None accepts token ids alone.
        vocab_size: token ids are below it.
        """
        self._template = ChatTemplate(tokenizer) if tokenizer is not None else None
        self._vocab_size = vocab_size

    def encode(self, state: ConversationState, given: TurnInput) -> EncodedInput:
        """Encode a turn that continues a conversation.

        Raises:
            InvalidArgumentError: the input is empty, of a wrong type, or holds token ids out of range.
        """
        ids = _token_ids(given)
        if ids is not None:
            return EncodedInput(token_ids=self._checked(ids), messages=None, note=None)
        assert not isinstance(given, np.ndarray)
        messages = parse_messages(given)  # pyright: ignore[reportArgumentType]  (token ids are excluded above)
        if self._template is None:
            raise InvalidArgumentError("input: got a text, expected token ids: this engine has no tokenizer")
        history = state.messages()
        encoded = self._template.encode_turn(
            history if history is not None else (), messages, logged_tail=state.tokens
        )
        note = encoded.note
        if history is None:
            note = "earlier turns were given as tokens, so the template could not see them"
        ids = self._checked(np.asarray(encoded.token_ids))
        return EncodedInput(token_ids=ids, messages=messages, note=note)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if ids.ndim != 1 or len(ids) == 0:
            raise InvalidArgumentError(f"input: got token ids of shape {ids.shape}, expected at least one id")
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise InvalidArgumentError(
                f"input: got token id {int(outside[0])}, expected ids from 0 to {self._vocab_size - 1}"
            )
        return ids.astype(np.int32)


def _token_ids(given: object) -> np.ndarray | None:
    """The token ids, if that is what was given."""
    if isinstance(given, np.ndarray):
        if not np.issubdtype(given.dtype, np.integer):
            raise InvalidArgumentError(f"input: got an array of {given.dtype}, expected integer token ids")
        return given
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        return None
    if not isinstance(given[0], int | np.integer):
        return None
    bad = [x for x in given if not isinstance(x, int | np.integer) or isinstance(x, bool)]
    if bad:
        raise InvalidArgumentError(f"input: got {bad[0]!r} among token ids, expected integers")
    try:
        return np.asarray(given, np.int64)
    except OverflowError as error:
        raise InvalidArgumentError(
            f"input: got token id {max(given, key=abs)}, expected ids of the vocabulary"
        ) from error
