"""OPT (arXiv 2205.01068), all sizes: learned positions, layer norms, ReLU, and the 350M's other order."""

import jax
from flax import nnx

from pensieve_jax.models.interface import LayerContext
from pensieve_jax.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    TokenEmbedding,
    project,
)
from pensieve_jax.models.opt_config import OptConfig

POSITION_OFFSET = 2
"""Rows of the position table before that of position 0 (transformers, `OPTLearnedPositionalEmbedding`)."""

LAYER_NORM_EPSILON = 1e-5
"""PyTorch's default, which OPT never changes."""


def _norm(config: OptConfig) -> LayerNorm:
    spec = config.spec
    return LayerNorm(
        spec.hidden_size, epsilon=LAYER_NORM_EPSILON, affine=config.norm_affine, dtype=spec.dtype
    )


class OptAttention(nnx.Module):
    """Multi-head attention."""

    def __init__(self, config: OptConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.head_dim = spec.head_dim

        def projection(*, row_parallel: bool = False) -> Linear:
            return Linear(
                spec.hidden_size,
                spec.hidden_size,
                use_bias=config.use_bias,
                dtype=spec.dtype,
                rngs=rngs,
                row_parallel=row_parallel,
            )

        self.q_proj = projection()
        self.k_proj = projection()
        self.v_proj = projection()
        self.out_proj = projection(row_parallel=True)

    def __call__(self, x: jax.Array, context: LayerContext, *, residual: jax.Array) -> jax.Array:
        """[num_tokens, hidden] -> [num_tokens, hidden], added to the residual stream."""
        # -1: a shard has its own share of the heads.
        head_shape = (x.shape[0], -1, self.head_dim)
        projections = project(x, [self.q_proj, self.k_proj, self.v_proj], context)
        q, k, v = (y.reshape(head_shape) for y in projections)
        attended = context.attend(q, k, v)
        return self.out_proj(attended.reshape(x.shape[0], -1), context, add=residual)


class OptLayer(nnx.Module):
    """Attention and feed-forward around the residual stream, with norms before or behind each."""

    def __init__(self, config: OptConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.norm_first = config.norm_first
        self.activation = config.activation
        self.self_attn = OptAttention(config, rngs=rngs)
        self.self_attn_layer_norm = _norm(config)
        self.fc1 = Linear(
            spec.hidden_size, config.ffn_size, use_bias=config.use_bias, dtype=spec.dtype, rngs=rngs
        )
        self.fc2 = Linear(
            config.ffn_size,
            spec.hidden_size,
            use_bias=config.use_bias,
            dtype=spec.dtype,
            rngs=rngs,
            row_parallel=True,
        )
        self.final_layer_norm = _norm(config)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        if self.norm_first:
            x = self.self_attn(self.self_attn_layer_norm(x), context, residual=x)
            return self._feed_forward(self.final_layer_norm(x), context, residual=x)
        x = self.self_attn_layer_norm(self.self_attn(x, context, residual=x))
        return self.final_layer_norm(self._feed_forward(x, context, residual=x))

    def _feed_forward(self, x: jax.Array, context: LayerContext, *, residual: jax.Array) -> jax.Array:
        return self.fc2(self.fc1(x, context, activation=self.activation), context, add=residual)


class OptEmbedding(nnx.Module):
    """Token vectors, projected to the hidden size where they are narrower, plus position vectors."""

    def __init__(self, config: OptConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.embed_tokens = TokenEmbedding(
            spec.vocab_size, config.embedding_size, dtype=spec.dtype, rngs=rngs
        )
        self.embed_positions = Embedding(
            spec.max_context_tokens + POSITION_OFFSET, spec.hidden_size, dtype=spec.dtype, rngs=rngs
        )
        self.project_in = (
            None
            if config.embedding_size == spec.hidden_size
            else Linear(config.embedding_size, spec.hidden_size, use_bias=False, dtype=spec.dtype, rngs=rngs)
        )

    def __call__(self, token_ids: jax.Array, context: LayerContext) -> jax.Array:
        """i32[num_tokens] -> [num_tokens, hidden]."""
        x = self.embed_tokens.lookup(token_ids, context)
        if self.project_in is not None:
            x = self.project_in(x, context)
        return x + self.embed_positions(context.positions + POSITION_OFFSET)


class OptHead(nnx.Module):
    """The last norm, the projection to the width of the token vectors, and the logits."""

    def __init__(self, config: OptConfig, *, lm_head: LMHead, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.final_layer_norm = _norm(config) if config.final_norm else None
        self.project_out = (
            None
            if config.embedding_size == spec.hidden_size
            else Linear(spec.hidden_size, config.embedding_size, use_bias=False, dtype=spec.dtype, rngs=rngs)
        )
        self.lm_head = lm_head

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[n, hidden] -> f32[n, vocab]."""
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        if self.project_out is not None:
            x = self.project_out(x, context)
        return self.lm_head(x, context)


class OptModel(nnx.Module):
    """A `ServableModel` of OPT, with random weights from `rngs`."""

    def __init__(self, config: OptConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.spec = spec
        self.embedding = OptEmbedding(config, rngs=rngs)
        self.layers = nnx.List([OptLayer(config, rngs=rngs) for _ in range(spec.num_layers)])
        lm_head = (
            LMHead(self.embedding.embed_tokens.table)
            if config.tied
            else LMHead.untied(spec.vocab_size, config.embedding_size, dtype=spec.dtype, rngs=rngs)
        )
        self.head = OptHead(config, lm_head=lm_head, rngs=rngs)
