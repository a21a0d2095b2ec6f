"""A cache policy of your own: conversations that have come back often are kept longer.

Run: python examples/own_policy.py
Or:  PYTHONPATH=examples pensieve simulate --rate 1.5 --policy retention-value,own_policy:Returning
"""

from host_cache.conversation import CachedConversation
from host_cache.policies import RetentionValue
from pensieve_jax.simulator import Simulation, make_config, summarize, with_poisson_arrivals
from pensieve_jax.simulator.synthetic import SyntheticWorkload


class Returning(RetentionValue):
    """Retention value, times one more than the pauses after which the conversation has come back."""

    name = "returning"

    def weight(self, context_tokens: int, conversation: CachedConversation) -> float:
        return super().weight(context_tokens, conversation) * (1 + min(conversation.num_gaps, 8))


if __name__ == "__main__":
    chats = SyntheticWorkload(conversations=100).draw(0)
    timed = with_poisson_arrivals(chats, requests_per_s=0.8, think_time_s=60, seed=0)
    for policy in (RetentionValue, Returning):
        config = make_config(policy=policy, device_kv_bytes=8e9, host_kv_bytes=16e9)
        figures = summarize(Simulation(timed, config).run())
        print(f"{policy.name}: {figures['recomputed_share']:.3f} of the history was recomputed")
