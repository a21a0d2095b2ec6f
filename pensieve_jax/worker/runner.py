"""Runs a model over a padded batch, layer by layer or whole, and owns the device pool."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.model_shape import KvDtype
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.parallel import check_head_sharding
from pensieve_jax.worker.arrivals import Arrivals
from pensieve_jax.worker.batch import BatchArrays
from pensieve_jax.worker.kv_pages import no_number, num_bytes, page_of
from pensieve_jax.worker.program_store import ProgramStore, open_store
from pensieve_jax.worker.programs import Call, Program, signature
from pensieve_jax.worker.sampling import SampleOutput, SamplingArrays, sample
from pensieve_jax.worker.step_functions import KV_SPEC, StepFunctions, split_model

MANY_TOKENS = 256
"""Tokens from which all products of a step are the library's, each by itself. It adds the residual to a
product. Where XLA makes products, each has its own copy of the norm before it; where XLA merges those of keys
and values, it concatenates weights and slices results at every step."""
LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "dot-merger"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Device memory of a step, on each device."""

    workspace_bytes: int
    """Taken beside arguments: temporaries, and results in memory of their own."""
    pools_bytes: int
    """Of the pools of all layers."""
    in_place_bytes: int
    """Of arguments whose memory the results take over. The pools are among them, or they would be copied."""


def by_tokens(
    name: str, function: Callable, store: ProgramStore | None, **options: Any
) -> Callable[[BatchArrays], Program]:
    """A program for steps of few tokens, and one for those of many; the result picks by a batch."""
    few = Program(name, function, store, **options)
    many = Program(f"{name}-many", function, store, compiler_options=LIBRARY_PRODUCTS, **options)
    return lambda batch: many if batch.num_tokens >= MANY_TOKENS else few


