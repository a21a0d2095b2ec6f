"""Values that every layer shares: sampling parameters, sampled tokens, a turn's receipt."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from pensieve_jax.core.errors import InvalidArgumentError

LARGEST_NUMBER = 1e30
"""Sampling parameters end here, so that no product of theirs with a logit overflows float32."""


class FinishReason(enum.StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the model's context."""
    CANCELLED = "cancelled"
    """The caller cancelled; the conversation is back at its last finished turn."""
    FAILED = "failed"
    """The engine failed; the conversation is back at its last finished turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one turn are chosen and when the turn ends.

    Raises:
        InvalidArgumentError: a value is outside its range (stated per field).
    """

    temperature: float = 0.0
    """0 is greedy. At least 0."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach this sum. In (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the most likely one. In [0, 1)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the context. Above 0."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that this turn has produced. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time this turn has produced it. In [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit; minus infinity forbids the token."""
    seed: int | None = None
    """Fixes the random choices, whatever else is in the batch. None: the engine draws one."""
    max_tokens: int | None = None
    """At least 1. None: until the context or the device pool is full."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn. The text given out ends before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the turn, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """Also give the log probability of each chosen token and of this many of the likeliest. 0 to 20."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        def number(name: str, expected: str, ok: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            check(_is_number(value) and ok(value), name, f"a number {expected}")

        def integer(name: str, expected: str, low: int, high: float, *, optional: bool = True) -> None:
            value = getattr(self, name)
            ok = (optional and value is None) or (_is_integer(value) and low <= value < high)
            check(ok, name, f"{'None or ' if optional else ''}an integer {expected}")

        number("temperature", ">= 0", lambda x: 0 <= x <= LARGEST_NUMBER)
        integer("top_k", ">= 0 (0 keeps all)", 0, math.inf, optional=False)
        number("top_p", "in (0, 1]", lambda x: 0 < x <= 1)
        number("min_p", "in [0, 1)", lambda x: 0 <= x < 1)
        number("repetition_penalty", "> 0", lambda x: 1 / LARGEST_NUMBER <= x <= LARGEST_NUMBER)
        number("presence_penalty", "in [-2, 2]", lambda x: -2 <= x <= 2)
        number("frequency_penalty", "in [-2, 2]", lambda x: -2 <= x <= 2)
        integer("seed", "in [0, 2**63)", 0, 2**63)
        integer("max_tokens", ">= 1", 1, math.inf)
        integer("logprobs", "in [0, 20]", 0, 21)
        bias = self.logit_bias
        ok = isinstance(bias, Mapping) and all(map(_is_integer, bias)) and all(map(_is_bias, bias.values()))
        check(ok, "logit_bias", "token ids with numbers, none of them NaN or plus infinity")
        texts = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        ok = texts and all(isinstance(text, str) and text for text in self.stop)
        check(ok, "stop", "a tuple of texts that are not empty")
        ids = self.stop_token_ids
        ok = isinstance(ids, Sequence | Set) and all(map(_is_integer, ids))
        check(ok, "stop_token_ids", "a tuple of integers")

    @property
    def needs_history(self) -> bool:
        """Whether a penalty looks at the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_bias(value: Any) -> bool:
    return _is_number(value) and (abs(value) <= LARGEST_NUMBER or value == -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token that a step produced for one request."""

    token_id: int
    logprob: float | None = None
    """Natural logarithm of its probability under the model's own distribution; None unless asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log probability) of the likeliest tokens, in descending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReceipt:
    """What one turn cost and where its context came from.

    The four context counts add up to the turn's context: every token before the first output token is
    either new or came from exactly one place.
    """

    tokens_new: int
    """Tokens computed for the first time: this turn's input, and the last token of the turn before."""
    tokens_from_device: int
    """History found in the device tier when the turn was first admitted."""
    tokens_from_host: int
    """History swapped in from the host tier when the turn was first admitted."""
    tokens_recomputed: int
    """History that was in no tier when the turn was first admitted and was computed again."""
    tokens_output: int
    """Tokens produced."""
    suspensions: int
    """How often the turn was suspended for want of device pages."""
    tokens_restored: int
    """Tokens swapped in or recomputed again because of suspensions, beside the counts above."""
    swap_in_wait_s: float
    """Time its steps waited for swap-ins."""
    queue_s: float
    """From submission to the first step that computed for it."""
    time_to_first_token_s: float
    """From submission to the first output token."""
    time_per_output_token_s: float
    """Mean time between output tokens after the first; 0 for a single one."""
