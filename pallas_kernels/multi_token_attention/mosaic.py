"""Multi-token paged attention for Hopper GPUs, in Pallas Mosaic GPU.

A persistent grid walks over the items of a `Schedule`. In every CTA a producer warpgroup copies items,
queries and pages of KV into shared memory with the bulk copy engine, through a ring of slots that runs on
across items, and two consumer warpgroups compute. In a wide item each consumer has 64 query tokens under its
own head and both use every block of keys; each weighs the values of one block under the softmax of the next,
across items too. In a narrow item both have the same few rows and take every other block. Of an item that
the schedule cut, the CTA that is done last merges the parts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.mosaic_support import interpreter, swizzled
from pallas_kernels.multi_token_attention.mosaic_common import HEAD_SIZES, LOG2E, NEVER, KernelShape, aligned
from pallas_kernels.multi_token_attention.mosaic_device import clear_rows, some_of_warp
from pallas_kernels.multi_token_attention.mosaic_output import Outputs, merge_interpreted
from pallas_kernels.multi_token_attention.plan import AttentionPlan
from pallas_kernels.multi_token_attention.schedule import (
    ALIGN,
    BLOCK_KV,
    ITEM_FIELDS,
    ITEM_WIDTH,
    PARTIAL,
    TILE_Q,
    WIDE,
    Schedule,
)

NUM_ITEMS = 7
"""Items in shared memory. The producer reads two ahead of the one that it loads, which the ring keeps within
three of the one that consumers compute, and they look back at the one before."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers of a thread after the split: 2 x 232 + 40 make the 3 x 168 that the CTA starts with."""
MOST_PAGES_AHEAD = 4
"""Pages of a block, at most, for the producer to read the page table two blocks ahead."""
BY_ONE = ("wide_queries", "queries_used", "may_write", "wrote")
"""Barriers at which one warpgroup arrives, two of a kind: of each consumer, where that makes sense. Barriers
of a number of arrivals are one array: each array takes registers. In it follow those of
`_Consumer.cleared`."""
WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
MAX_EXCESS = 8.0
"""Powers of two by which a score may exceed the maximum that weights count from, before that is changed: the
weights are then at most 256, and outputs seldom need fading."""
SUMS = 8
"""Columns of a running total: what a thread adds up stays with it until the end of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One line of the schedule, as scalars. Fields: `schedule.ITEM_FIELDS`."""

    kind: jax.Array
    row: jax.Array
    kv_head: jax.Array
    head: jax.Array
    token: jax.Array
    skip: jax.Array
    stop: jax.Array
    position: jax.Array
    begin: jax.Array
    full: jax.Array
    end: jax.Array
    kv_len: jax.Array
    part: jax.Array
    first_part: jax.Array
    parts: jax.Array
    merge: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What a consumer carries from block to block of one item, for each of its rows."""

    output: jax.Array
    """f32[TILE_Q, head_dim]: the weighed values so far, as for the maximum so far."""
    peak: jax.Array
    """f32[TILE_Q]: the maximum score so far, as a power of two."""
    total: jax.Array
    """f32[TILE_Q, SUMS]: the weights so far, added up by thread."""


jax.tree_util.register_dataclass(_Item, [*ITEM_FIELDS], [])
jax.tree_util.register_dataclass(_State, ["output", "peak", "total"], [])


def attention_mosaic(
    q: jax.Array,
    kv_pages: jax.Array,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    interpret: Any = None,
) -> jax.Array:
    """As `multi_token_attention`, on Hopper: bf16 or fp16, head sizes 64, 80, 96, 128 and 256.

    Raises:
        UnsupportedInputError: dtype, head size, page size, group or option that the kernel doesn't have, or a
            plan without a schedule for these heads.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    schedule = plan.schedule

    def need(ok: bool, name: str, got: object, expected: str) -> None:
        if not ok:
            raise UnsupportedInputError(f"mosaic: {name}: got {got}, expected {expected}")

    need(q.dtype in (jnp.bfloat16, jnp.float16), "q", f"dtype {q.dtype}", "bfloat16 or float16")
    need(kv_pages.dtype == q.dtype, "kv_pages", f"dtype {kv_pages.dtype}", f"{q.dtype} as in q")
    need(head_dim in HEAD_SIZES, "q", f"head_dim {head_dim}", f"one of {HEAD_SIZES}")
    need(page_size in (16, 32, 64, 128), "kv_pages", f"page_size {page_size}", "16, 32, 64 or 128")
    group = num_heads // num_kv_heads
    need(group <= 16, "q", f"{group} heads for each KV head", "at most 16")
    need(scale > 0, "scale", scale, "above 0")
    if schedule is None:
        raise UnsupportedInputError("mosaic: plan: made without num_heads and num_kv_heads")
    made_for = (schedule.num_heads, schedule.num_kv_heads, schedule.max_tokens)
    need((num_heads, num_kv_heads, num_tokens) == made_for, "plan", f"heads, tokens {made_for}", "those of q")
    q = jnp.pad(q, ((0, -num_tokens % ALIGN), (0, 0), (0, 0)))
    shape = KernelShape(
        dtype=q.dtype,
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        sliding_window=sliding_window,
        interpret=interpret,
    )
    out = _attention_call(shape, schedule, q, kv_pages, jnp.asarray(plan.page_table))
    return out[:num_tokens]


