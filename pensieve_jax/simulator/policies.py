"""Eviction policies by name."""

from collections.abc import Callable

from host_cache.policies import EvictionPolicy, Lru, RetentionValue
from pensieve_jax.core.errors import InvalidArgumentError

type Cost = Callable[[int], float]
"""Seconds to recompute a chunk at a context length in tokens."""

POLICIES: dict[str, Callable[[Cost], EvictionPolicy]] = {
    RetentionValue.name: RetentionValue,
    Lru.name: lambda cost: Lru(),
}
"""How a policy is made, by name."""


def make_policy(name: str, cost: Cost) -> EvictionPolicy:
    """The policy of that name.

    Args:
        name: one of `POLICIES`.
        cost: what recomputing costs, for policies that ask.

    Raises:
        InvalidArgumentError: no policy has that name.
    """
    if name not in POLICIES:
        raise InvalidArgumentError(f"policy: got {name!r}, expected one of {', '.join(POLICIES)}")
    return POLICIES[name](cost)
