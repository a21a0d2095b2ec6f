"""Products of few rows with large matrices for Hopper GPUs, in Pallas Mosaic GPU.

Every CTA has one tile of output features. A producer warpgroup copies its weights, and the activations of all
tokens beside them, through a ring in shared memory with the bulk copy engine; one consumer warpgroup per 64
tokens multiplies. Two CTAs, a cluster, can work together in one of two ways. They *split* a tile: each has a
stretch of the contracted axis, they exchange their sums through shared memory, and each adds up and stores
half of the columns. Or, where activations are much of what is read, each has a tile of its own and they
*share* activations: each loads a half of them for both.

Weights don't depend on the kernel before: their copies start while that one still runs (programmatic
dependent launch); only activations wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_support import interpreter, swizzled
from pallas_kernels.skinny_matmul.epilogue import Epilogue
from pallas_kernels.skinny_matmul.tiling import ALIGN, BLOCK_K, ROWS, Tiling

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers of a thread after the split, with two consumers: 2 x 232 + 40 make the 3 x 168 that the CTA
starts with. A single consumer has enough without."""
CLUSTER = "cluster"
WGMMA = plgpu.Layout.WGMMA
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
ACTIVATIONS: dict[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]] = {
    jax.nn.silu: lambda x: x * jnp.square(lax.rsqrt(1.0 + jnp.exp(-x))),
    jax.nn.relu: lambda x: jnp.maximum(x, 0.0),
}
"""Activations that the kernel has, as it computes them. With a reciprocal root gate and up take 40 registers
fewer than with a reciprocal."""


