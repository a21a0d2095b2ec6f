"""From token ids to text as they are produced, ending before stop strings.

Text is given out as soon as no later token can change it: a character whose bytes are not complete is held
back, and so is text that may turn out to be the beginning of a stop string. The work per token does not grow
with the length of the text.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Detokenizer:
    """The text of one turn.

    The pieces that `push` and `finish` return add up to what the tokenizer decodes from all tokens at once,
    without special tokens and without cleaning up spaces, cut before the stop string that is complete first
    (the longest, if several end at the same character). How the tokens are spread over calls makes no
    difference.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, stop: tuple[str, ...] = ()) -> None:
        """
        Args:
            tokenizer: None where there is only a model: all texts are empty and nothing stops.
            stop: the stop strings, none of them empty.
        """
        self._decoder = None if tokenizer is None else _make_decoder(tokenizer.backend_tokenizer)
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self._stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come. Later tokens are ignored."""
        return self._stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has come, if any."""
        return self._stop_string

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that they make certain, which may be empty."""
        if self._decoder is None or self.stopped:
            return ""
        return self._certain("".join(map(self._decoder.push, token_ids)))

    def finish(self) -> str:
        """Ends the text; returns what was held back. Bytes that are no character become U+FFFD."""
        if self._decoder is None or self.stopped:
            return ""
        certain = self._certain(self._decoder.finish())
        held, self._held = self._held, ""
        return certain + held

    def _certain(self, new: str) -> str:
        """The part of the held and the new text that comes before any stop string, complete or begun."""
        text = self._held + new
        for end in range(len(self._held), len(text)):
            begun = [matcher.step(text[end]) for matcher in self._matchers]
            complete = [
                m.text for m, length in zip(self._matchers, begun, strict=True) if length == len(m.text)
            ]
            if complete:
                self._stop_string = max(complete, key=len)
                self._held = ""
                return text[: end + 1 - len(self._stop_string)]
        border = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[border:]
        return text[:border]


class _Matcher:
    """Finds a text in a stream of characters (Knuth, Morris, Pratt)."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """How many characters of the text's beginning the stream ends with."""
        # Entry n: the longest proper prefix of text[:n] that is also a suffix of it.
        self._borders = [0, 0]
        for character in text[1:]:
            self._borders.append(self._extended(self._borders[-1], character))

    def step(self, character: str) -> int:
        """Takes a character; returns `matched`. Not to be called after a complete match."""
        self.matched = self._extended(self.matched, character)
        return self.matched

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._borders[matched]
        return matched + (self.text[matched] == character)


class _Decoder(Protocol):
    """Text of tokens that come one by one; only what no later token can change."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def _make_decoder(tokenizer: Tokenizer) -> _Decoder:
    # The parts of a decoder can't be read from the object, only from its JSON form.
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    if decoder is not None and decoder["type"] == "ByteLevel":
        return _ByteLevelDecoder(tokenizer)
    return _PieceDecoder(tokenizer)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class _ByteLevelDecoder:
    """For tokens that stand for bytes, written in GPT-2's alphabet: the bytes are decoded as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:  # special, or a row of the embedding that stands for no token
            return ""
        try:
            token_bytes = bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token, which is plain text
            token_bytes = token.encode()
        return self._utf8.decode(token_bytes)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoder:
    """For tokens that are pieces of text, as SentencePiece makes them, and for bytes written `<0x0A>`.

    Where a token comes after another, its text is what decoding both adds to decoding the first alone; a
    piece at the beginning may lose its space. A run of byte tokens is decoded when it has ended: one byte
    that fits no character turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self._last: list[int] = []
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._run.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self.finish()

    def finish(self) -> str:
        before = self._tokenizer.decode(self._last, skip_special_tokens=False)
        text = self._tokenizer.decode(self._last + self._run, skip_special_tokens=False)
        self._last = self._run[-1:] or self._last
        self._run = []
        return text[len(before) :]


def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
