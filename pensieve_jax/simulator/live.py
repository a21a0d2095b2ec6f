"""A turn that has arrived and not ended."""

from dataclasses import dataclass

from pensieve_jax.core.types import SampledToken
from pensieve_jax.scheduler.request import Request


@dataclass(slots=True, kw_only=True, eq=False)
class LiveTurn:
    """A request, and whose it is."""

    request: Request
    conversation: int
    """Index of its conversation."""
    turn: int
    """Index of the turn in its conversation."""
    token: SampledToken
    """What the virtual worker answers, step for step."""

    @property
    def remaining(self) -> int:
        """Output tokens that are still to come."""
        assert self.request.params.max_tokens is not None
        return self.request.params.max_tokens - self.request.num_output_tokens
