"""The least time of a step: bytes and operations over the rates that the device reaches."""

from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from pensieve_jax.bench.cases import Case
from pensieve_jax.bench.timing import Ceilings
from pensieve_jax.models.interface import ModelSpec, ServableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a step must at least read and compute, on one device.

    Attributes:
        layer_weights: elements of the layers' matrices.
        head_weights: elements of the head's matrix.
        itemsize: bytes of an element, of KV too.
        kv_token_bytes: KV of one token in all layers.
        attention_flops: operations of all layers for one query and one key.
    """

    layer_weights: int
    head_weights: int
    itemsize: int
    kv_token_bytes: int
    attention_flops: int

    @classmethod
    def of(cls, model: ServableModel, num_shards: int) -> "ModelSize":
        """The sizes of one of the shards."""
        spec: ModelSpec = model.spec

        def elements(part: object) -> int:
            leaves = jax.tree.leaves(nnx.state(part, nnx.Param))
            return sum(int(np.prod(leaf.shape)) for leaf in leaves) // num_shards

        itemsize = np.dtype(spec.dtype).itemsize
        return cls(
            layer_weights=elements(model.layers),
            head_weights=elements(model.head),
            itemsize=itemsize,
            kv_token_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize // num_shards,
            attention_flops=4 * spec.num_layers * spec.num_heads * spec.head_dim // num_shards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The parts of a step's least time.

    Attributes:
        bytes: weights, and KV that is read.
        flops: operations.
        products_s: the layers' and the head's products: the longer of reading and computing.
        attention_s: attention, likewise.
    """

    bytes: float
    flops: float
    products_s: float
    attention_s: float

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.products_s + self.attention_s


def step_floor(case: Case, size: ModelSize, ceilings: Ceilings) -> Floor:
    """The floor of one step over a case's rows, which samples once per row."""

    def least_s(num_bytes: float, flops: float) -> float:
        return max(num_bytes / ceilings.copy_bytes_per_s, flops / ceilings.matmul_flops)

    layer_bytes, head_bytes = size.layer_weights * size.itemsize, size.head_weights * size.itemsize
    layer_flops, head_flops = 2 * size.layer_weights * case.tokens, 2 * size.head_weights * case.rows
    kv_bytes = case.rows * (case.past_tokens + case.new_tokens) * size.kv_token_bytes
    pairs = case.rows * case.new_tokens * (case.past_tokens + (case.new_tokens + 1) / 2)
    attention_flops = pairs * size.attention_flops
    return Floor(
        bytes=layer_bytes + head_bytes + kv_bytes,
        flops=layer_flops + head_flops + attention_flops,
        products_s=least_s(layer_bytes, layer_flops) + least_s(head_bytes, head_flops),
        attention_s=least_s(kv_bytes, attention_flops),
    )
