"""The same conversations with copies that go wrong, and without. Run: python examples/faults.py"""

import numpy as np
from flax import nnx
from own_model import Model

from host_cache.config import TransferFaults
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine


def answers(faults: TransferFaults | None) -> list[tuple[int, ...]]:
    tiers = TierConfig(device_pages=16, host_pages=64)  # too few device pages for all conversations
    config = EngineConfig(tiers=tiers, transfer_faults=faults, paranoid=True, background=False)
    random = np.random.default_rng(0)
    with Engine(Model(nnx.Rngs(0)), config=config) as engine:
        chats = [engine.conversation() for _ in range(4)]
        found = []
        for _ in range(4):
            for chat in chats:
                given = random.integers(256, size=60).tolist()
                found.append(chat.send(given, SamplingParams(max_tokens=8)).token_ids)
        engine.settle()
        engine.check_integrity()
        print("faults:", engine.checks.faults_injected, "failed loads:", engine.counters.failed_swap_ins)
        return found


if __name__ == "__main__":
    same = answers(None) == answers(TransferFaults(seed=1, fail=0.2))
    print("same answers:", same)
