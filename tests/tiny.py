"""A tiny model whose answers depend on all of its context, and its dense forward pass: the truth in tests."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pensieve_jax.models.interface import ModelSpec

VOCAB = 96
SPEC = ModelSpec(
    name="tiny",
    num_layers=2,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_context_tokens=2048,
    dtype=np.dtype(np.float32),
)


class Dense(nnx.Module):
    def __init__(self, rows, columns, gain, rngs):
        self.kernel = nnx.Param(gain * rows**-0.5 * jax.random.normal(rngs.params(), (rows, columns)))

    def __call__(self, x):
        return x @ self.kernel[...]


class Embedding(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, SPEC.hidden_size)))

    def __call__(self, token_ids, context):
        angle = context.positions[:, None] / 50.0 ** (jnp.arange(24) / 24)
        return self.table[...][token_ids] + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.qkv = Dense(SPEC.hidden_size, 8 * 16, 1.5, rngs)
        self.out = Dense(64, SPEC.hidden_size, 4.0, rngs)
        self.up = Dense(SPEC.hidden_size, 96, 1.0, rngs)
        self.down = Dense(96, SPEC.hidden_size, 1.0, rngs)

    def __call__(self, x, context):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(self.qkv(h).reshape(-1, 8, 16), [4, 6], axis=1)
        x = x + self.out(context.attend(q, k, v).reshape(len(x), -1))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = Dense(SPEC.hidden_size, VOCAB, 3.0, rngs)

    def __call__(self, x, context):
        return self.out(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))


class TinyModel(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.spec, self.embedding, self.head = SPEC, Embedding(rngs), Head(rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(SPEC.num_layers)])


class DenseContext:
    """Plain causal attention over one sequence: no pages, no cache."""

    axis_name = None

    def __init__(self, positions):
        self.positions = positions

    def attend(self, q, k, v, *, scale=None, sliding_window=None):
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = self.positions[:, None] - self.positions[None]
        seen = (distance >= 0) & (distance < (sliding_window or 1 << 30))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v)

    def rotate_and_attend(self, qkv, rotary, **options):
        q, k, v = qkv
        return self.attend(rotary(q, rotary.q_norm), rotary(k, rotary.k_norm), v, **options)


class EightBitContext(DenseContext):
    """With keys and values rounded as 8-bit pages of 32 tokens round them."""

    def attend(self, q, k, v, **options):
        return super().attend(q, _as_in_8_bits(k), _as_in_8_bits(v), **options)


def _as_in_8_bits(x):
    """[n, heads, head_dim], n divisible by 32: the first token of each page sets its scale."""
    largest = jnp.repeat(jnp.abs(x[::32]).max(-1, keepdims=True), 32, axis=0)
    scale = jnp.exp2(jnp.maximum(jnp.floor(jnp.log2(largest)) - 2, -4))
    return jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


CONTEXTS = {None: DenseContext, "fp8_e4m3": EightBitContext}
TOLERANCES = {None: 1e-3, "fp8_e4m3": 0.02}
"""Two candidates closer than float32's rounding may swap places with the order of sums; keys in 8 bits that
fall to the other side by that are further apart."""


@partial(jax.jit, static_argnames=("graph", "kv_dtype"))
def _forward(graph, state, token_ids, kv_dtype):
    model = nnx.merge(graph, state)
    context = CONTEXTS[kv_dtype](jnp.arange(len(token_ids)))
    x = model.embedding(token_ids, context)
    for layer in model.layers:
        x = layer(x, context)
    return model.head(x, context)


def dense_logits(model, token_ids, kv_dtype=None):
    """f32[n, vocab]: logits after each token, computed afresh."""
    padded = np.zeros(-(-len(token_ids) // 256) * 256, np.int32)
    padded[: len(token_ids)] = token_ids
    graph, state = nnx.split(model)
    with jax.default_matmul_precision("highest"):  # a GPU's own default has ten bits
        return np.asarray(_forward(graph, state, padded, kv_dtype))[: len(token_ids)]


def assert_greedy(model, context_ids, output_ids, kv_dtype=None):
    """The output is what greedy decoding gives when everything is computed afresh."""
    tokens = [*context_ids, *output_ids]
    logits = dense_logits(model, tokens, kv_dtype)[len(context_ids) - 1 : -1]
    assert np.isfinite(logits).all()
    chosen = logits[np.arange(len(output_ids)), list(output_ids)]
    behind = logits.max(-1) - chosen
    close = behind < TOLERANCES[kv_dtype]
    assert close.all(), f"at {int(behind.argmax())}: {behind.max():.4f} below the best logit"
