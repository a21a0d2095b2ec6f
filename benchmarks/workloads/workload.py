"""A workload: conversations as token ids with their times, a digest of all of it, and its file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.workload import SimConversation, as_json, conversation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenConversation:
    """What one user says, turn by turn, and how long the answers are."""

    shape: SimConversation
    """Lengths and times."""
    inputs: tuple[np.ndarray, ...]
    """i32[input_tokens] for each turn."""
    answers: tuple[np.ndarray, ...]
    """i32[output_tokens] for each turn: what was recorded. A system's own answers replace them; they only
    stand for the answers of turns from before the start."""

    def __post_init__(self) -> None:
        for turn, given, answer in zip(self.shape.turns, self.inputs, self.answers, strict=True):
            assert len(given) == turn.input_tokens and len(answer) == turn.output_tokens

    @property
    def id(self) -> str:
        """Its name, unique in a workload."""
        return self.shape.id

    @property
    def num_turns(self) -> int:
        """How often the user speaks."""
        return len(self.inputs)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations in the order in which they begin."""

    conversations: tuple[TokenConversation, ...]
    settings: Mapping[str, Any]
    """What it was made from; plain values."""

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits over every token, length and time. Equal digests: equal workloads."""
        total = hashlib.sha256()
        for conversation in self.conversations:
            total.update(json.dumps(as_json(conversation.shape), sort_keys=True).encode())
            for tokens in _arrays(conversation):
                total.update(np.ascontiguousarray(tokens, "<i4").tobytes())
        return total.hexdigest()[:16]

    @property
    def num_turns(self) -> int:
        """Turns of all conversations together."""
        return sum(conversation.num_turns for conversation in self.conversations)

    def figures(self) -> dict[str, float]:
        """Counts and means, for people and for results."""
        turns = [turn for conversation in self.conversations for turn in conversation.shape.turns]
        contexts = [conversation.shape.num_tokens for conversation in self.conversations]
        return {
            "conversations": len(self.conversations),
            "turns": len(turns),
            "mean_turns": round(len(turns) / len(self.conversations), 3),
            "mean_input_tokens": round(float(np.mean([turn.input_tokens for turn in turns])), 2),
            "mean_output_tokens": round(float(np.mean([turn.output_tokens for turn in turns])), 2),
            "mean_context_tokens": round(float(np.mean(contexts)), 1),
            "longest_context_tokens": max(contexts),
        }

    def write(self, path: Path) -> None:
        """Write it to a file, so that it is tokenised once and served by many systems.

        Raises:
            OSError: the file can't be written.
        """
        arrays = [tokens for conversation in self.conversations for tokens in _arrays(conversation)]
        about = {
            "settings": dict(self.settings),
            "digest": self.digest,
            "shapes": [as_json(conversation.shape) for conversation in self.conversations],
        }
        with path.open("wb") as file:
            np.savez_compressed(file, tokens=np.concatenate(arrays), about=np.array(json.dumps(about)))


def read_workload_file(path: Path) -> Workload:
    """A workload as `Workload.write` has written it.

    Raises:
        InvalidArgumentError: the file is none, or it is damaged.
        OSError: it can't be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, about = file["tokens"], json.loads(str(file["about"]))
        shapes = [conversation_of(shape) for shape in about["shapes"]]
        settings, digest = about["settings"], about["digest"]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise InvalidArgumentError(f"{path.name} is no workload: {error!r}") from error
    conversations, start = [], 0
    for shape in shapes:
        inputs, answers = [], []
        for turn in shape.turns:
            middle = start + turn.input_tokens
            end = middle + turn.output_tokens
            inputs.append(tokens[start:middle])
            answers.append(tokens[middle:end])
            start = end
        conversations.append(TokenConversation(shape=shape, inputs=tuple(inputs), answers=tuple(answers)))
    workload = Workload(conversations=tuple(conversations), settings=settings)
    if start != len(tokens) or workload.digest != digest:
        raise InvalidArgumentError(
            f"{path.name}: got contents with the digest {workload.digest}, expected {digest}"
        )
    return workload


def _arrays(conversation: TokenConversation) -> Iterator[np.ndarray]:
    for given, answer in zip(conversation.inputs, conversation.answers, strict=True):
        yield given
        yield answer