def _attention_call(
    shape: KernelShape, schedule: Schedule, q: jax.Array, kv_pages: jax.Array, page_table: jax.Array
) -> jax.Array:
    dtype, head_dim = shape.dtype, shape.head_dim
    tiled, exact = swizzled(dtype, head_dim), swizzled(jnp.float32, head_dim)
    outputs = (
        plgpu.SMEM((2, TILE_Q, head_dim), dtype, transforms=tiled),
        plgpu.SMEM((2, TILE_Q, head_dim), dtype),
        plgpu.SMEM((TILE_Q, head_dim), jnp.float32, transforms=exact),
    )
    scratch = {
        "ring": plgpu.SMEM((shape.num_slots, shape.block_kv, head_dim), dtype, transforms=tiled),
        "queries": plgpu.SMEM((2, TILE_Q, head_dim), dtype, transforms=tiled),
        # In the interpreter the outputs don't share their memory: it would compare uses of the two halves.
        "outputs": plgpu.RefUnion(*outputs) if shape.interpret is None else outputs,
        "stats": plgpu.SMEM((2, TILE_Q), jnp.float32),
        # One line more than items, for a note.
        "item_ring": plgpu.SMEM((NUM_ITEMS + 1, ITEM_WIDTH), jnp.int32),
        "item_loaded": plgpu.Barrier(num_barriers=NUM_ITEMS),
        "loaded": plgpu.Barrier(num_barriers=shape.num_slots, num_arrivals=shape.pages_per_block),
        "used": plgpu.Barrier(num_barriers=shape.num_slots, num_arrivals=2),
        "narrow_queries": plgpu.Barrier(num_arrivals=shape.narrow_tokens),
        "by_one": plgpu.Barrier(num_barriers=2 * len(BY_ONE) + shape.num_slots),
        "run_done": plgpu.Barrier(num_arrivals=2),
    }
    kernel = plgpu.kernel(
        partial(_attention_kernel, shape),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((schedule.max_parts, TILE_Q * head_dim), jnp.float32),
            jax.ShapeDtypeStruct((schedule.max_parts, TILE_Q * head_dim), jnp.float32),
        ],
        grid=(schedule.runs.shape[0],),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Rows are reduced among four threads by shuffles, not through shared memory.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **interpreter(shape.interpret),
    )
    by_head = q.reshape(-1, shape.head_dim)
    inputs = (schedule.runs, schedule.items, schedule.arrived, page_table, q, by_head, kv_pages)
    out, part_out, part_lse = kernel(*inputs)
    if shape.interpret is None:
        return out
    return jnp.asarray(
        merge_interpreted(shape, np.asarray(schedule.items), *map(np.array, (out, part_out, part_lse)))
    )


