"""What callers say about their conversations' state: how much it is worth, and how long."""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from pensieve_jax.core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Of one conversation.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    priority: float = 1.0
    """Factor on what its state is worth when pages are short. Above 0."""
    time_to_live_s: float | None = None
    """Its state goes after so much time without activity. At least 0; None: no limit."""

    def __post_init__(self) -> None:
        priority, seconds = self.priority, self.time_to_live_s
        if not _is_finite(priority) or priority <= 0:
            raise InvalidArgumentError(f"priority: got {priority!r}, expected a number above 0")
        if seconds is not None and not (_is_finite(seconds) and seconds >= 0):
            raise InvalidArgumentError(f"time_to_live_s: got {seconds!r}, expected None or a number >= 0")


class HintBook:
    """The hints of all conversations. They outlast a cache that starts anew, but not the engine."""

    def __init__(self) -> None:
        self._hints: dict[str, Hints] = {}
        """Of those that differ from the defaults."""

    def get(self, conversation_id: str) -> Hints:
        """A conversation's hints."""
        return self._hints.get(conversation_id, Hints())

    def change(self, conversation_id: str, **changes: Any) -> Hints:
        """Change some of a conversation's hints.

        Returns:
            all of them.

        Raises:
            InvalidArgumentError: a value is out of range; nothing changed.
        """
        hints = self._hints[conversation_id] = replace(self.get(conversation_id), **changes)
        if hints == Hints():
            del self._hints[conversation_id]
        return hints

    def copy(self, source_id: str, new_id: str) -> None:
        """A fork is worth what its source is."""
        if source_id in self._hints:
            self._hints[new_id] = self._hints[source_id]

    def forget(self, conversation_id: str) -> None:
        """Forget a conversation's hints."""
        self._hints.pop(conversation_id, None)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
