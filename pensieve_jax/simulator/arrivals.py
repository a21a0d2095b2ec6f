"""When conversations begin and how long their users think. Everything follows from a seed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pensieve_jax.conversations import SourceConversation
from pensieve_jax.simulator.workload import SimConversation


def sample_conversations[Conversation: (SimConversation, SourceConversation)](
    conversations: Sequence[Conversation], count: int, seed: int
) -> list[Conversation]:
    """Draw `count` conversations in random order: none twice before all were drawn once.

    A conversation that is drawn again gets an id of its own and shares no more than its prefix.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Conversation] = []
    for repeat in range(-(-count // len(conversations)) if conversations else 0):
        order = rng.permutation(len(conversations))[: count - len(drawn)]
        for index in order.tolist():
            chosen = conversations[index]
            drawn.append(chosen if repeat == 0 else replace(chosen, id=f"{chosen.id}#{repeat}"))
    return drawn


def with_poisson_arrivals(
    conversations: Sequence[SimConversation], *, requests_per_s: float, think_time_s: float, seed: int
) -> list[SimConversation]:
    """Set all times anew: conversations begin as a Poisson process in the order given, and users think for
    an exponentially distributed time before each further turn (paper, section 6.1).

    Args:
        conversations: what is said; their own times are replaced.
        requests_per_s: turns per second on average, of all conversations together, while new ones begin.
        think_time_s: mean time between an answer and the next turn.
        seed: of both draws. Gaps don't depend on the rate, nor arrivals on the think time, but for scale.
    """
    if not conversations:
        return []
    arrivals_rng, gaps_rng = (np.random.default_rng([seed, part]) for part in range(2))
    turns = sum(len(conversation.turns) for conversation in conversations)
    mean_s = turns / len(conversations) / requests_per_s
    starts = np.cumsum(arrivals_rng.exponential(size=len(conversations)) * mean_s)
    gaps = iter((gaps_rng.exponential(size=turns) * think_time_s).tolist())
    timed = []
    for conversation, start in zip(conversations, starts.tolist(), strict=True):
        new = []
        for index, turn in enumerate(conversation.turns):
            gap = next(gaps)
            first = index == 0
            new.append(replace(turn, gap_s=None if first else gap, arrival_s=start if first else None))
        timed.append(replace(conversation, turns=tuple(new)))
    return timed


def with_time_scale(conversations: Sequence[SimConversation], speed: float) -> list[SimConversation]:
    """The same conversations with recorded times that run `speed` times as fast."""

    def scaled(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / speed

    return [
        replace(
            conversation,
            turns=tuple(
                replace(turn, gap_s=scaled(turn.gap_s), arrival_s=scaled(turn.arrival_s))
                for turn in conversation.turns
            ),
        )
        for conversation in conversations
    ]