class ModelRunner:
    """The two ways to run a step, over one layer function.

    * `run_resident`: one compiled call for everything, for steps without swap-ins.
    * `run_layered`: one compiled call per layer, so that a layer waits for its own pages only.
    """

    def __init__(
        self,
        model: ServableModel,
        *,
        num_pages: int,
        page_tokens: int,
        mesh: Mesh,
        kv_dtype: KvDtype | None = None,
        programs: Path | None = None,
    ) -> None:
        """Take the model's weights and allocate the device pool.

        Args:
            model: its weights are used in place, or spread over the mesh if it has several devices.
            num_pages: pages of the pool.
            page_tokens: tokens of a page.
            mesh: one axis, `TENSOR_AXIS`.
            kv_dtype: how keys and values are kept; None: in the model's dtype.
            programs: folder of compiled programs; None: keep none.

        Raises:
            InvalidArgumentError: the model doesn't divide over the mesh.
        """
        self.spec = model.spec
        self.mesh = mesh
        check_head_sharding(
            num_heads=self.spec.num_heads, num_kv_heads=self.spec.num_kv_heads, num_shards=mesh.size
        )
        self.kv_sharding = NamedSharding(mesh, KV_SPEC)
        self._num_pages = num_pages
        self.page = page_of(self.spec, page_tokens=page_tokens, kv_dtype=kv_dtype)
        """Of one layer, over all shards."""
        self._parts, weights = split_model(model, num_shards=mesh.size)
        functions = self._functions = StepFunctions(self.spec, self._parts, mesh)
        self._weights = functions.place(weights)
        self.reset_pool()
        store = self._store = open_store(programs, self.spec, functions)
        self._embed = Program("embed", functions.embed, store, fixed=1)
        self._layers = [
            by_tokens(f"layer{kind}", partial(functions.layer, kind), store, fixed=3, donate=(2,))
            for kind in range(len(functions.kinds))
        ]
        self._head = Program("head", functions.head, store, fixed=2)
        self._whole = by_tokens("whole", functions.whole, store, fixed=2, donate=(1,))
        # Apart from the layers: another way of choosing tokens compiles this alone.
        self._sample = Program("sample", sample, store)
        self._scatter = Program("scatter", functions.scatter, store, fixed=2, donate=(0,))
        self._gather = Program("gather", functions.gather, store, fixed=1)
        self._copy = Program(
            "copy",
            lambda pools, source, target: [pool.at[target].set(pool[source]) for pool in pools],
            store,
            fixed=1,
            donate=(0,),
        )
        self._read = jax.jit(functions.read, static_argnames="num_host_pages", donate_argnames="pools")
        self._fill = jax.jit(
            lambda pools, pages, value: [pool.at[pages].set(value, mode="drop") for pool in pools],
            donate_argnums=0,
        )

    def set_weights(self, model: ServableModel) -> None:
        """Use other weights of the same structure from the next step on. What the pool holds is stale then.

        Raises:
            InvalidArgumentError: the model has other dimensions, or doesn't divide over the mesh.
        """
        parts, weights = split_model(model, num_shards=self.mesh.size)
        if model.spec != self.spec or parts != self._parts:
            raise InvalidArgumentError(f"model: got {model.spec}, expected the dimensions {self.spec}")
        self._weights = self._functions.place(weights)

    def reset_pool(self) -> None:
        """Allocate the pool anew, as at the start or after a step that broke off with the pool given away."""
        shape, dtype = (self._num_pages, *self.page.shape), self.page.dtype
        zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self.kv_sharding)
        self._pools: list[jax.Array] = []  # frees the old ones first
        self._pools = [zeros() for _ in range(self.spec.num_layers)]

    def memory(self, batch: BatchArrays, *, num_pages: int) -> StepMemory:
        """What a step takes in one call, by the compiler's account.

        Args:
            batch: of the step.
            num_pages: pages of a pool that needn't be there.
        """
        shape = (num_pages, *self.page.shape)
        pool = jax.ShapeDtypeStruct(shape, self.page.dtype, sharding=self.kv_sharding)
        pools = [pool] * self.spec.num_layers
        pools_bytes = num_pages * num_bytes(self.page) // self.mesh.size * self.spec.num_layers

        def ask(compiled: jax.stages.Compiled) -> StepMemory:
            account = compiled.memory_analysis()
            assert account is not None, "CPU and GPU give one"
            outputs = account.output_size_in_bytes - account.alias_size_in_bytes
            return StepMemory(
                workspace_bytes=account.temp_size_in_bytes + outputs,
                pools_bytes=pools_bytes,
                in_place_bytes=account.alias_size_in_bytes,
            )

        return self._whole(batch).recall("memory", ask, self._weights, pools, batch)

    def filling(self) -> AbstractContextManager[None]:
        """While it lasts, programs that aren't ready are taken from their folder, or compiled into it."""
        return nullcontext() if self._store is None else self._store.fill()

    def calls(self, batch: BatchArrays, *, layered: bool) -> list[Call]:
        """The programs of a step, without those that choose tokens.

        Args:
            batch: of the shape.
            layered: for `run_layered`; else for `run_resident`.
        """
        weights = self._weights
        if not layered:
            return [Call(self._whole(batch), (weights, self._pools, batch))]
        x = self._embed(weights[0], batch)
        return [
            *(
                Call(self._layers[kind](batch), (weights[layer + 1], x, self._pools[layer], batch))
                for layer, kind in self._first_of_kind()
            ),
            Call(self._head, (weights[-1], x, batch)),
        ]

    def run_resident(self, batch: BatchArrays, sampling: SamplingArrays) -> SampleOutput:
        """Run all layers in one call. Doesn't wait for the result."""
        logits, self._pools = self._whole(batch)(self._weights, self._pools, batch)
        return self._sample(logits, sampling)

    def run_layered(
        self, batch: BatchArrays, sampling: SamplingArrays, arrivals: Arrivals | None, pages: np.ndarray
    ) -> SampleOutput:
        """Run one layer after the other, each after its staged pages are put into the pool.

        Args:
            batch: the padded batch.
            sampling: how to choose the tokens.
            arrivals: gives each layer's staged pages; None if nothing is swapped in.
            pages: i32[n]: where staged pages go; the pool's size for padding.

        Returns:
            the chosen tokens, without waiting for them.
        """
        weights, varying = self._weights, signature((batch,))
        layers = [program_of(batch).at(varying) for program_of in self._layers]
        x = self._embed.at(varying)(weights[0], batch)
        for layer in range(self.spec.num_layers):
            if arrivals is not None:
                self.scatter(layer, arrivals.take(), pages)
            run = layers[self._functions.kind_of[layer + 1]]
            x, self._pools[layer] = run(weights[layer + 1], x, self._pools[layer], batch)
        logits = self._head.at(varying)(weights[-1], x, batch)
        return self._sample(logits, sampling)

    def load(self, arrivals: Arrivals, pages: np.ndarray) -> None:
        """Put every layer's staged pages into the pool, without running a layer.

        Args:
            arrivals: gives each layer's staged pages.
            pages: i32[n]: where staged pages go; the pool's size for padding.
        """
        for layer in range(self.spec.num_layers):
            self.scatter(layer, arrivals.take(), pages)

    def read(
        self, addresses: jax.Array, pages: np.ndarray, host_pages: np.ndarray, *, num_host_pages: int
    ) -> None:
        """Let the device read pages of all layers from the host's memory; see `StepFunctions.read`."""
        self._pools = self._read(self._pools, addresses, pages, host_pages, num_host_pages=num_host_pages)

    def wait(self) -> None:
        """Wait until the device has done all that was dispatched."""
        jax.block_until_ready(self._pools)

    def scatter(self, layer: int, staged: jax.Array | None, pages: np.ndarray) -> None:
        """Put a layer's staged pages into the pool."""
        self._pools[layer] = self._scatter(self._pools[layer], staged, pages)

    def gather(self, pages: np.ndarray) -> jax.Array:
        """Copy pages out of the pool, [num_layers, n, *page]; the pool's size in `pages` gives zeros."""
        return self._gather(self._pools, pages)

    def copy_page(self, source: np.int32, target: np.int32) -> None:
        """Copy a page of the pool to another, in all layers."""
        self._pools = self._copy(self._pools, source, target)

    def fill(self, pages: np.ndarray, value: float | jax.Array) -> None:
        """Overwrite pages in all layers with a number or a page, as `page` is."""
        self._pools = self._fill(self._pools, pages, value)

    def poison(self, pages: np.ndarray) -> None:
        """Fill pages so that whoever reads them computes NaN."""
        self.fill(pages, no_number(self.page))

    def _first_of_kind(self) -> list[tuple[int, int]]:
        """(layer, kind) of the first layer of each kind."""
        kinds = self._functions.kind_of[1:-1]
        return [(kinds.index(kind), kind) for kind in dict.fromkeys(kinds)]
