"""Values that every layer shares: sampling parameters, sampled tokens, a turn's receipt."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pensieve_jax.core.errors import InvalidArgumentError


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
    """Token id -> number added to its logit."""
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

        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a number >= 0")
        check(self.top_k >= 0, "top_k", "an integer >= 0 (0 keeps all)")
        check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        check(0 <= self.min_p < 1, "min_p", "a number in [0, 1)")
        positive = math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0
        check(positive, "repetition_penalty", "a number > 0")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "a number in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number in [-2, 2]")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", "None or an integer in [0, 2**63)")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "None or an integer >= 1")
        check(all(self.stop), "stop", "texts that are not empty")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "None or an integer in [0, 20]")

    @property
    def needs_history(self) -> bool:
        """Whether a penalty looks at the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


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