def skinny_matmul_mosaic(
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    add: jax.Array | None,
    *,
    tiling: Tiling,
    epilogue: Epilogue,
    out_dtype: Any,
    overlap: bool,
    interpret: Any = None,
) -> list[jax.Array]:
    """The products with their epilogue.

    Args:
        x: [tokens, contracted], a multiple of 8 tokens.
        weights: [features, contracted] each; if gated, all gates before all that they multiply.
        biases: [features] each, or none.
        add: [tokens, features] in `out_dtype`, or None.
        tiling: of `plan_tiling` for these.
        epilogue: what follows.
        out_dtype: of the results.
        overlap: whether weights may be read before the kernel before this one has ended.
        interpret: `plgpu.InterpretGPUParams` on a machine without the GPU; None: compile.
    """
    tokens, _ = x.shape
    together = epilogue.together
    own = tiling.features // tiling.splits
    rows = tiling.consumers * ROWS
    tiled, exact = swizzled(x.dtype, BLOCK_K), swizzled(jnp.float32, own)
    # What is shared is overwritten when all CTAs of the cluster are done with it.
    shared = partial(plgpu.ClusterBarrier, collective_axes=(CLUSTER,))
    used = plgpu.Barrier if tiling.shares == 1 else shared
    scratch: dict[str, Any] = {
        "ring_x": plgpu.SMEM((tiling.num_slots, rows, BLOCK_K), x.dtype, transforms=tiled),
        "ring_w": plgpu.SMEM(
            (tiling.num_slots, together * tiling.features, BLOCK_K), x.dtype, transforms=tiled
        ),
        "staging": plgpu.SMEM((tiling.consumers, ROWS, tiling.chunk), out_dtype),
        "loaded": plgpu.Barrier(num_barriers=tiling.num_slots, num_arrivals=1 + together),
        "used": used(num_barriers=tiling.num_slots, num_arrivals=tiling.consumers),
        "staged": plgpu.Barrier(num_barriers=tiling.consumers),
    }
    if tiling.splits > 1:
        scratch["sums"] = plgpu.SMEM((tiling.consumers, together, ROWS, own), jnp.float32, transforms=exact)
        # One by one: JAX 0.11.2 counts a barrier's place in its group twice when another CTA arrives.
        scratch["exchanged"] = [plgpu.Barrier(num_arrivals=together) for _ in range(tiling.consumers)]
    together_ctas = tiling.splits * tiling.shares
    clusters = {} if together_ctas == 1 else {"cluster": (together_ctas,), "cluster_names": (CLUSTER,)}
    kernel = plgpu.kernel(
        partial(_skinny_matmul, tiling, epilogue, len(weights), overlap, interpret is not None),
        out_type=[
            jax.ShapeDtypeStruct((tokens, w.shape[0]), out_dtype) for w in weights[: len(weights) // together]
        ],
        grid=(tiling.num_tiles // tiling.shares,),
        grid_names=("tile",),
        num_threads=tiling.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name=f"products_{sum(w.shape[0] for w in weights)}x{x.shape[1]}",
        **clusters,
        **interpreter(interpret),
    )
    return kernel(x, *weights, *biases, *([] if add is None else [add]))


def _skinny_matmul(
    tiling: Tiling,
    epilogue: Epilogue,
    num_weights: int,
    overlap: bool,
    interpreted: bool,
    x: Any,
    *refs: Any,
    **scratch: Any,
) -> None:
    weights, refs = refs[:num_weights], refs[num_weights:]
    biases, refs = (refs[:num_weights], refs[num_weights:]) if epilogue.biased else ((), refs)
    place = lax.axis_index(CLUSTER) if tiling.splits * tiling.shares > 1 else 0
    cta = _Cta(
        tiling=tiling,
        epilogue=epilogue,
        overlap=overlap and not interpreted,
        x=x,
        weights=weights,
        biases=biases,
        add=refs[0] if epilogue.adds else None,
        outs=refs[1:] if epilogue.adds else refs,
        tile=lax.axis_index("tile") * tiling.shares + (place if tiling.shares > 1 else 0),
        split=place if tiling.splits > 1 else 0,
        warpgroup=lax.axis_index("warpgroup"),
        scratch=scratch,
    )

    def take_registers(count: int, action: Literal["increase", "decrease"]) -> None:
        if tiling.consumers > 1 and not interpreted:
            plgpu.set_max_registers(count, action=action)

    @pl.when(cta.warpgroup == tiling.consumers)
    def _produce() -> None:
        take_registers(PRODUCER_REGISTERS, "decrease")
        if cta.overlap:
            plgpu.griddepcontrol_launch_dependents()
        cta.each_matrix(cta.stream)

    @pl.when(cta.warpgroup < tiling.consumers)
    def _consume() -> None:
        take_registers(CONSUMER_REGISTERS, "increase")
        if epilogue.adds:
            cta.stage_add()
        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, epilogue.together * tiling.features), jnp.float32)
        sums = pl.run_scoped(cta.multiply, accumulator)
        if tiling.splits > 1:
            sums = cta.exchange(sums)
        cta.each_matrix(partial(cta.store, sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cta:
    """What one CTA works on. `scratch` is the call's; the rest are the kernel's arguments and its place."""

    tiling: Tiling
    epilogue: Epilogue
    overlap: bool
    x: Any
    weights: Sequence[Any]
    biases: Sequence[Any]
    add: Any
    outs: Sequence[Any]
    tile: jax.Array
    split: Any
    warpgroup: jax.Array
    scratch: dict[str, Any]

    @property
    def steps(self) -> int:
        """Blocks of this CTA's stretch of the contracted axis."""
        return self.x.shape[1] // self.tiling.splits // BLOCK_K

    @property
    def own(self) -> int:
        """Columns that this CTA adds up and stores."""
        return self.tiling.features // self.tiling.splits

    def each_consumer(self, run: Callable[[int], None]) -> None:
        """Run with this consumer's number, known when the kernel is compiled."""
        for i in range(self.tiling.consumers):
            pl.when(self.warpgroup == i)(partial(run, i))

    def rows_and_staging(self, consumer: int) -> tuple[Any, Any]:
        """A consumer's tokens (the last one may have fewer), and where their output is staged."""
        count = min(self.x.shape[0] - consumer * ROWS, ROWS)
        return pl.ds(consumer * ROWS, count), self.scratch["staging"].at[consumer, pl.ds(0, count)]

    def slot(self, step: Any) -> jax.Array:
        """The ring's slot of a step."""
        return lax.rem(jnp.int32(step), jnp.int32(self.tiling.num_slots))

    def each_matrix(self, run: Callable[[int, jax.Array], None]) -> None:
        """Run with the number of the output that this CTA's tile belongs to, and the tile's first feature."""
        first = 0
        for i, out in enumerate(self.outs):
            last = first + out.shape[1] // self.tiling.features
            feature = pl.multiple_of((self.tile - first) * self.tiling.features, ALIGN)
            pl.when((self.tile >= first) & (self.tile < last))(partial(run, i, feature))
            first = last

    def stream(self, i: int, feature: jax.Array) -> None:
        """Copy a tile's weights, and the tokens' activations, as far ahead as the ring is long."""
        tiling, loaded, used = self.tiling, self.scratch["loaded"], self.scratch["used"]
        matrices = [self.weights[i + j * len(self.outs)] for j in range(self.epilogue.together)]

        def stretch(step: Any) -> Any:
            k = (self.split * self.steps + step) * BLOCK_K
            return pl.ds(pl.multiple_of(k, BLOCK_K), BLOCK_K)

        def load_weights(step: Any) -> None:
            slot = self.slot(step)
            for j, matrix in enumerate(matrices):
                tile = matrix.at[pl.ds(feature, tiling.features), stretch(step)]
                place = self.scratch["ring_w"].at[slot, pl.ds(j * tiling.features, tiling.features)]
                plgpu.copy_gmem_to_smem(tile, place, loaded.at[slot])

        def load_tokens(step: Any) -> None:
            slot, rows = self.slot(step), pl.ds(0, self.x.shape[0])
            ring = self.scratch["ring_x"].at[slot, rows]
            axes = (CLUSTER,) if tiling.shares > 1 else None
            plgpu.copy_gmem_to_smem(
                self.x.at[rows, stretch(step)], ring, loaded.at[slot], collective_axes=axes
            )

        pl.loop(0, tiling.num_slots)(load_weights)
        if self.overlap:
            plgpu.griddepcontrol_wait()
        pl.loop(0, tiling.num_slots)(load_tokens)

        @pl.loop(tiling.num_slots, self.steps)
        def _load(step: jax.Array) -> None:
            plgpu.barrier_wait(used.at[self.slot(step)])
            load_weights(step)
            load_tokens(step)

        @pl.loop(self.steps - tiling.num_slots, self.steps)
        def _drain(step: jax.Array) -> None:
            """No barrier may be in use when the CTA ends."""
            plgpu.barrier_wait(used.at[self.slot(step)])

    def stage_add(self) -> None:
        """Start copying what is added to where the output will be staged."""
        if self.overlap:
            plgpu.griddepcontrol_wait()
        first = pl.multiple_of(self.tile * self.tiling.features + self.split * self.own, ALIGN)

        def copy(consumer: int) -> None:
            rows, staged = self.rows_and_staging(consumer)
            source = self.add.at[rows, pl.ds(first, self.own)]
            plgpu.copy_gmem_to_smem(source, staged, self.scratch["staged"].at[self.warpgroup])

        self.each_consumer(copy)

    def multiply(self, sums: Any) -> list[jax.Array]:
        """The products of this consumer's tokens with the tiles' weights along this CTA's stretch."""

        def release(step: Any) -> None:
            plgpu.barrier_arrive(self.scratch["used"].at[self.slot(step)])

        @pl.loop(0, self.steps)
        def _step(step: jax.Array) -> None:
            slot = self.slot(step)
            plgpu.barrier_wait(self.scratch["loaded"].at[slot])
            rows = pl.ds(pl.multiple_of(self.warpgroup * ROWS, ROWS), ROWS)
            tokens = self.scratch["ring_x"].at[slot, rows]
            plgpu.wgmma(sums, tokens, self.scratch["ring_w"].at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(self.steps - 1)
        both, features = sums[...], self.tiling.features
        return [both[:, j * features : (j + 1) * features] for j in range(self.epilogue.together)]

    def exchange(self, sums: list[jax.Array]) -> list[jax.Array]:
        """This CTA's half of the columns, with the other CTA's sums added."""
        own, received, exchanged = self.own, self.scratch["sums"], self.scratch["exchanged"]

        def send(to: int, which: int, half: jax.Array, consumer: int) -> None:
            plgpu.async_store_smem(
                half,
                received.at[consumer, which],
                exchanged[consumer],
                cluster_idx=jnp.int32(to),
                cluster_dim=CLUSTER,
            )

        mine = []
        for which, acc in enumerate(sums):
            halves = [acc[:, :own], acc[:, own:]]
            for to, half in enumerate(halves):
                pl.when(self.split != to)(partial(self.each_consumer, partial(send, to, which, half)))
            mine.append(jnp.where(self.split == 0, *halves))
        self.each_consumer(lambda i: plgpu.barrier_wait(exchanged[i]))
        return [
            kept + plgpu.load(received.at[self.warpgroup, which], layout=WGMMA)
            for which, kept in enumerate(mine)
        ]

    def store(self, sums: list[jax.Array], i: int, feature: jax.Array) -> None:
        """What follows the product, and the copy to the output, in chunks of columns."""
        staging = self.scratch["staging"].at[self.warpgroup]
        for column in range(0, self.own, self.tiling.chunk):
            first = pl.multiple_of(feature + self.split * self.own + column, ALIGN)
            columns = pl.ds(first, self.tiling.chunk)
            result = self.finish([acc[:, column : column + self.tiling.chunk] for acc in sums], i, columns)
            if self.epilogue.adds:
                plgpu.barrier_wait(self.scratch["staged"].at[self.warpgroup])
                result += plgpu.load(staging, layout=WGMMA, optimized=False).astype(jnp.float32)
            staging[...] = result.astype(staging.dtype)
            plgpu.commit_smem()

            @self.each_consumer
            def _copy(consumer: int, to: Any = columns) -> None:
                rows, staged = self.rows_and_staging(consumer)
                plgpu.copy_smem_to_gmem(staged, self.outs[i].at[rows, to])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def finish(self, sums: list[jax.Array], i: int, columns: Any) -> jax.Array:
        """Biases, activation and gate."""
        for j in range(len(sums)) if self.epilogue.biased else ():
            bias = self.biases[i + j * len(self.outs)].at[columns]
            bias = plgpu.load(bias, layout=COLUMNS, optimized=False).astype(jnp.float32)
            sums[j] += lax.broadcast_in_dim(bias, sums[j].shape, [1])
        result = sums[0]
        if self.epilogue.activation is not None:
            result = ACTIVATIONS[self.epilogue.activation](result)
        return result * sums[1] if self.epilogue.gated else result
