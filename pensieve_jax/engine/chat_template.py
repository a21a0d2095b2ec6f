"""Encodes a new turn with the model's chat template, without encoding the conversation again.

The template is rendered as text for the whole chat, which is cheap; only the text from the last special
token before the previous answer on is encoded. A special token always splits a text, so what comes before
can't change what comes after. If these tokens begin with those that the log ends with, the rest is the new
turn, exactly as encoding the whole chat at once gives it. If they don't, a note says why, and the turn is
what the template writes after an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedTurn:
    """The tokens that a turn adds to the log before its answer."""

    token_ids: np.ndarray
    """i32[n]"""
    note: str | None
    """Why the log and these tokens are not what encoding the whole chat at once gives, in one sentence; None
    if they are. Each note is about the last answer: a difference in an earlier turn stays."""


class ChatTemplate:
    """The chat template of a tokenizer. Without one, messages are plain text, one after the other."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self._special_contents = {token_id: content for content, token_id in self._special.items()}

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer has no template."""
        return self._tokenizer.chat_template is None

    def encode_turn(
        self, history: Sequence[Message], new: Sequence[Message], *, logged_tail: Sequence[int] | np.ndarray
    ) -> EncodedTurn:
        """The tokens of a new turn, up to where the answer begins.

        Args:
            history: all messages before, ending with the last answer as it was given out; empty in the first
                turn, or if earlier turns were given as tokens.
            new: the turn's messages.
            logged_tail: the end of the log, which is the last turn's input and output or more; empty in the
                first turn. It may lack the answer's end token.

        Raises:
            InvalidArgumentError: the template refuses the messages, or the history ends with no answer.
        """
        if not history:
            return self._without_history(new, continues=len(logged_tail) > 0)
        if history[-1].role != "assistant":
            raise InvalidArgumentError(f"history: ends with role {history[-1].role!r}, expected assistant")
        log = np.asarray(logged_tail, np.int32)
        prompt = self._render(history[:-1])
        whole = self._render([*history, *new])
        if not whole.startswith(prompt):
            note = "The chat template writes earlier messages differently once others follow."
            return EncodedTurn(token_ids=self._after_answer(history, new, log), note=note)

        start = self._start(prompt, history)
        prompt_ids = self._encode(prompt[start:])
        expected = self._encode(whole[start:])
        logged = _from_last(log, prompt_ids)
        if logged is not None and np.array_equal(expected[: len(logged)], logged):
            return EncodedTurn(token_ids=expected[len(logged) :], note=None)
        output_ids = None if logged is None else logged[len(prompt_ids) :]
        note = self._difference(whole[len(prompt) :], history[-1].content, output_ids)
        return EncodedTurn(token_ids=self._after_answer(history, new, log), note=note)

    def encode_whole(self, messages: Sequence[Message]) -> np.ndarray:
        """i32[n]: the whole chat at once, up to where the next answer begins. For comparison: it costs what
        `encode_turn` saves.

        Raises:
            InvalidArgumentError: the template refuses the messages.
        """
        text = self._render(messages)
        return np.concatenate([self._begin_ids(), self._encode(text)])

    def _without_history(self, new: Sequence[Message], *, continues: bool) -> EncodedTurn:
        token_ids = self.encode_whole(new)
        if not continues:
            return EncodedTurn(token_ids=token_ids, note=None)
        if len(token_ids) and token_ids[0] == self._tokenizer.bos_token_id:
            token_ids = token_ids[1:]
        note = "Earlier turns were given as tokens, so the chat template could not see them."
        return EncodedTurn(token_ids=token_ids, note=note)

    def _render(self, messages: Sequence[Message]) -> str:
        if self.is_plain:
            return "".join(message.content for message in messages)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidArgumentError(
                f"messages: the model's chat template refuses them: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> np.ndarray:
        # Templates write the begin token themselves, so none is added.
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int32)

    def _begin_ids(self) -> np.ndarray:
        """i32[0 or 1]: what the tokenizer puts before a plain text."""
        begin = self._tokenizer("", verbose=False)["input_ids"][:1] if self.is_plain else []
        return np.asarray([i for i in begin if i == self._tokenizer.bos_token_id], np.int32)

    def _start(self, prompt: str, history: Sequence[Message]) -> int:
        """Where in the text to begin to encode: as late as possible, but before the last answer."""
        if self.is_plain:
            return len(prompt) - len(history[-2].content) if len(history) > 1 else 0
        # A template that uses no special tokens at all has its whole chat encoded.
        return max(0, max((prompt.rfind(content) for content in self._special), default=0))

    def _after_answer(
        self, history: Sequence[Message], new: Sequence[Message], log: np.ndarray
    ) -> np.ndarray:
        """i32[n]: what the template writes after some answer, without what the log ends with."""
        text = self._text_after_answer(history, new)
        end = self._special_contents.get(int(log[-1])) if len(log) else None
        if end is None:
            return self._encode(text)
        if text.lstrip().startswith(end):
            text = text.lstrip()[len(end) :]
        # After a special token, some tokenizers put no space before a text, or drop one that is there.
        return self._encode(end + text)[1:]

    def _text_after_answer(self, history: Sequence[Message], new: Sequence[Message]) -> str:
        # Found by what follows a word that stands for the answer: the template may change the answer itself.
        word = "qzx"
        while any(word in message.content for message in (*history, *new)):
            word += "X"
        probe = Message(role="assistant", content=word)
        _, found, after = self._render([*history[:-1], probe, *new]).rpartition(word)
        return after if found else self._render(new)

    def _difference(self, rendered: str, answer: str, output_ids: np.ndarray | None) -> str:
        """Why the log is not what encoding the whole chat gives.

        Args:
            rendered: what the template writes after the prompt of the last answer.
            answer: its text as it was given out.
            output_ids: i32[m]: its tokens; None if the log doesn't end with that prompt and an answer.
        """
        if not rendered.lstrip().startswith(answer.strip()):
            return "The chat template changes an answer once others follow, as by removing its thinking."
        if output_ids is None:
            return "The log does not end with the last messages as the chat template writes them."
        output = self._tokenizer.backend_tokenizer.decode(output_ids.tolist(), skip_special_tokens=True)
        if output.strip() != answer.strip():
            return "The log holds tokens after the answer that were not given out as its text."
        if output.endswith("\ufffd"):
            return "The answer was cut inside a character."
        if not rendered.startswith(answer):
            return "The chat template changes the white space around the answer."
        if len(output_ids) == 0 or int(output_ids[-1]) not in self._special_contents:
            return "The answer was cut where encoding its text gives other tokens."
        return "The answer's tokens are not those that encoding its text gives."


def _from_last(log: np.ndarray, run: np.ndarray) -> np.ndarray | None:
    """The end of the log from the last place where it holds a run of tokens; None if it doesn't."""
    if len(run) == 0:
        return None
    for place in np.flatnonzero(log[: len(log) - len(run) + 1] == run[0])[::-1]:
        if np.array_equal(log[place : place + len(run)], run):
            return log[place:]
    return None
