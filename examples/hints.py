"""Load a conversation's state while its user types. Run: python examples/hints.py"""

import numpy as np
from flax import nnx
from own_model import Model

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine

BRIEFLY = SamplingParams(max_tokens=8)


def tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(256, size=count).tolist()


def main() -> None:
    # background=False: steps run when somebody waits, so that this prints the same every time.
    config = EngineConfig(tiers=TierConfig(device_pages=16, host_pages=64), background=False)
    with Engine(Model(nnx.Rngs(0)), config=config) as engine:
        alice = engine.conversation("alice", priority=2.0, time_to_live_s=3600)
        alice.send(tokens(200), BRIEFLY)
        engine.conversation("bob").send(
            tokens(480), BRIEFLY
        )  # fills the device: Alice's state is in the host
        engine.settle()

        print("chunks to load:", alice.warm())  # she begins to type
        while engine.step():  # in a server, the engine's thread does this
            pass
        receipt = alice.send(tokens(5), BRIEFLY).receipt
        assert receipt is not None
        print(
            "history from the device:", receipt.tokens_from_device, "from the host:", receipt.tokens_from_host
        )

        alice.release()  # she has closed the window
        receipt = alice.send(tokens(5), BRIEFLY).receipt
        assert receipt is not None
        print("computed again:", receipt.tokens_recomputed)


if __name__ == "__main__":
    main()
