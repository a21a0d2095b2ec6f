"""Who leaves first. A policy values a chunk; the manager evicts ascending value.

The value of a chunk is weight / (now - origin): what it costs to do without it, over the time that its
conversation has been, or is expected to stay, away. The weight depends on where the chunk stands in its
conversation, the origin on the conversation alone. So the order among chunks of one weight never changes
with time, and the next to leave is found without looking at all of them.

Within a conversation chunks leave from one end. A policy of your own is a class with these few members;
see `docs/own-policy.md`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

from host_cache.conversation import CachedConversation

type Cost = Callable[[int], float]
"""Seconds to recompute a chunk at a context length in tokens."""
type PolicyFactory = Callable[[Cost], EvictionPolicy]
"""Makes a policy from the cost of recomputing. A class that takes the cost alone is one."""

MIN_IDLE_S = 1e-6
"""Idle times are taken to be at least this, so that a value is finite."""


class EvictionPolicy(Protocol):
    """The interface of a policy. In the order in which a conversation's chunks leave, weights never fall."""

    name: ClassVar[str]
    """Short name, as in a configuration."""
    leading_first: ClassVar[bool]
    """Whether a conversation's leading chunks leave first; False: its last ones."""
    whole: ClassVar[bool]
    """Whether a conversation that loses one chunk loses all."""
    sums_sharers: ClassVar[bool]
    """Whether a chunk of several conversations is worth the sum of what it is worth to each; False: what it
    is worth to the one that was active last."""

    def weight(self, context_tokens: int, conversation: CachedConversation) -> float:
        """What it costs to do without a chunk.

        Args:
            context_tokens: context length at the chunk's end.
            conversation: one that has it.

        Returns:
            a positive number. Few different ones over all chunks keep the order fast.
        """
        ...

    def origin(self, conversation: CachedConversation) -> float:
        """The moment from which a conversation's absence counts, in the caller's seconds."""
        ...


MEMBERS = ("name", "leading_first", "whole", "sums_sharers", "weight", "origin")
"""What an `EvictionPolicy` has."""


def value(weight: float, origin: float, now: float) -> float:
    """What a chunk is worth at a moment."""
    return weight / max(now - origin, MIN_IDLE_S)


class FromLastActivity:
    """What most policies have in common: absence counts from the end of the last turn, leading chunks leave
    first and one by one, and a shared chunk is worth what it is worth to whom was active last."""

    leading_first: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    sums_sharers: ClassVar[bool] = False

    def origin(self, conversation: CachedConversation) -> float:
        """When the conversation was last active."""
        return conversation.last_active


@dataclass(frozen=True, slots=True)
class RetentionValue(FromLastActivity):
    """V = Cost(l) / T: idle conversations first, and of each the leading chunks, the cheapest to recompute
    (paper, section 4.3.1)."""

    cost: Cost
    """Of recomputing a chunk."""
    name: ClassVar[str] = "retention-value"

    def weight(self, context_tokens: int, conversation: CachedConversation) -> float:
        """Cost(l), times the conversation's priority."""
        return self.cost(context_tokens) * conversation.priority


@dataclass(frozen=True, slots=True)
class ShareAware(RetentionValue):
    """As `RetentionValue`, but a chunk that several conversations share is worth the sum over them."""

    name: ClassVar[str] = "share-aware"
    sums_sharers: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ThinkTime(RetentionValue):
    """As `RetentionValue`, with the expected time to the next turn in place of the idle time.

    Pauses of a conversation are taken to be exponential with a rate of its own, the rates to be drawn from
    a gamma distribution of shape 2. After n pauses of length S in all and an idle time t, the expected rest
    is (S + t + prior) / (n + 1): conversations with short pauses are expected back soon.
    """

    prior_s: float = 60.0
    """Mean pause of a conversation that nothing is known of."""
    name: ClassVar[str] = "think-time"
    most_gaps: ClassVar[int] = 8
    """Pauses beyond this many change the estimate no more; bounds the number of weights."""

    def weight(self, context_tokens: int, conversation: CachedConversation) -> float:
        """Cost(l) times the factor of the expected rest."""
        gaps = min(conversation.num_gaps, self.most_gaps)
        return self.cost(context_tokens) * conversation.priority * (gaps + 1)

    def origin(self, conversation: CachedConversation) -> float:
        """The end of the last turn, less what is known of its pauses."""
        known = conversation.sum_gaps_s
        if conversation.num_gaps > self.most_gaps:
            known *= self.most_gaps / conversation.num_gaps
        return conversation.last_active - known - self.prior_s


@dataclass(frozen=True, slots=True)
class Lru(FromLastActivity):
    """The conversation that has been idle longest first, leading chunks first (paper, figure 14)."""

    name: ClassVar[str] = "lru"

    def weight(self, context_tokens: int, conversation: CachedConversation) -> float:
        """The same for every chunk."""
        return 1.0


@dataclass(frozen=True, slots=True)
class TailFirstLru(Lru):
    """The conversation that has been idle longest first, last chunks first: what prefix trees do."""

    name: ClassVar[str] = "tail-first-lru"
    leading_first: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class WholeConversationLru(Lru):
    """The conversation that has been idle longest leaves as a whole."""

    name: ClassVar[str] = "whole-conversation-lru"
    whole: ClassVar[bool] = True


POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        RetentionValue.name: RetentionValue,
        ShareAware.name: ShareAware,
        ThinkTime.name: ThinkTime,
        Lru.name: lambda cost: Lru(),
        TailFirstLru.name: lambda cost: TailFirstLru(),
        WholeConversationLru.name: lambda cost: WholeConversationLru(),
    }
)
"""The policies that are built in, by name."""


def find_policy(policy: str | PolicyFactory) -> PolicyFactory:
    """What makes a policy.

    Args:
        policy: a name of `POLICIES`; "module:attribute" for a factory in a module that can be imported; or
            the factory.

    Raises:
        ValueError: there is no such name, module or attribute, or it isn't a factory.
    """
    if not isinstance(policy, str):
        if not callable(policy):
            raise ValueError(f"policy: got {policy!r}, expected a name or a factory")
        return policy
    if policy in POLICIES:
        return POLICIES[policy]
    module, colon, attribute = policy.partition(":")
    if not colon:
        known = ", ".join(POLICIES)
        raise ValueError(f"policy: got {policy!r}, expected one of {known}, or module:attribute")
    try:
        return find_policy(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy: got {policy!r}: {error}") from error


def make_policy(policy: str | PolicyFactory, cost: Cost) -> EvictionPolicy:
    """A policy with a cost.

    Args:
        policy: as in `find_policy`.
        cost: of recomputing a chunk.

    Raises:
        ValueError: as `find_policy`, or what the factory makes has not the members of `EvictionPolicy`.
    """
    made = find_policy(policy)(cost)
    missing = [name for name in MEMBERS if not hasattr(made, name)]
    if missing:
        raise ValueError(f"policy: got {made!r}, expected the members {', '.join(missing)}, too")
    return made
