"""What a system has to offer in order to be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pensieve_jax.core.errors import PensieveError


class SystemUnavailableError(PensieveError):
    """The system can't be used here: it isn't installed, or nothing answers at its address."""


class ServingError(PensieveError):
    """The system failed while it served, so nothing that it did counts."""


class RefusedError(PensieveError):
    """The system can't serve this turn at all, however long it waits: it is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn for a system to answer."""

    conversation_id: str
    turn: int
    """0 for the first."""
    history: Sequence[np.ndarray] = ()
    """Everything said before, in order; for systems that keep nothing."""
    new: np.ndarray
    """i32[n]: what the user says now."""
    output_tokens: int
    """How many tokens to produce, whatever they are: end tokens are ignored."""

    def prompt(self) -> np.ndarray:
        """i32[n]: the history and what is new."""
        return np.concatenate([*self.history, self.new])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCounts:
    """Where a turn's context came from, as far as the system tells."""

    new: int
    from_device: int = 0
    from_host: int = 0
    recomputed: int = 0
    restored: int = 0
    """Loaded or computed again because of suspensions."""
    suspensions: int = 0
    swap_in_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of a turn's answer has come."""

    conversation_id: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A turn's answer is whole."""

    conversation_id: str
    time_s: float
    output: np.ndarray
    """i32[output_tokens]."""
    counts: ContextCounts
    queue_s: float = float("nan")
    """From submission to the first step that computed for it, where the system tells."""


type Event = FirstToken | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """What a system is and what it was given."""

    name: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Plain values."""
    tells_tiers: bool
    """Whether its counts say from which tier tokens came; if not, hit rates per tier mean nothing."""


class System(Protocol):
    """One served model. For one thread, which calls `submit` and `poll` in turn."""

    @property
    def facts(self) -> SystemFacts:
        """What it is."""
        ...

    def warm_up(self) -> None:
        """Let happen now what must not happen while turns are measured, such as compiling."""
        ...

    def submit(self, request: TurnRequest) -> None:
        """Take a turn; its conversation's last turn has ended. Returns at once.

        Raises:
            RefusedError: it is too large ever to be served.
        """
        ...

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Let the system work, and say what has happened: a step of a system that runs in this thread, or at
        most `timeout_s` of waiting for one that doesn't.

        Raises:
            ServingError: it failed.
        """
        ...

    def settle(self) -> None:
        """Finish what goes on behind answers, such as copies. Called when time is about to be skipped."""
        ...

    def reset(self) -> None:
        """Give up unfinished turns, and forget every conversation and everything cached, in all tiers."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Further sums since the start, for results; may be empty."""
        ...

    def memory_bytes(self) -> int | None:
        """Device memory that it has held at most; None if it can't be said."""
        ...

    def close(self) -> None:
        """End it."""
        ...
