"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3 (arXiv 2302.13971 and successors).

One module set; a `LlamaConfig` says which biases, norms, windows and rotary scaling a checkpoint has.
"""

import jax
from flax import nnx

from pallas_kernels.kv_write import Rotary
from pensieve_jax.models.interface import LayerContext
from pensieve_jax.models.layers import Linear, LMHead, RMSNorm, TokenEmbedding, project
from pensieve_jax.models.llama_config import LlamaConfig


class LlamaAttention(nnx.Module):
    """Grouped-query attention with rotated queries and keys."""

    def __init__(self, config: LlamaConfig, *, sliding_window: int | None, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.head_dim = spec.head_dim
        self.rope = config.rope
        self.sliding_window = sliding_window
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def input_projection(size: int) -> Linear:
            return Linear(spec.hidden_size, size, use_bias=config.qkv_bias, dtype=spec.dtype, rngs=rngs)

        def head_norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(spec.head_dim, epsilon=config.rms_norm_epsilon, dtype=spec.dtype)

        self.q_proj = input_projection(q_size)
        self.k_proj = input_projection(kv_size)
        self.v_proj = input_projection(kv_size)
        self.q_norm = head_norm()
        self.k_norm = head_norm()
        self.o_proj = Linear(
            q_size,
            spec.hidden_size,
            use_bias=config.output_bias,
            dtype=spec.dtype,
            rngs=rngs,
            row_parallel=True,
        )

    def __call__(self, x: jax.Array, context: LayerContext, *, residual: jax.Array) -> jax.Array:
        """[num_tokens, hidden] -> [num_tokens, hidden], added to the residual stream."""
        # -1: a shard has its own share of the heads.
        head_shape = (x.shape[0], -1, self.head_dim)
        projections = project(x, [self.q_proj, self.k_proj, self.v_proj], context)
        q, k, v = (y.reshape(head_shape) for y in projections)
        attended = context.rotate_and_attend(
            (q, k, v), self._rotary(context.positions), sliding_window=self.sliding_window
        )
        return self.o_proj(attended.reshape(x.shape[0], -1), context, add=residual)

    def _rotary(self, positions: jax.Array) -> Rotary:
        cos, sin = self.rope(positions)
        if self.q_norm is None or self.k_norm is None:
            return Rotary(cos=cos, sin=sin)
        scales = self.q_norm.scale[...], self.k_norm.scale[...]
        return Rotary(cos=cos, sin=sin, q_norm=scales[0], k_norm=scales[1], epsilon=self.q_norm.epsilon)


class LlamaMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); the product is taken in float32."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        hidden, inner, dtype = config.spec.hidden_size, config.intermediate_size, config.spec.dtype
        self.activation = config.activation
        self.gate_proj = Linear(hidden, inner, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, inner, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(
            inner, hidden, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs, row_parallel=True
        )

    def __call__(self, x: jax.Array, context: LayerContext, *, residual: jax.Array) -> jax.Array:
        """[num_tokens, hidden] -> [num_tokens, hidden], added to the residual stream."""
        pair = [self.gate_proj, self.up_proj]
        (gated,) = project(x, pair, context, activation=self.activation, gated=True)
        return self.down_proj(gated, context, add=residual)


class LlamaLayer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, sliding_window: int | None, rngs: nnx.Rngs) -> None:
        def norm() -> RMSNorm:
            spec = config.spec
            return RMSNorm(spec.hidden_size, epsilon=config.rms_norm_epsilon, dtype=spec.dtype)

        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, sliding_window=sliding_window, rngs=rngs)
        self.post_attention_layernorm = norm()
        self.mlp = LlamaMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        x = self.self_attn(self.input_layernorm(x), context, residual=x)
        return self.mlp(self.post_attention_layernorm(x), context, residual=x)


class LlamaEmbedding(nnx.Module):
    """Token ids to vectors."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.embed_tokens = TokenEmbedding(spec.vocab_size, spec.hidden_size, dtype=spec.dtype, rngs=rngs)

    def __call__(self, token_ids: jax.Array, context: LayerContext) -> jax.Array:
        """i32[num_tokens] -> [num_tokens, hidden]."""
        return self.embed_tokens.lookup(token_ids, context)


class LlamaHead(nnx.Module):
    """The last norm and the logits."""

    def __init__(self, config: LlamaConfig, *, lm_head: LMHead) -> None:
        spec = config.spec
        self.norm = RMSNorm(spec.hidden_size, epsilon=config.rms_norm_epsilon, dtype=spec.dtype)
        self.lm_head = lm_head

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[n, hidden] -> f32[n, vocab]."""
        return self.lm_head(self.norm(x), context)


class LlamaModel(nnx.Module):
    """A `ServableModel` of the Llama family, with random weights from `rngs`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        spec = config.spec
        self.spec = spec
        self.embedding = LlamaEmbedding(config, rngs=rngs)
        self.layers = nnx.List(
            [LlamaLayer(config, sliding_window=window, rngs=rngs) for window in config.sliding_windows]
        )
        lm_head = (
            LMHead(self.embedding.embed_tokens.table)
            if config.tied
            else LMHead.untied(spec.vocab_size, spec.hidden_size, dtype=spec.dtype, rngs=rngs)
        )
        self.head = LlamaHead(config, lm_head=lm_head)
