"""The parts that the families share. Each runs on one device, or on its shard inside `jax.shard_map`.

A module holds whole arrays when it is made and sees local ones inside `shard_map`; static attributes hold
global sizes, so a difference between the two says that an array is split.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pensieve_jax.models.interface import LayerContext
from pensieve_jax.parallel import all_gather, axis_index, psum

INIT_STDDEV = 0.02
"""Standard deviation of random weights: `initializer_range` of all families here."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "swish": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
        "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    }
)
"""Activation functions by their name in config.json (transformers, `activations.py`)."""


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: np.dtype) -> nnx.Param:
    return nnx.Param((INIT_STDDEV * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


def _precision(dtype: np.dtype) -> jax.lax.Precision:
    # Whoever asks for float32 weights wants float32 products, not the TF32 that a GPU takes by default.
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


class Linear(nnx.Module):
    """y = x W + b with the kernel [in, out].

    Column-parallel use needs nothing: a shard has some of the outputs. A row-parallel one has some of the
    inputs; it sums the partial products over the shards in float32 and adds the bias once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool,
        dtype: np.dtype,
        rngs: nnx.Rngs,
        row_parallel: bool = False,
    ) -> None:
        self.row_parallel = row_parallel
        self.kernel = _normal(rngs, (in_features, out_features), dtype)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[num_tokens, in] -> [num_tokens, out], in the dtype of `x`."""
        axis_name = context.axis_name if self.row_parallel else None
        # Products always accumulate in float32; asking for float32 results costs traffic, so only where
        # something is still added to them.
        adds_more = self.bias is not None or axis_name is not None
        y = jnp.matmul(
            x,
            self.kernel[...],
            precision=_precision(x.dtype),
            preferred_element_type=jnp.float32 if adds_more else None,
        )
        y = psum(y, axis_name)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32, rounded before the scale as transformers does."""

    def __init__(self, features: int, *, epsilon: float, dtype: np.dtype) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return self.scale[...] * (wide * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in float32; without scale and bias when `affine` is False."""

    def __init__(self, features: int, *, epsilon: float, affine: bool, dtype: np.dtype) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype)) if affine else None
        self.bias = nnx.Param(jnp.zeros((features,), dtype)) if affine else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """A table of vectors, [rows, features]."""

    def __init__(self, rows: int, features: int, *, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        self.table = _normal(rngs, (rows, features), dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """i32[num_tokens] -> [num_tokens, features]. Ids out of range give the nearest row."""
        return jnp.take(self.table[...], ids, axis=0, mode="clip")


class TokenEmbedding(Embedding):
    """The vectors of the vocabulary; a shard may hold a run of the rows.

    Each shard looks up the ids that it owns, the others contribute zeros to the sum.
    """

    def __init__(self, rows: int, features: int, *, dtype: np.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(rows, features, dtype=dtype, rngs=rngs)
        self.num_rows = rows

    def lookup(self, ids: jax.Array, context: LayerContext) -> jax.Array:
        """i32[num_tokens] -> [num_tokens, features], whole on every shard."""
        local_rows = self.table.shape[0]
        if local_rows == self.num_rows:
            return self(ids)
        local_ids = ids - axis_index(context.axis_name) * local_rows
        owned = (local_ids >= 0) & (local_ids < local_rows)
        vectors = jnp.where(owned[:, None], self(local_ids), 0)
        return psum(vectors, context.axis_name)


class LMHead(nnx.Module):
    """Logits of the vocabulary. The table is [vocab, features] like the embedding's, which it may share."""

    def __init__(self, table: nnx.Param) -> None:
        self.num_rows = table.shape[0]
        self.table = table

    @classmethod
    def untied(cls, rows: int, features: int, *, dtype: np.dtype, rngs: nnx.Rngs) -> "LMHead":
        """A head with a table of its own."""
        return cls(_normal(rngs, (rows, features), dtype))

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        """[n, features] -> f32[n, vocab], whole on every shard."""
        table = self.table[...]
        logits = jax.lax.dot_general(
            x,
            table,
            (((1,), (1,)), ((), ())),
            precision=_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        if table.shape[0] == self.num_rows:
            return logits
        return all_gather(logits, context.axis_name, axis=1)
