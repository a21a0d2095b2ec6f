"""The traced functions of a step: a model's parts over a padded batch, without any array of their own."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.page_move import gather_layers, read_pages, scatter_pages
from pensieve_jax.models.interface import ModelSpec, ServableModel
from pensieve_jax.parallel import TENSOR_AXIS, partition_specs
from pensieve_jax.worker.batch import BatchArrays
from pensieve_jax.worker.context import PagedContext, PlainContext

KV_SPEC = P(None, None, TENSOR_AXIS)
"""Pools and staged pages [pages, 2, kv_heads, page_size, head_dim] are split over kv heads."""

type Weights = list[Any]
"""A part's weights, flat: in the order of its tree's leaves. Flattening a model's tree at every step would
take the host longer than the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The embedding, a layer or the head: everything but its weights. Equal parts run the same program."""

    graph: nnx.GraphDef
    tree: Any
    """The structure of its weights."""
    specs: tuple[P, ...]
    """How each weight is split over the mesh."""

    def module(self, weights: Weights) -> Any:
        """The part as a module."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))


def split_model(model: ServableModel, *, num_shards: int) -> tuple[list[Part], list[Weights]]:
    """Embedding, layers and head: what they are, and their weights where they lie.

    Raises:
        InvalidArgumentError: a weight doesn't divide over the shards.
    """
    parts, weights = [], []
    for module in (model.embedding, *model.layers, model.head):
        graph, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        specs = [P()] * len(leaves)
        if num_shards > 1:
            split = partition_specs(state, num_shards=num_shards)
            specs = jax.tree.leaves(split, is_leaf=lambda leaf: isinstance(leaf, P))
        parts.append(Part(graph=graph, tree=tree, specs=tuple(specs)))
        weights.append(leaves)
    return parts, weights


class StepFunctions:
    """What a step computes, layer by layer or whole, on one device or sharded over several."""

    def __init__(self, spec: ModelSpec, parts: Sequence[Part], mesh: Mesh) -> None:
        """Args:
        spec: of the model.
        parts: embedding, layers, head.
        mesh: one axis, `TENSOR_AXIS`.
        """
        self.mesh = mesh
        self._axis = TENSOR_AXIS if mesh.size > 1 else None
        self._exact = np.dtype(spec.dtype) == np.float32
        self.kinds: list[Part] = []
        """Parts that differ."""
        self.kind_of: list[int] = []
        """For each part its place in `kinds`: cheap to hash, which JAX does at every call."""
        for part in parts:
            if part not in self.kinds:
                self.kinds.append(part)
            self.kind_of.append(self.kinds.index(part))

    def place(self, weights: Sequence[Weights]) -> list[Weights]:
        """Put weights where steps want them, without a copy where they are there. Weights that are committed
        to a device, as the pools are, make the embedding's output like a layer's, which spares compiling the
        layer twice."""
        return [
            [
                jax.device_put(leaf, NamedSharding(self.mesh, spec))
                for leaf, spec in zip(leaves, self.kinds[kind].specs, strict=True)
            ]
            for leaves, kind in zip(weights, self.kind_of, strict=True)
        ]

    def embed(self, weights: Weights, batch: BatchArrays) -> jax.Array:
        """[num_tokens, width]"""
        part = self.kinds[self.kind_of[0]]

        def embed(weights: Weights, batch: BatchArrays) -> jax.Array:
            return part.module(weights)(batch.token_ids, PlainContext(batch, self._axis))

        with self._precision():
            return self._sharded(embed, (list(part.specs), P()), P(), weights, batch)

    def layer(
        self, kind: int, weights: Weights, x: jax.Array, kv: jax.Array, batch: BatchArrays
    ) -> tuple[jax.Array, jax.Array]:
        """The one layer function of both ways.

        Args:
            kind: place among `kinds`.
            weights: of the layer.
            x: [num_tokens, width].
            kv: the layer's pool.
            batch: the padded batch.

        Returns:
            x and the pool after the layer.
        """
        part = self.kinds[kind]

        def layer(
            weights: Weights, x: jax.Array, kv: jax.Array, batch: BatchArrays
        ) -> tuple[jax.Array, jax.Array]:
            context = PagedContext(kv, batch, self._axis)
            x = part.module(weights)(x, context)
            return x, context.kv

        with self._precision():
            specs = (list(part.specs), P(), KV_SPEC, P())
            return self._sharded(layer, specs, (P(), KV_SPEC), weights, x, kv, batch)

    def head(self, weights: Weights, x: jax.Array, batch: BatchArrays) -> jax.Array:
        """f32[num_samples, vocab]"""
        part = self.kinds[self.kind_of[-1]]

        def head(weights: Weights, x: jax.Array, batch: BatchArrays) -> jax.Array:
            return part.module(weights)(x[batch.sample_tokens], PlainContext(batch, self._axis))

        with self._precision():
            return self._sharded(head, (list(part.specs), P(), P()), P(), weights, x, batch)

    def whole(
        self, weights: list[Weights], pools: list[jax.Array], batch: BatchArrays
    ) -> tuple[jax.Array, list[jax.Array]]:
        """f32[num_samples, vocab], and the pools after the step."""
        x = self.embed(weights[0], batch)
        # Layers that are alike are traced and lowered once: a step of 40 layers would take a minute.
        layer = jax.jit(self.layer, static_argnums=0)
        written = []
        for kind, leaves, kv in zip(self.kind_of[1:-1], weights[1:-1], pools, strict=True):
            x, kv = layer(kind, leaves, x, kv, batch)
            written.append(kv)
        return self.head(weights[-1], x, batch), written

    def scatter(self, kv: jax.Array, staged: jax.Array, pages: jax.Array) -> jax.Array:
        """A layer's pool with staged pages in it."""
        return self._sharded(scatter_pages, (KV_SPEC, KV_SPEC, P()), KV_SPEC, kv, staged, pages)

    def gather(self, pools: list[jax.Array], pages: jax.Array) -> jax.Array:
        """[num_layers, n, *page]: pages out of the pools of all layers."""
        specs = ([KV_SPEC] * len(pools), P())
        return self._sharded(gather_layers, specs, P(None, *KV_SPEC), pools, pages)

    def read(
        self,
        pools: list[jax.Array],
        addresses: jax.Array,
        pages: jax.Array,
        host_pages: jax.Array,
        *,
        num_host_pages: int,
    ) -> list[jax.Array]:
        """The pools with pages from registered host memory in them.

        Args:
            pools: of all layers.
            addresses: i32[num_shards * 2 num_layers]: for each shard, what `read_pages` wants.
            pages: i32[n]: where they go.
            host_pages: i32[n]: where they come from.
            num_host_pages: of the host tier.
        """

        def read(pools: list[jax.Array], addresses: jax.Array, *pages: jax.Array) -> list[jax.Array]:
            return [
                read_pages(pool, addresses, layer, *pages, num_host_pages=num_host_pages)
                for layer, pool in enumerate(pools)
            ]

        pool_specs = [KV_SPEC] * len(pools)
        specs = (pool_specs, P(TENSOR_AXIS), P(), P())
        return self._sharded(read, specs, pool_specs, pools, addresses, pages, host_pages)

    def _precision(self) -> Any:
        """float32 means float32: no reduced-precision products on the GPU's matrix units."""
        return jax.default_matmul_precision("highest") if self._exact else nullcontext()

    def _sharded(self, function: Callable, in_specs: tuple, out_specs: Any, *args: Any) -> Any:
        if self._axis is None:
            return function(*args)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(*args)