def _attention_kernel(
    shape: KernelShape,
    runs: Any,
    items: Any,
    arrived: Any,
    page_table: Any,
    q: Any,
    q_by_head: Any,
    kv_pages: Any,
    out: Any,
    part_out: Any,
    part_lse: Any,
    **scratch: Any,
) -> None:
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    if shape.interpret is None:
        # The next launch may be set up while this one ends; nothing is read before the one before is done.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    first, narrow, rest, last = (runs[cta, i] for i in range(4))

    @pl.when(warpgroup == 2)
    def _produce() -> None:
        if shape.interpret is None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        producer = _Producer(shape, items, page_table, q, q_by_head, kv_pages, scratch)
        producer.run(first, last)

    @pl.when(warpgroup < 2)
    def _consume() -> None:
        if shape.interpret is None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        outputs = Outputs(shape, out, part_out, part_lse, arrived)
        consumer = _Consumer(shape, warpgroup, first, outputs, scratch)
        # The first consumer may write its state at once.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(_one(scratch, "may_write", 0)))

        def part(number: jax.Array, filled: jax.Array) -> jax.Array:
            """The first wide items and the narrow ones, then the other wide ones."""
            is_first = number == 0
            filled = consumer.wide_run(
                jnp.where(is_first, first, rest), jnp.where(is_first, narrow, last), filled
            )
            return consumer.narrow_run(narrow, jnp.where(is_first, rest, narrow), filled)

        lax.fori_loop(0, 2, part, jnp.int32(0))
        # No barrier may be ahead of who waits for it when the CTA ends.
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(_one(scratch, "may_write", 0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _read_item(shape: KernelShape, scratch: dict[str, Any], number: jax.Array) -> _Item:
    """The CTA's item of that number, from shared memory, without blocks before the window of all its rows."""
    place = lax.rem(number, jnp.int32(NUM_ITEMS))
    item = _Item(**{name: scratch["item_ring"][place, column] for column, name in enumerate(ITEM_FIELDS)})
    if shape.block_kv < BLOCK_KV:
        item = _in_smaller_blocks(shape, item)
    if shape.sliding_window is None:
        return item
    first_key = item.position + item.skip + 1 - shape.sliding_window
    first_block = lax.div(jnp.maximum(first_key, 0), jnp.int32(shape.block_kv))
    return replace(item, begin=jnp.clip(first_block, item.begin, item.end - 1))


def _in_smaller_blocks(shape: KernelShape, item: _Item) -> _Item:
    """The item as the kernel's blocks count its keys, without those after the last key that it sees."""
    smaller, block_kv = BLOCK_KV // shape.block_kv, jnp.int32(shape.block_kv)
    begin = item.begin * smaller
    end = lax.div(item.position + item.stop + block_kv - 1, block_kv)
    return replace(
        item,
        begin=begin,
        full=lax.div(item.position + item.skip + 1, block_kv),
        end=jnp.clip(end, begin + 1, item.end * smaller),
    )


def _wait_item(shape: KernelShape, scratch: dict[str, Any], number: jax.Array) -> _Item:
    plgpu.barrier_wait(scratch["item_loaded"].at[lax.rem(number, jnp.int32(NUM_ITEMS))])
    return _read_item(shape, scratch, number)


def _one(scratch: dict[str, Any], name: str, index: jax.Array | int) -> Any:
    """A barrier at which one warpgroup arrives."""
    return scratch["by_one"].at[2 * BY_ONE.index(name) + index]


def _place(shape: KernelShape, slot: jax.Array) -> jax.Array:
    """Where a slot lies in the ring, of all that are filled one after the other."""
    return lax.rem(slot, jnp.int32(shape.num_slots))


class _Producer:
    """Copies items, queries and KV into shared memory, as far ahead of the consumers as the ring allows."""

    def __init__(
        self,
        shape: KernelShape,
        items: Any,
        page_table: Any,
        q: Any,
        q_by_head: Any,
        kv_pages: Any,
        scratch: dict[str, Any],
    ) -> None:
        self.shape, self.items, self.page_table = shape, items, page_table
        self.q, self.q_by_head = q, q_by_head
        self.kv_pages, self.scratch = kv_pages, scratch

    def run(self, first: jax.Array, last: jax.Array) -> None:
        scratch = self.scratch

        def load_item(i: jax.Array) -> None:
            @pl.when(i < last)
            def _load() -> None:
                place = lax.rem(i - first, jnp.int32(NUM_ITEMS))
                plgpu.copy_gmem_to_smem(
                    self.items.at[i], scratch["item_ring"].at[place], scratch["item_loaded"].at[place]
                )

        def load(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            filled, after_narrow = carry
            load_item(i + 2)
            item = _wait_item(self.shape, scratch, i - first)
            filled = self.load_blocks(item, i > first, after_narrow, filled)
            return filled, item.kind != WIDE

        load_item(first)
        load_item(first + 1)
        filled, _ = lax.fori_loop(first, last, load, (jnp.int32(0), jnp.bool(False)))
        pl.when(last > first)(lambda: self.drain(filled))

    def load_queries(self, item: _Item, not_first: jax.Array, after_narrow: jax.Array) -> None:
        """Queries past the item's tokens are read from what follows, zeros past the end: nobody uses them."""
        shape, queries = self.shape, self.scratch["queries"]

        def wait_used(consumer: int, when: jax.Array) -> None:
            used = _one(self.scratch, "queries_used", consumer)
            pl.when(when)(partial(plgpu.barrier_wait, used))

        @pl.when(item.kind == WIDE)
        def _wide() -> None:
            # Of a narrow item both consumers read the first one's place.
            wait_used(0, not_first)
            wait_used(1, after_narrow)
            for consumer in range(2):
                token, head = _part_of(shape, item, consumer)
                if consumer == 1:
                    wait_used(1, not_first & ~after_narrow)
                plgpu.copy_gmem_to_smem(
                    self.q.at[pl.ds(token, TILE_Q), head],
                    queries.at[consumer],
                    _one(self.scratch, "wide_queries", consumer),
                )

        @pl.when(item.kind != WIDE)
        def _narrow() -> None:
            for consumer in range(2):
                wait_used(consumer, not_first)
            loaded = self.scratch["narrow_queries"]
            for i in range(shape.narrow_tokens):
                # Rows past the last token hold what was there before: nobody uses them.
                @pl.when(i < item.stop)
                def _load(i: int = i) -> None:
                    line = aligned((item.token + i) * self.q.shape[1] + item.head)
                    plgpu.copy_gmem_to_smem(
                        self.q_by_head.at[pl.ds(pl.multiple_of(line, ALIGN), shape.stride)],
                        queries.at[0, pl.ds(i * shape.stride, shape.stride)],
                        loaded,
                    )

                pl.when(i >= item.stop)(partial(plgpu.barrier_arrive, loaded))

    def load_blocks(
        self, item: _Item, not_first: jax.Array, after_narrow: jax.Array, filled: jax.Array
    ) -> jax.Array:
        """K and V of the item's blocks into the next slots; pages past the row's last are the last again.

        The first block goes ahead of the queries, whose place is free only after the last of the item before.
        """
        if self.shape.interpret is None:
            # The queries' place is free late: they wait in the cache.
            for consumer in range(2):
                token, head = _part_of(self.shape, item, consumer)
                plgpu.async_prefetch(
                    self.q.at[pl.ds(token, TILE_Q), head], predicate=not_first & (item.kind == WIDE)
                )
        shape, pages_per_block = self.shape, self.shape.pages_per_block
        blocks_per_page = jnp.int32(shape.blocks_per_page)
        rows = min(shape.page_size, shape.block_kv)
        last_page = lax.div(item.kv_len - 1, jnp.int32(shape.page_size))
        ring, loaded, used = self.scratch["ring"], self.scratch["loaded"], self.scratch["used"]

        def pages_of(block: jax.Array) -> list[jax.Array]:
            first = lax.div(block, blocks_per_page) * pages_per_block
            return [
                self.page_table[item.row, jnp.minimum(first + i, last_page)] for i in range(pages_per_block)
            ]

        def load(block: jax.Array, carry: tuple[jax.Array, list[list[jax.Array]]]) -> Any:
            filled, (pages, *following) = carry
            following.append(pages_of(block + ahead))
            first_row = pl.multiple_of(lax.rem(block, blocks_per_page) * rows, ALIGN)
            for which in range(2):
                slot = _place(shape, filled + which)
                pl.when(filled + which >= shape.num_slots)(partial(plgpu.barrier_wait, used.at[slot]))
                for i, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        self.kv_pages.at[page, which, item.kv_head, pl.ds(first_row, rows)],
                        ring.at[slot, pl.ds(i * rows, rows)],
                        loaded.at[slot],
                    )
            pl.when(block == item.begin)(lambda: self.load_queries(item, not_first, after_narrow))
            return filled + 2, following

        # While the memory is busy a read takes as long as a block: two blocks' pages are under way, if they
        # aren't too many for the registers.
        ahead = 2 if pages_per_block <= MOST_PAGES_AHEAD else 1
        start = (filled, [pages_of(item.begin + i) for i in range(ahead)])
        filled, _ = lax.fori_loop(item.begin, item.end, load, start)
        return filled

    def drain(self, filled: jax.Array) -> None:
        """Wait until everything was used: no barrier may be in use when the CTA ends."""
        for consumer in range(2):
            plgpu.barrier_wait(_one(self.scratch, "queries_used", consumer))

        @pl.loop(jnp.maximum(filled - self.shape.num_slots, 0), filled)
        def _wait(slot: jax.Array) -> None:
            plgpu.barrier_wait(self.scratch["used"].at[_place(self.shape, slot)])


class _Consumer:
    """One of the two warpgroups that compute."""

    def __init__(
        self,
        shape: KernelShape,
        index: jax.Array,
        first: jax.Array,
        outputs: Outputs,
        scratch: dict[str, Any],
    ) -> None:
        self.shape, self.index, self.first, self.scratch = shape, index, first, scratch
        self.outputs = outputs
        self.out_tiled, self.out_plain, self.out_exact = scratch["outputs"]

    def wide_run(self, begin: jax.Array, end: jax.Array, filled: jax.Array) -> jax.Array:
        """Wide items one after the other; returns the slots filled after.

        64 tokens under one head each; the other consumer has another head or the next 64 tokens. The values
        of a block are weighed under the softmax of the next one: those of an item's last block, and then its
        output, come under the first block of the next item.
        """
        queries = self.scratch["queries"].at[self.index]
        zeros = _start(self.shape.head_dim).output

        def item_step(i: jax.Array, carry: tuple[jax.Array, _State, jax.Array]) -> Any:
            filled, before, weights = carry
            item = _wait_item(self.shape, self.scratch, i - self.first)
            position = item.position + (_part_of(self.shape, item, self.index)[0] - item.token)
            step = partial(self.step, item, filled, queries, position)
            plgpu.barrier_wait(_one(self.scratch, "wide_queries", self.index))
            # The first of a run has no values to weigh: its keys stand in, and nobody sees the result.
            has_before = i > begin
            values = jnp.where(has_before, filled - 1, filled)
            fresh = _start(self.shape.head_dim)
            state = _State(output=before.output, peak=fresh.peak, total=fresh.total)
            state, _, weights = step(item.begin, state, weights, values)

            @pl.when(has_before)
            def _store() -> None:
                self.release(filled - 1)
                self.store_wide(i - 1, _State(output=state.output, peak=before.peak, total=before.total))

            state = _State(output=zeros, peak=state.peak, total=state.total)

            def block_step(block: jax.Array, carry: tuple[_State, jax.Array]) -> tuple[_State, jax.Array]:
                slot = filled + 2 * (block - item.begin)
                state, fade, weights = step(block, *carry, slot - 1)
                self.release(slot - 1)
                output = self.faded(state.output, fade)
                return _State(output=output, peak=state.peak, total=state.total), weights

            state, weights = lax.fori_loop(item.begin + 1, item.end, block_step, (state, weights))
            return filled + 2 * (item.end - item.begin), state, weights

        start, block_kv = _start(self.shape.head_dim), self.shape.block_kv
        nothing = start.output if self.shape.head_dim == block_kv else _zeros((TILE_Q, block_kv))
        filled, state, weights = lax.fori_loop(
            begin, end, item_step, (filled, start, nothing.astype(self.shape.dtype))
        )

        @pl.when(end > begin)
        def _finish() -> None:
            last = _State(
                output=self.weigh(state.output, weights, filled - 1),
                peak=state.peak,
                total=state.total,
            )
            self.release(filled - 1)
            self.store_wide(end - 1, last)
            # Narrow items write where these outputs lie.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.scratch["run_done"])
            plgpu.barrier_wait(self.scratch["run_done"])

        return filled

    def step(
        self,
        item: _Item,
        filled: jax.Array,
        queries: Any,
        position: jax.Array,
        block: jax.Array,
        state: _State,
        weights: jax.Array,
        values_slot: jax.Array,
    ) -> tuple[_State, jax.Array, jax.Array]:
        """One block of keys of a wide item, and the values of the block before, both under way together.

        Returns:
            The state, the output in it not yet faded to the new maximum; the factor to fade it by; the
            weights of this block's values, which are then loaded and finite.
        """
        slot, block_kv = filled + 2 * (block - item.begin), self.shape.block_kv
        valid = item.kv_len - block * block_kv

        def last_key() -> jax.Array:
            return position + plgpu.broadcasted_iota(jnp.int32, (TILE_Q, block_kv), 0, layout=WGMMA)

        def softmax(scores: jax.Array) -> Any:
            self.release(slot)
            pl.when(block + 1 == item.end)(self.queries_used)
            masked = self.masked(item, block, position + TILE_Q - 1)
            result = self.softmax(scores, state.peak, state.total, block, masked, last_key)
            # A wait also keeps the compiler from moving this work behind the end of the other product.
            self.wait_loaded(slot + 1)

            @pl.when((valid < block_kv) & (self.index == 0))
            def _clear() -> None:
                self.clear(slot + 1, valid)
                plgpu.barrier_arrive(self.cleared(slot + 1))

            @pl.when((valid < block_kv) & (self.index == 1))
            def _wait() -> None:
                plgpu.barrier_wait(self.cleared(slot + 1))

            return result

        self.wait_loaded(slot)
        output, (peak, total, fade, weights) = self.products(
            queries, slot, state.output, weights, values_slot, softmax
        )
        if self.shape.interpret is None:
            # Only now: registers that a product reads must not be made while it is under way.
            output, weights = lax.optimization_barrier((output, weights))
        return _State(output=output, peak=peak, total=total), fade, weights.astype(self.shape.dtype)

    def faded(self, output: jax.Array, fade: jax.Array) -> jax.Array:
        """output * fade, left out by warps none of whose rows have a new maximum."""

        def multiply() -> jax.Array:
            return output * _along(fade, output.shape)

        if self.shape.interpret is not None:
            return multiply()
        return lax.cond(some_of_warp(fade, 1.0) != 0, multiply, lambda: output)

    def store_wide(self, number: jax.Array, state: _State) -> None:
        """The output of the CTA's wide item of that number among all items."""
        item = _read_item(self.shape, self.scratch, number - self.first)
        output = _normalised(state.output, state.total.sum(axis=1)).astype(self.shape.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        token, head = _part_of(self.shape, item, self.index)
        skip = jnp.maximum(item.skip - (token - item.token), 0)
        stop = jnp.minimum(item.stop - (token - item.token), TILE_Q)
        out = self.outputs.out

        @pl.when(stop - skip == TILE_Q)
        def _whole() -> None:
            self.out_tiled[self.index] = output
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.out_tiled.at[self.index], out.at[pl.ds(token, TILE_Q), head])

        @pl.when(stop - skip < TILE_Q)
        def _row_by_row() -> None:
            self.out_plain[self.index] = output
            plgpu.commit_smem()

            @pl.loop(skip, stop)
            def _store(i: jax.Array) -> None:
                plgpu.copy_smem_to_gmem(self.out_plain.at[self.index, i], out.at[token + i, head])

    def narrow_run(self, begin: jax.Array, end: jax.Array, filled: jax.Array) -> jax.Array:
        """Narrow items one after the other; returns the slots filled after.

        A part is counted as done when the next item's queries are there: by then its stores are done, too.
        """
        filled, uncounted = lax.fori_loop(begin, end, self.narrow, (filled, jnp.bool(False)))
        self.count_part(end - 1, uncounted)
        return filled

    def count_part(self, i: jax.Array, uncounted: jax.Array) -> None:
        """Count the item as done, which was a part."""
        note = self.scratch["item_ring"].at[NUM_ITEMS, 0]

        @pl.when(uncounted & (self.index == 1))
        def _count() -> None:
            self.outputs.count_part(_read_item(self.shape, self.scratch, i - self.first), note)

    def narrow(self, i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """A few tokens under all heads of a group: this consumer has every other block of their keys.

        Carries the slots filled before and whether the item before was a part, which isn't counted yet.
        """
        filled, uncounted = carry
        shape, scratch = self.shape, self.scratch
        item = _wait_item(self.shape, scratch, i - self.first)
        blocks = item.end - item.begin
        queries = scratch["queries"].at[0]

        def last_key() -> jax.Array:
            row = plgpu.broadcasted_iota(jnp.int32, (TILE_Q, shape.block_kv), 0, layout=WGMMA)
            return item.position + lax.div(row, jnp.int32(shape.stride))

        # The second consumer has the last block: it joins the states while the first goes on.
        own_first = lax.rem(blocks + self.index, jnp.int32(2))

        def pass_over(number: jax.Array) -> None:
            """The other's block: a barrier counts only for those who wait for it."""

            @pl.when(number < blocks)
            def _pass() -> None:
                for which in range(2):
                    self.wait_loaded(filled + 2 * number + which)
                    self.release(filled + 2 * number + which)

        def pair_step(pair: jax.Array, state: _State) -> _State:
            number = 2 * pair + own_first
            pl.when(own_first == 1)(lambda: pass_over(2 * pair))
            slot, block = filled + 2 * number, item.begin + number
            self.wait_loaded(slot)
            scores = self.scores(queries, slot)
            self.release(slot)
            masked = self.masked(item, block, item.position + item.stop - 1)
            peak, total, fade, weights = self.softmax(
                scores, state.peak, state.total, block, masked, last_key
            )
            self.wait_loaded(slot + 1)
            valid = item.kv_len - block * shape.block_kv
            pl.when(valid < shape.block_kv)(lambda: self.clear(slot + 1, valid))
            output = state.output * _along(fade, state.output.shape)
            output = self.weigh(output, weights.astype(shape.dtype), slot + 1)
            self.release(slot + 1)
            pl.when(own_first == 0)(lambda: pass_over(2 * pair + 1))
            return _State(output=output, peak=peak, total=total)

        plgpu.barrier_wait(scratch["narrow_queries"])
        self.count_part(i - 1, uncounted)
        own = lax.div(blocks + 1 - own_first, jnp.int32(2))
        state = lax.fori_loop(0, own, pair_step, _start(shape.head_dim))
        pl.when((own_first == 1) & (lax.rem(blocks, jnp.int32(2)) == 1))(lambda: pass_over(blocks - 1))
        self.queries_used()
        self.finish_narrow(item, state)
        return filled + 2 * blocks, item.kind == PARTIAL

    def finish_narrow(self, item: _Item, state: _State) -> None:
        """The first consumer hands its state to the second, which joins and stores it."""
        scratch, stats = self.scratch, self.scratch["stats"]
        output, peak, total = state.output, state.peak, state.total.sum(axis=1)

        @pl.when(self.index == 0)
        def _hand_over() -> None:
            plgpu.barrier_wait(_one(scratch, "may_write", 0))
            self.out_exact[...] = output
            stats[0] = peak
            stats[1] = total
            plgpu.barrier_arrive(_one(scratch, "wrote", 0))

        @pl.when(self.index == 1)
        def _join() -> None:
            plgpu.barrier_wait(_one(scratch, "wrote", 0))
            other_output = plgpu.load(self.out_exact, layout=WGMMA)
            other_peak = plgpu.load(stats.at[0], layout=ROWS)
            other_total = plgpu.load(stats.at[1], layout=ROWS)
            plgpu.barrier_arrive(_one(scratch, "may_write", 0))
            both_peak = jnp.maximum(peak, other_peak)
            fade, other_fade = jnp.exp2(peak - both_peak), jnp.exp2(other_peak - both_peak)
            both_total = total * fade + other_total * other_fade
            both = output * _along(fade, output.shape) + other_output * _along(other_fade, output.shape)
            lse = both_peak + jnp.log2(both_total)
            self.outputs.store(item, _normalised(both, both_total), _along(lse, output.shape))

    def scores(self, queries: Any, slot: jax.Array) -> jax.Array:
        """queries @ keys.T."""
        keys = self.slot(slot)
        if self.shape.interpret is not None:
            return self.interpreted_product(queries[...], keys[...].T)

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_Q, self.shape.block_kv), jnp.float32))

    def weigh(self, output: jax.Array, weights: jax.Array, slot: jax.Array) -> jax.Array:
        """output + weights @ values."""
        values = self.slot(slot)
        if self.shape.interpret is not None:
            return output + self.interpreted_product(weights, values[...])
        product: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))
        return product(plgpu.WGMMAAccumulatorRef.init(output))

    def products(
        self,
        queries: Any,
        keys_slot: jax.Array,
        output: jax.Array,
        weights: jax.Array,
        values_slot: jax.Array,
        softmax: Callable[[jax.Array], Any],
    ) -> tuple[jax.Array, Any]:
        """`scores` and `weigh` at once, and `softmax` under the second product."""
        if self.shape.interpret is not None:
            scores = self.scores(queries, keys_slot)
            output = self.weigh(output, weights, values_slot)
            return output, softmax(scores)
        keys, values = self.slot(keys_slot), self.slot(values_slot)

        def product(score_acc: Any, output_acc: Any) -> tuple[jax.Array, Any]:
            output_acc[...] = output
            plgpu.wgmma(score_acc, queries, keys.transpose((1, 0)))
            plgpu.wgmma(output_acc, weights, values)
            result = softmax(plgpu.wgmma_accumulator_load(score_acc, wait_n=1))
            return output_acc[...], result

        return pl.run_scoped(
            product,
            plgpu.WGMMAAccumulatorRef((TILE_Q, self.shape.block_kv), jnp.float32),
            plgpu.WGMMAAccumulatorRef((TILE_Q, self.shape.head_dim), jnp.float32),
        )

    def interpreted_product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """For the interpreter, which has no products with registers."""
        product = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
        plgpu.commit_smem()
        return product

    def masked(self, item: _Item, block: jax.Array, last_position: jax.Array) -> jax.Array:
        """Whether a row of the item, the last of which stands there, doesn't see the whole block."""
        masked = block >= item.full
        if self.shape.sliding_window is not None:
            masked |= block * self.shape.block_kv <= last_position - self.shape.sliding_window
        return masked

    def softmax(
        self,
        scores: jax.Array,
        peak: jax.Array,
        total: jax.Array,
        block: jax.Array,
        masked: jax.Array,
        last_key: Callable[[], jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """New maximum and total of each row, the factor of its output so far, the weights of the values.

        `last_key` gives the last key that each row sees; if not `masked`, all rows see the whole block.
        """
        shape = self.shape
        factor = shape.scale * LOG2E
        if shape.logit_soft_cap is not None:
            scores = _soft_capped(scores * (shape.scale / shape.logit_soft_cap))
            factor = shape.logit_soft_cap * LOG2E

        def mask() -> jax.Array:
            key = block * shape.block_kv + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
            last = last_key()
            seen = key <= last
            if shape.sliding_window is not None:
                seen &= key > last - shape.sliding_window
            return jnp.where(seen, scores, -jnp.inf)

        scores = lax.cond(masked, mask, lambda: scores)
        block_peak = scores.max(axis=1) * factor
        new_peak = jnp.where(block_peak > peak + MAX_EXCESS, block_peak, peak)
        fade = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * factor - _along(new_peak, scores.shape))
        sums = [weights[:, i : i + SUMS] for i in range(0, shape.block_kv, SUMS)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        total = total * _along(fade, total.shape) + sums[0]
        result = (new_peak, total, fade, weights)
        return result if shape.interpret is not None else lax.optimization_barrier(result)

    def clear(self, slot: jax.Array, valid: jax.Array) -> None:
        """Zeros over the values past the row's end, which may be NaN: a weight of 0 wouldn't hide them."""
        rows = self.slot(slot)
        if self.shape.interpret is None:
            clear_rows(rows, swizzled(self.shape.dtype, self.shape.head_dim), valid)
            return
        row = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=WGMMA)
        rows[...] = jnp.where(row < valid, rows[...], jnp.zeros(rows.shape, rows.dtype))
        plgpu.commit_smem()

    def slot(self, number: jax.Array) -> Any:
        return self.scratch["ring"].at[_place(self.shape, number)]

    def cleared(self, slot: jax.Array) -> Any:
        """The barrier at which the second consumer waits until the first one has cleared a slot of values.

        Each slot of the ring has its own: the first consumer may be several short items ahead, but not with
        the same slot, and a barrier that is two arrivals ahead of who waits looks as if nothing had arrived.
        """
        return self.scratch["by_one"].at[2 * len(BY_ONE) + _place(self.shape, slot)]

    def wait_loaded(self, slot: jax.Array) -> None:
        plgpu.barrier_wait(self.scratch["loaded"].at[_place(self.shape, slot)])

    def release(self, slot: jax.Array) -> None:
        plgpu.barrier_arrive(self.scratch["used"].at[_place(self.shape, slot)])

    def queries_used(self) -> None:
        plgpu.barrier_arrive(_one(self.scratch, "queries_used", self.index))


def _part_of(shape: KernelShape, item: _Item, consumer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """First token and head of one consumer's part of a wide item."""
    if shape.paired:
        return pl.multiple_of(item.token, ALIGN), item.head + consumer
    return pl.multiple_of(item.token + consumer * TILE_Q, ALIGN), item.head


def _start(head_dim: int) -> _State:
    return _State(
        output=_zeros((TILE_Q, head_dim)),
        peak=plgpu.layout_cast(jnp.full((TILE_Q,), NEVER, jnp.float32), ROWS),
        total=_zeros((TILE_Q, SUMS)),
    )


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def _along(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(rows, shape, [0])


def _normalised(output: jax.Array, total: jax.Array) -> jax.Array:
    return output * _along(1.0 / jnp.where(total == 0.0, 1.0, total), output.shape)


def _soft_capped(x: jax.Array) -> jax.Array:
    """tanh to full precision; the hardware's own is good to 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))
