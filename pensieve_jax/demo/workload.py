"""What the demo serves: a model, what its users say, and in which order."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from pensieve_jax.conversations import ConversationReader, SourceConversation
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.engine.build import open_checkpoint
from pensieve_jax.engine.inputs import TurnInput
from pensieve_jax.models import ServableModel, make_model

LONGEST_MESSAGE_TOKENS = 400
"""Longer user messages are left to benchmarks: the demo has to end soon on two cores."""
MESSAGE_TOKENS_PER_TURN = (100, 200)
"""Mean tokens of the user messages of a chosen conversation, so that histories grow to about a thousand."""
CHARACTERS_PER_TOKEN = (1.5, 8.0)
"""Bounds that English text and source code keep to; they spare encoding what can't be chosen."""

RANDOM_MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""The model of the fallback: large enough that computing a history takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and the conversations that it is to have."""

    title: str
    """Model and conversations, for people."""
    is_fallback: bool
    """Whether model and conversations are random, since the real ones can't be had."""
    model: ServableModel
    tokenizer: Any | None
    end_token_ids: tuple[int, ...]
    inputs: tuple[tuple[TurnInput, ...], ...]
    """What the user says, per conversation and turn."""
    order: tuple[tuple[int, int], ...]
    """(conversation, turn) in the order in which the turns come."""

    @property
    def num_turns(self) -> int:
        """Turns of all conversations together."""
        return len(self.order)


def sharegpt_workload(
    checkpoint: Path,
    recording: Path,
    *,
    conversations: int,
    turns: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """A checkpoint and the user messages of recorded conversations: the first ones of suitable lengths.

    Args:
        checkpoint: anything that `load_model` takes.
        recording: a file in ShareGPT's format.
        conversations: how many to serve.
        turns: of each, the first ones.
        seed: of the order.
        progress: as in `load_model`.

    Raises:
        InvalidArgumentError: the file has fewer conversations of that kind.
        CheckpointError, UnsupportedModelError: as `load_model`.
    """
    loaded = open_checkpoint(checkpoint, dtype=None, num_shards=1, progress=progress)

    def length(text: str) -> int:
        assert loaded.tokenizer is not None
        return len(loaded.tokenizer(text)["input_ids"])

    chosen: list[SourceConversation] = []
    for conversation in ConversationReader(recording):
        if len(conversation.turns) >= turns and _suits(conversation, turns, length):
            chosen.append(conversation)
        if len(chosen) == conversations:
            break
    else:
        raise InvalidArgumentError(
            f"conversations: got {conversations}, but {recording.name} has only {len(chosen)} "
            f"of at least {turns} turns with messages of suitable length"
        )
    return Workload(
        title=f"{checkpoint.stem}, {conversations} ShareGPT conversations of {turns} turns",
        is_fallback=False,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        end_token_ids=loaded.end_token_ids,
        inputs=tuple(tuple(turn.user for turn in c.turns[:turns]) for c in chosen),
        order=think_time_order(conversations, turns, seed),
    )


def random_workload(*, conversations: int, turns: int, seed: int) -> Workload:
    """A small model with random weights and users who say random token ids: needs nothing from outside."""
    rng = np.random.default_rng(seed)
    vocab = RANDOM_MODEL["vocab_size"]
    shortest, longest = MESSAGE_TOKENS_PER_TURN
    return Workload(
        title=f"small random model, {conversations} random conversations of {turns} turns",
        is_fallback=True,
        model=make_model(RANDOM_MODEL, dtype=np.dtype(np.float32), rngs=nnx.Rngs(seed)),
        tokenizer=None,
        end_token_ids=(),
        inputs=tuple(
            tuple(rng.integers(vocab, size=int(rng.integers(shortest, longest))) for _ in range(turns))
            for _ in range(conversations)
        ),
        order=think_time_order(conversations, turns, seed),
    )


def think_time_order(conversations: int, turns: int, seed: int) -> tuple[tuple[int, int], ...]:
    """The order in which turns come if every user thinks for an exponentially distributed time before each.

    So some come back at once and others when much has happened in between, as the paper has it (section 6.1).
    Nobody waits for the thinking.
    """
    rng = np.random.default_rng(seed)
    coming = [(float(rng.exponential()), conversation, 0) for conversation in range(conversations)]
    heapq.heapify(coming)
    order = []
    while coming:
        time, conversation, turn = heapq.heappop(coming)
        order.append((conversation, turn))
        if turn + 1 < turns:
            heapq.heappush(coming, (time + float(rng.exponential()), conversation, turn + 1))
    return tuple(order)


def _suits(conversation: SourceConversation, turns: int, length: Callable[[str], int]) -> bool:
    """Whether the user's messages are of suitable length, the earlier ones not shorter than the later."""
    messages = [turn.user for turn in conversation.turns[:turns]]
    fewest, most = (turns * tokens for tokens in MESSAGE_TOKENS_PER_TURN)
    densest, sparsest = CHARACTERS_PER_TOKEN
    if not fewest * densest <= sum(map(len, messages)) <= most * sparsest:
        return False
    lengths = [length(message) for message in messages]
    return (
        fewest <= sum(lengths) <= most
        and max(lengths) <= LONGEST_MESSAGE_TOKENS
        and _first_half(lengths) >= sum(lengths) / 2
    )


def _first_half(lengths: Sequence[int]) -> int:
    return sum(lengths[: -(-len(lengths) // 2)])
