"""What a turn has produced so far, and the account of its cost."""

from typing import Any

from pensieve_jax.core.types import SampledToken, TurnReceipt
from pensieve_jax.engine.detokenizer import Detokenizer
from pensieve_jax.scheduler.request import Request


class Answer:
    """Tokens and text of a turn as they come."""

    def __init__(self, tokenizer: Any | None, stop: tuple[str, ...]) -> None:
        self.tokens: list[SampledToken] = []
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text that was given out."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._detokenizer.stopped

    def push(self, token: SampledToken, *, finished: bool) -> str:
        """Add a token.

        Args:
            token: the next one.
            finished: it is the last one, so nothing needs to be held back.

        Returns:
            the text that may be given out now.
        """
        self.tokens.append(token)
        text = self._detokenizer.push([token.token_id])
        if finished or self._detokenizer.stopped:
            text += self._detokenizer.finish()
        self._pieces.append(text)
        return text


def receipt_of(request: Request) -> TurnReceipt | None:
    """The account of a turn; None if it never ran."""
    counts = request.counts
    if counts is None or request.first_step_s is None:
        return None
    first = request.first_token_s if request.first_token_s is not None else request.first_step_s
    last = request.last_token_s if request.last_token_s is not None else first
    return TurnReceipt(
        tokens_new=counts.new,
        tokens_from_device=counts.from_device,
        tokens_from_host=counts.from_host,
        tokens_recomputed=counts.recomputed,
        tokens_output=request.num_output_tokens,
        suspensions=request.suspensions,
        tokens_restored=request.tokens_restored,
        swap_in_wait_s=request.swap_in_wait_s,
        queue_s=request.first_step_s - request.arrived_s,
        time_to_first_token_s=first - request.arrived_s,
        time_per_output_token_s=(last - first) / max(1, request.num_output_tokens - 1),
    )
