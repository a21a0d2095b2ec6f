"""Token ids of conversations: of recorded texts, by a tokenizer; or drawn, where only lengths are known."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.workloads.workload import TokenConversation
from pensieve_jax.conversations import SourceConversation
from pensieve_jax.simulator.workload import SimConversation, SimTurn, cut_to_context

FIRST_ID = 3
"""Ids below it are special tokens in the usual vocabularies."""

type Progress = Callable[[int, int], None]
"""Called with (conversations done, conversations in all)."""


def encode(
    conversations: Sequence[SourceConversation],
    tokenizer: Any,
    max_context_tokens: int,
    progress: Progress | None = None,
) -> list[TokenConversation]:
    """Tokenise recorded conversations, cut at a context.

    A message is encoded by itself, the first one with the tokenizer's own prefix (its begin token, if it has
    one), without a chat template: all systems get these ids, and none encodes a history again.

    Args:
        conversations: texts.
        tokenizer: of `transformers`.
        max_context_tokens: later turns are left out; see `cut_to_context`.
        progress: is told how far it is.
    """
    encoded = []
    for done, conversation in enumerate(conversations):
        if progress is not None and done % 16 == 0:
            progress(done, len(conversations))
        texts = [turn.user for turn in conversation.turns]
        inputs = _ids(tokenizer, texts, add_special_tokens=False)
        inputs[0] = _ids(tokenizer, texts[:1], add_special_tokens=True)[0]
        answers = _ids(tokenizer, [turn.assistant for turn in conversation.turns], add_special_tokens=False)
        whole = SimConversation(
            id=conversation.id,
            turns=tuple(
                SimTurn(input_tokens=len(given), output_tokens=len(answer))
                for given, answer in zip(inputs, answers, strict=True)
            ),
        )
        shape = cut_to_context(whole, max_context_tokens)
        if shape is not None:
            encoded.append(_with_tokens(shape, inputs, answers))
    if progress is not None:
        progress(len(conversations), len(conversations))
    return encoded


def draw_tokens(
    conversations: Sequence[SimConversation], *, vocab_size: int, max_context_tokens: int, seed: int
) -> list[TokenConversation]:
    """Random token ids of the right counts. Equal prefix segments get equal ids.

    Args:
        conversations: lengths and times.
        vocab_size: ids are below it.
        max_context_tokens: later turns are left out; see `cut_to_context`.
        seed: of the ids.
    """
    drawn = []
    for index, conversation in enumerate(conversations):
        shape = cut_to_context(conversation, max_context_tokens)
        if shape is None:
            continue
        rng = np.random.default_rng([seed, index])
        inputs, answers = [], []
        for turn in shape.turns:
            inputs.append(_random_ids(rng, vocab_size, turn.input_tokens))
            answers.append(_random_ids(rng, vocab_size, turn.output_tokens))
        start = 0
        for segment in shape.prefix:
            key = int.from_bytes(hashlib.blake2b(segment.id.encode(), digest_size=8).digest())
            tokens = _random_ids(np.random.default_rng([seed, key]), vocab_size, segment.tokens)
            room = max(0, len(inputs[0]) - start)
            inputs[0][start : start + segment.tokens] = tokens[:room]
            start += segment.tokens
        drawn.append(_with_tokens(shape, inputs, answers))
    return drawn


def _ids(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[np.ndarray]:
    """i32 ids of each text; at least one for each, as the first of the vocabulary."""
    found = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return [np.asarray(ids or [0], np.int32) for ids in found]


def _random_ids(rng: np.random.Generator, vocab_size: int, count: int) -> np.ndarray:
    return rng.integers(min(FIRST_ID, vocab_size - 1), vocab_size, size=count, dtype=np.int32)


def _with_tokens(
    shape: SimConversation, inputs: Sequence[np.ndarray], answers: Sequence[np.ndarray]
) -> TokenConversation:
    """The turns that `shape` has left, a first input that was cut included."""
    return TokenConversation(
        shape=shape,
        inputs=tuple(given[: turn.input_tokens] for given, turn in zip(inputs, shape.turns, strict=False)),
        answers=tuple(answers[: len(shape.turns)]),
    )
