"""The parts that the families share. Each runs on one device, or on its shard inside `jax.shard_map`.

A module holds whole arrays when it is made and sees local ones inside `shard_map`; static attributes hold
global sizes, so a difference between the two says that an array is split.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.norm import layer_norm, rms_norm
from pallas_kernels.skinny_matmul import products
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


class Linear(nnx.Module):
    """y = x W^T + b with the weight [out, in], as in checkpoints: a feature's weights are one run of bytes.

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
        self.weight = _normal(rngs, (out_features, in_features), dtype)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(
        self,
        x: jax.Array,
        context: LayerContext,
        *,
        activation: str | None = None,
        add: jax.Array | None = None,
    ) -> jax.Array:
        """[num_tokens, in] -> [num_tokens, out], in the dtype of `x`; then the activation, then the sum."""
        return project(x, [self], context, activation=activation, add=add)[0]


def project(
    x: jax.Array,
    linears: Sequence[Linear],
    context: LayerContext,
    *,
    activation: str | None = None,
    gated: bool = False,
    add: jax.Array | None = None,
) -> list[jax.Array]:
    """The same input through several projections of a kind, in one launch where there is a kernel for it.

    Args:
        x: [num_tokens, in].
        linears: all with a bias or none; all row-parallel or none.
        context: of the layer.
        activation: one of `ACTIVATIONS`, in float32; None: none.
        gated: of two projections, activation(first) * second, in float32.
        add: [num_tokens, out]: added to the rounded result, or in a kernel before it is rounded.

    Returns:
        [num_tokens, out] in the dtype of `x` for each, or one if gated.
    """
    weights = [linear.weight[...] for linear in linears]
    biases = [linear.bias[...] for linear in linears if linear.bias is not None]
    function = None if activation is None else ACTIVATIONS[activation]
    axis_name = context.axis_name if linears[0].row_parallel else None
    if axis_name is None:
        return products(x, weights, biases=biases, activation=function, gated=gated, add=add, overlap=True)
    # What follows the product counts once, so it waits for the sum over the shards.
    (y,) = products(x, weights, out_dtype=jnp.float32, overlap=True)
    y = psum(y, axis_name)
    y = y + biases[0].astype(jnp.float32) if biases else y
    y = (y if function is None else function(y)).astype(x.dtype)
    return [y if add is None else y + add]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32, rounded before the scale as transformers does."""

    def __init__(self, features: int, *, epsilon: float, dtype: np.dtype) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        return rms_norm(x, self.scale[...], epsilon=self.epsilon)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, in float32; without scale and bias when `affine` is False."""

    def __init__(self, features: int, *, epsilon: float, affine: bool, dtype: np.dtype) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype)) if affine else None
        self.bias = nnx.Param(jnp.zeros((features,), dtype)) if affine else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape and dtype."""
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, epsilon=self.epsilon)


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
        (logits,) = products(x, [table], out_dtype=jnp.float32, overlap=True)
        if table.shape[0] == self.num_rows:
            return logits
        return all_gather(logits, context.axis_name, axis=1)
