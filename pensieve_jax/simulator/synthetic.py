"""Made-up conversations, from distributions."""

from dataclasses import dataclass

import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.workload import PrefixSegment, SimConversation, SimTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Turns are geometric, lengths log-normal; every number is drawn by itself.

    Raises:
        InvalidArgumentError: a number is out of range.
    """

    conversations: int = 1000
    mean_turns: float = 5.56
    """At least 1. The default is ShareGPT's (paper, section 6.1)."""
    mean_input_tokens: float = 90.0
    """New tokens of a turn, apart from the prefix."""
    mean_output_tokens: float = 300.0
    sigma: float = 1.0
    """Of the logarithm of both lengths; 0 makes them constant."""
    prefix_tokens: int = 0
    """A system prompt that conversations begin with, as part of their first turn's input."""
    prefixes: int = 1
    """How many different system prompts there are; each conversation has one at random."""

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        check(self.conversations >= 1, "conversations", "at least 1")
        check(self.mean_turns >= 1, "mean_turns", "at least 1")
        check(self.mean_input_tokens >= 1, "mean_input_tokens", "at least 1")
        check(self.mean_output_tokens >= 1, "mean_output_tokens", "at least 1")
        check(self.sigma >= 0, "sigma", "at least 0")
        check(self.prefix_tokens >= 0, "prefix_tokens", "at least 0")
        check(self.prefixes >= 1, "prefixes", "at least 1")

    def draw(self, seed: int) -> list[SimConversation]:
        """The conversations; equal seeds give equal ones."""
        rng = np.random.default_rng(seed)
        turns = rng.geometric(1 / self.mean_turns, size=self.conversations)
        which = rng.integers(self.prefixes, size=self.conversations)
        inputs = self._lengths(rng, self.mean_input_tokens, int(turns.sum()))
        outputs = self._lengths(rng, self.mean_output_tokens, int(turns.sum()))
        pairs = iter(zip(inputs, outputs, strict=True))
        drawn = []
        for index, (count, prefix) in enumerate(zip(turns.tolist(), which.tolist(), strict=True)):
            added = self.prefix_tokens
            own = []
            for _ in range(count):
                new, answer = next(pairs)
                own.append(SimTurn(input_tokens=new + added, output_tokens=answer))
                added = 0
            shared = (PrefixSegment(id=f"prefix {prefix}", tokens=self.prefix_tokens),)
            drawn.append(
                SimConversation(
                    id=f"synthetic {index}", turns=tuple(own), prefix=shared if self.prefix_tokens else ()
                )
            )
        return drawn

    def _lengths(self, rng: np.random.Generator, mean: float, count: int) -> list[int]:
        # exp(mu + sigma^2 / 2) is the mean of a log-normal distribution
        values = rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma, size=count)
        return np.maximum(1, np.rint(values)).astype(int).tolist()
