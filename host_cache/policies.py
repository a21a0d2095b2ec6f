"""Who leaves first. A policy values a chunk; the manager evicts ascending value.

Within a conversation chunks leave from one end, so a policy is two things: which end, and the value
of a chunk given its context length and how long its conversation has been idle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

MIN_IDLE_S = 1e-6
"""Idle times are taken to be at least this, so that a value is finite."""


class EvictionPolicy(Protocol):
    """The interface of a policy. In the order in which a conversation's chunks leave, values never fall."""

    name: ClassVar[str]
    """Short name, as in a configuration."""
    leading_first: ClassVar[bool]
    """Whether a conversation's leading chunks leave first; False: its last ones."""

    def value(self, *, context_tokens: int, idle_s: float) -> float:
        """What it is worth to keep a chunk.

        Args:
            context_tokens: context length at the chunk's end.
            idle_s: time since the chunk's conversation was last active, in seconds.

        Returns:
            the value; chunks leave in ascending order of it.
        """
        ...


@dataclass(frozen=True, slots=True)
class RetentionValue:
    """V = Cost(l) / T: idle conversations first, and of each the leading chunks, the cheapest to recompute
    (paper, section 4.3.1)."""

    cost: Callable[[int], float]
    """Seconds to recompute a chunk at a context length in tokens."""
    name: ClassVar[str] = "retention-value"
    leading_first: ClassVar[bool] = True

    def value(self, *, context_tokens: int, idle_s: float) -> float:
        """Cost(context_tokens) / idle time."""
        return self.cost(context_tokens) / max(idle_s, MIN_IDLE_S)


@dataclass(frozen=True, slots=True)
class Lru:
    """The conversation that has been idle longest first, leading chunks first (paper, figure 14)."""

    name: ClassVar[str] = "lru"
    leading_first: ClassVar[bool] = True

    def value(self, *, context_tokens: int, idle_s: float) -> float:
        """Falls with idle time, whatever the chunk."""
        return -idle_s
