"""The interface by which a model is served: bring your own Flax NNX model by writing to it.

A model knows nothing of pages, batches or caches. It is a token embedding, a list of layers of one
structure and a head, each a plain `nnx.Module` over a flat axis of tokens: the tokens of all
conversations in a batch, one after the other. The only door to the past is `LayerContext.attend`.

The worker splits the embedding, each layer and the head with `nnx.split` and compiles them apart: layer
by layer while key/value pages arrive, or all in one call. Layers whose static attributes are equal share
one compiled function, so give every layer the same structure and keep weights in one array per layer.

Under tensor parallelism the same modules run inside `jax.shard_map` with their shards of the weights:

* derive the number of heads from the shapes of the weights, not from the configuration;
* after a product whose contracted axis is split, `psum` over `context.axis_name` (the helpers in
  `pensieve_jax.parallel` are the identity when it is None), then add the bias;
* name parameters as in `pensieve_jax.parallel.PARTITION_RULES`, or bring rules of your own.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from pallas_kernels.kv_write import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the rest of the system must know of a model: the shape of its KV and its limits.

    Attributes:
        name: family and size, for people. The identity of the weights is their fingerprint.
        num_layers: layers that keep KV, in the order of `ServableModel.layers`.
        hidden_size: width of the residual stream.
        num_heads: query heads of a layer, over all shards.
        num_kv_heads: key/value heads of a layer, over all shards; divides `num_heads`.
        head_dim: elements of one head.
        vocab_size: rows of the embedding table and columns of the logits.
        max_context_tokens: positions 0 to this, exclusive, are valid.
        dtype: of weights, activations and KV.
        sliding_window: the window that *every* layer keeps to, in tokens, so that older KV is never read
            again; None when at least one layer attends to everything.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    dtype: np.dtype
    sliding_window: int | None = None

    def context_limit(self, asked: int | None) -> int:
        """Tokens that a conversation may have: as many as are asked for, at most as the model takes; None:
        just as many as it takes."""
        return min(asked or self.max_context_tokens, self.max_context_tokens)


@runtime_checkable
class LayerContext(Protocol):
    """What a module is given beside its input; made by the worker anew for each layer."""

    @property
    def positions(self) -> jax.Array:
        """i32[num_tokens], absolute position of each query token in its conversation."""
        ...

    @property
    def axis_name(self) -> str | None:
        """The `jax.shard_map` mesh axis over which heads are split; None on one device."""
        ...

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> jax.Array:
        """Store this layer's keys and values and attend to all of each token's own conversation so far.

        Call it exactly once per layer.

        Args:
            q: [num_tokens, local_heads, head_dim], rotated.
            k: [num_tokens, local_kv_heads, head_dim], rotated: what is stored is used as it is.
            v: [num_tokens, local_kv_heads, head_dim].
            scale: factor of the scores; `head_dim ** -0.5` when None.
            sliding_window: tokens visible to a query, itself included: the token at position p sees
                positions p - sliding_window + 1 to p. None: everything from 0 to p.

        Returns:
            [num_tokens, local_heads, head_dim] in the dtype of `q`.
        """
        ...

    def rotate_and_attend(
        self,
        qkv: jax.Array | tuple[jax.Array, jax.Array, jax.Array],
        rotary: Rotary,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> jax.Array:
        """`attend`, with norm and rotation of queries and keys in the same pass as the storing; in its place.

        Args:
            qkv: the projection's output: [num_tokens, local_heads + 2 * local_kv_heads, head_dim], heads of
                queries, keys and values in this order; or these three apart.
            rotary: norms and rotation.
            scale: as in `attend`.
            sliding_window: as in `attend`.

        Returns:
            [num_tokens, local_heads, head_dim] in the dtype of the queries.
        """
        ...


@runtime_checkable
class ServableModel(Protocol):
    """An `nnx.Module` that can be served.

    Attributes:
        spec: sizes and limits.
        embedding: `(token_ids i32[num_tokens], context) -> x [num_tokens, hidden_size]`; no `attend` here.
        layers: `nnx.List` of `num_layers` modules, each `(x, context) -> x`.
        head: `(x [n, hidden_size], context) -> logits f32[n, vocab_size]`, the same on every shard. Only
            the tokens that are sampled from are passed, so `context.positions` does not fit them.
            Tied embeddings: the head holds the same `nnx.Param` object as the embedding.
    """

    spec: ModelSpec
    embedding: Any
    layers: nnx.List
    head: Any
