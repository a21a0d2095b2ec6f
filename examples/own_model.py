"""Serve a Flax NNX model of your own, with its state kept between turns.

A model is an embedding, layers and a head. A layer calls `context.attend(q, k, v)` once; pages, batches
and caches are not its business. Run: python examples/own_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.models.interface import LayerContext, ModelSpec

SPEC = ModelSpec(
    name="tiny", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=256, max_context_tokens=2048, dtype=np.dtype(np.float32),
)  # fmt: skip


class Embedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(SPEC.vocab_size, SPEC.hidden_size, rngs=rngs)

    def __call__(self, token_ids: jax.Array, context: LayerContext) -> jax.Array:
        angle = context.positions[:, None] / 10_000 ** (jnp.arange(32) / 32)
        return self.table(token_ids) + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(SPEC.hidden_size, rngs=rngs)
        self.qkv = nnx.Linear(SPEC.hidden_size, (4 + 2 + 2) * 16, rngs=rngs)
        self.out = nnx.Linear(4 * 16, SPEC.hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm(x)).reshape(-1, 8, 16), [4, 6], axis=1)
        return x + self.out(context.attend(q, k, v).reshape(len(x), -1))


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(SPEC.hidden_size, SPEC.vocab_size, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        return self.out(x)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.spec, self.embedding, self.head = SPEC, Embedding(rngs), Head(rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(SPEC.num_layers)])


if __name__ == "__main__":
    with Engine(Model(nnx.Rngs(0))) as engine:
        chat = engine.conversation()
        for turn in ([1, 2, 3], [4, 5]):
            result = chat.send(turn, SamplingParams(max_tokens=8))
            print(result.token_ids, result.receipt)
