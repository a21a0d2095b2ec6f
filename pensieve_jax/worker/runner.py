"""Runs a model over a padded batch, layer by layer or whole, and owns the device pool."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.page_move import gather_pages, scatter_pages
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.parallel import TENSOR_AXIS, check_head_sharding, partition_specs
from pensieve_jax.worker.batch import BatchArrays
from pensieve_jax.worker.context import PagedContext, PlainContext
from pensieve_jax.worker.sampling import SampleOutput, SamplingArrays, sample

KV_SPEC = P(None, None, TENSOR_AXIS)
"""Pools and staged pages [pages, 2, kv_heads, page_size, head_dim] are split over kv heads."""
LOOK_AHEAD = 2
"""Layers whose swap-in is issued ahead of a layer's compute: a transfer that is enqueued behind compute waits
for all of it."""

type StageIn = Callable[[int], jax.Array]
"""Layer number -> its staged pages on the device, still being copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Device memory of a step, on each device."""

    workspace_bytes: int
    """Taken beside arguments: temporaries, and results in memory of their own."""
    pools_bytes: int
    """Of the pools of all layers."""
    in_place_bytes: int
    """Of arguments whose memory the results take over. The pools are among them, or they would be copied."""


class ModelRunner:
    """The two ways to run a step, over one layer function.

    * `run_resident`: one compiled call for everything, for steps without swap-ins.
    * `run_layered`: one compiled call per layer, so that a layer waits for its own pages only.
    """

    def __init__(self, model: ServableModel, *, num_pages: int, page_tokens: int, mesh: Mesh) -> None:
        """Take the model's weights and allocate the device pool.

        Args:
            model: its weights are used in place, or spread over the mesh if it has several devices.
            num_pages: pages of the pool.
            page_tokens: tokens of a page.
            mesh: one axis, `TENSOR_AXIS`.

        Raises:
            InvalidArgumentError: the model doesn't divide over the mesh.
        """
        self.spec = model.spec
        self.mesh = mesh
        self.num_shards = mesh.devices.size
        self._axis = TENSOR_AXIS if self.num_shards > 1 else None
        spec = model.spec
        check_head_sharding(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, num_shards=self.num_shards
        )
        self.kv_sharding = NamedSharding(mesh, KV_SPEC)
        self._pool_shape = (num_pages, 2, spec.num_kv_heads, page_tokens, spec.head_dim)
        self.set_weights(model)
        self.reset_pool()
        self._embed = jax.jit(self._embed_step, static_argnames="graphs")
        self._layer = jax.jit(self._layer_step, static_argnames="graphs", donate_argnames="kv")
        self._head = jax.jit(self._head_step, static_argnames="graphs")
        self._whole = jax.jit(self._whole_step, static_argnames="graphs", donate_argnames="pools")
        # Apart from the layers: another way of choosing tokens compiles this alone.
        self._sample = jax.jit(sample)
        self._scatter = jax.jit(self._scatter_step, donate_argnames="kv")
        self._gather = jax.jit(lambda pools, pages: [gather_pages(pool, pages) for pool in pools])
        self._copy = jax.jit(
            lambda pools, source, target: [pool.at[target].set(pool[source]) for pool in pools],
            donate_argnums=0,
        )
        self._fill = jax.jit(
            lambda pools, pages, value: [pool.at[pages].set(value, mode="drop") for pool in pools],
            donate_argnums=0,
        )

    def set_weights(self, model: ServableModel) -> None:
        """Use other weights of the same structure from the next step on. What the pool holds is stale then.

        Raises:
            InvalidArgumentError: the model has other dimensions, or doesn't divide over the mesh.
        """
        if model.spec != self.spec:
            raise InvalidArgumentError(f"model: got {model.spec}, expected the dimensions {self.spec}")
        parts = [model.embedding, *model.layers, model.head]
        graphs, states = zip(*(nnx.split(part) for part in parts), strict=True)
        self._specs = [partition_specs(s, num_shards=self.num_shards) for s in states] if self._axis else []
        if self._axis:
            states = [
                jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(self.mesh, s)), state, specs)
                for state, specs in zip(states, self._specs, strict=True)
            ]
        else:
            # Without a copy. Weights that are committed to a device, as the pools are, make the embedding's
            # output like a layer's, which spares compiling the layer twice.
            states = jax.device_put(states, NamedSharding(self.mesh, P()))
        self._graphs, self._states = tuple(graphs), list(states)

    def reset_pool(self) -> None:
        """Allocate the pool anew, as at the start or after a step that broke off with the pool given away."""
        zeros = jax.jit(lambda: jnp.zeros(self._pool_shape, self.spec.dtype), out_shardings=self.kv_sharding)
        self._pools: list[jax.Array] = []  # frees the old ones first
        self._pools = [zeros() for _ in range(self.spec.num_layers)]

    def memory(self, batch: BatchArrays, *, num_pages: int) -> StepMemory:
        """What a step takes in one call, by the compiler's account.

        Args:
            batch: of the step.
            num_pages: pages of a pool that needn't be there.
        """
        shape = (num_pages, *self._pool_shape[1:])
        pool = jax.ShapeDtypeStruct(shape, self.spec.dtype, sharding=self.kv_sharding)
        pools = [pool] * self.spec.num_layers
        lowered = self._whole.lower(graphs=self._graphs, states=self._states, pools=pools, batch=batch)
        account = lowered.compile().memory_analysis()
        assert account is not None, "CPU and GPU give one"
        pool_bytes = int(np.prod(shape)) * np.dtype(self.spec.dtype).itemsize // self.num_shards
        return StepMemory(
            workspace_bytes=account.temp_size_in_bytes
            + account.output_size_in_bytes
            - account.alias_size_in_bytes,
            pools_bytes=pool_bytes * self.spec.num_layers,
            in_place_bytes=account.alias_size_in_bytes,
        )

    def lower(self, batch: BatchArrays, *, layered: bool) -> list[jax.stages.Lowered]:
        """The programs of a step, traced. Once they are compiled, steps of this shape find them so.

        Args:
            batch: of the shape.
            layered: for `run_layered`; else for `run_resident`.
        """
        graphs, states = self._graphs, self._states
        if not layered:
            return [self._whole.lower(graphs=graphs, states=states, pools=self._pools, batch=batch)]
        x = self._embed(graphs=graphs[0], state=states[0], batch=batch)
        return [
            self._layer.lower(graphs=graphs[1], state=states[1], x=x, kv=self._pools[0], batch=batch),
            self._head.lower(graphs=graphs[-1], state=states[-1], x=x, batch=batch),
        ]

    def run_resident(self, batch: BatchArrays, sampling: SamplingArrays) -> SampleOutput:
        """Run all layers in one call. Doesn't wait for the result."""
        logits, self._pools = self._whole(
            graphs=self._graphs, states=self._states, pools=self._pools, batch=batch
        )
        return self._sample(logits, sampling)

    def run_layered(
        self, batch: BatchArrays, sampling: SamplingArrays, stage_in: StageIn | None, pages: np.ndarray
    ) -> SampleOutput:
        """Run one layer after the other, each after its staged pages are put into the pool.

        Args:
            batch: the padded batch.
            sampling: how to choose the tokens.
            stage_in: starts a layer's swap-in; None if nothing is swapped in.
            pages: i32[n]: where staged pages go; the pool's size for padding.

        Returns:
            the chosen tokens, without waiting for them.
        """
        graphs, states = self._graphs, self._states
        x = self._embed(graphs=graphs[0], state=states[0], batch=batch)
        staged: list[jax.Array | None] = []
        for layer in range(self.spec.num_layers):
            while stage_in is not None and len(staged) <= min(layer + LOOK_AHEAD, self.spec.num_layers - 1):
                staged.append(stage_in(len(staged)))
            if staged:
                self.scatter(layer, staged[layer], pages)
                staged[layer] = None  # its memory is free once the pages are in the pool
            x, self._pools[layer] = self._layer(
                graphs=graphs[layer + 1],
                state=states[layer + 1],
                x=x,
                kv=self._pools[layer],
                batch=batch,
            )
        logits = self._head(graphs=graphs[-1], state=states[-1], x=x, batch=batch)
        return self._sample(logits, sampling)

    def load(self, stage_in: StageIn, pages: np.ndarray) -> None:
        """Put every layer's staged pages into the pool, without running a layer.

        Args:
            stage_in: starts a layer's swap-in.
            pages: i32[n]: where staged pages go; the pool's size for padding.
        """
        for layer in range(self.spec.num_layers):
            self.scatter(layer, stage_in(layer), pages)

    def scatter(self, layer: int, staged: jax.Array | None, pages: np.ndarray) -> None:
        """Put a layer's staged pages into the pool."""
        self._pools[layer] = self._scatter(self._pools[layer], staged, pages)

    def gather(self, pages: np.ndarray) -> list[jax.Array]:
        """Copy pages out of the pool, per layer [n, *page]; the pool's size in `pages` gives zeros."""
        return self._gather(self._pools, pages)

    def copy_page(self, source: np.int32, target: np.int32) -> None:
        """Copy a page of the pool to another, in all layers."""
        self._pools = self._copy(self._pools, source, target)

    def fill(self, pages: np.ndarray, value: float | jax.Array) -> None:
        """Overwrite pages in all layers with a number or a page [2, kv_heads, page_tokens, head_dim]."""
        self._pools = self._fill(self._pools, pages, value)

    # -- traced functions ------------------------------------------------------------------------

    def _precision(self) -> Any:
        """float32 means float32: no reduced-precision products on the GPU's matrix units."""
        exact = np.dtype(self.spec.dtype) == np.float32
        return jax.default_matmul_precision("highest") if exact else nullcontext()

    def _sharded(self, function: Callable, in_specs: tuple, out_specs: Any, *args: Any) -> Any:
        if self._axis is None:
            return function(*args)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped(*args)

    def _part_specs(self, index: int) -> Any:
        return self._specs[index] if self._axis else None

    def _scatter_step(self, kv: jax.Array, staged: jax.Array, pages: jax.Array) -> jax.Array:
        return self._sharded(scatter_pages, (KV_SPEC, KV_SPEC, P()), KV_SPEC, kv, staged, pages)

    def _embed_step(self, graphs: Any, state: Any, batch: BatchArrays) -> jax.Array:
        def embed(state: Any, batch: BatchArrays) -> jax.Array:
            return nnx.merge(graphs, state)(batch.token_ids, PlainContext(batch, self._axis))

        with self._precision():
            return self._sharded(embed, (self._part_specs(0), P()), P(), state, batch)

    def _layer_step(
        self,
        graphs: Any,
        state: Any,
        x: jax.Array,
        kv: jax.Array,
        batch: BatchArrays,
    ) -> tuple[jax.Array, jax.Array]:
        """The one layer function of both ways."""

        def layer(state: Any, x: jax.Array, kv: jax.Array, batch: BatchArrays) -> tuple[jax.Array, jax.Array]:
            context = PagedContext(kv, batch, self._axis)
            x = nnx.merge(graphs, state)(x, context)
            return x, context.kv

        with self._precision():
            specs = (self._part_specs(1), P(), KV_SPEC, P())
            return self._sharded(layer, specs, (P(), KV_SPEC), state, x, kv, batch)

    def _head_step(self, graphs: Any, state: Any, x: jax.Array, batch: BatchArrays) -> jax.Array:
        """f32[num_samples, vocab]"""

        def head(state: Any, x: jax.Array, batch: BatchArrays) -> jax.Array:
            return nnx.merge(graphs, state)(x[batch.sample_tokens], PlainContext(batch, self._axis))

        with self._precision():
            return self._sharded(head, (self._part_specs(-1), P(), P()), P(), state, x, batch)

    def _whole_step(
        self, graphs: Any, states: Any, pools: list[jax.Array], batch: BatchArrays
    ) -> tuple[jax.Array, list[jax.Array]]:
        x = self._embed_step(graphs[0], states[0], batch)
        # Layers that are alike are traced and lowered once: a step of 40 layers would take a minute.
        layer_step = jax.jit(self._layer_step, static_argnums=0)
        written = []
        for graph, state, kv in zip(graphs[1:-1], states[1:-1], pools, strict=True):
            x, kv = layer_step(graph, state, x, kv, batch)
            written.append(kv)
        return self._head_step(graphs[-1], states[-1], x, batch), written
