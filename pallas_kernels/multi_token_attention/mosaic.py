"""Multi-token paged attention for Hopper GPUs, in Pallas Mosaic GPU.

A persistent grid walks over the items of a `Schedule`. In every CTA a producer warpgroup copies queries and
pages of KV into shared memory with the bulk copy engine, through a ring of slots that runs on across items,
and two consumer warpgroups compute. In a wide item each consumer has 64 query tokens under its own head and
both use every block of keys; they take turns, so that one's softmax runs under the other's products. In a
narrow item both have the same few rows and take every other block. A small second kernel merges the items
that the schedule cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.errors import UnsupportedInputError
from pallas_kernels.multi_token_attention.mosaic_common import LOG2E, NEVER, KernelShape, aligned
from pallas_kernels.multi_token_attention.mosaic_merge import merge_parts
from pallas_kernels.multi_token_attention.plan import AttentionPlan
from pallas_kernels.multi_token_attention.schedule import (
    ALIGN,
    BLOCK_KV,
    ITEM_FIELDS,
    PARTIAL,
    TILE_Q,
    WIDE,
    Schedule,
)

NUM_SLOTS = 5
"""Slots of the ring, each a block of K or of V. With queries and outputs they fill the shared memory."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers of a thread after the split: 2 x 232 + 40 make the 3 x 168 that the CTA starts with."""
BY_ONE = ("other_may_write", "other_wrote", "other_was_read")
"""Barriers at which one consumer arrives. Barriers of a kind are one array: each array takes registers."""
BY_BOTH = ("queries_used", "turn", "cleared")
"""Barriers at which both consumers arrive."""
WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
WIDE_ACCESS = plgpu.Layout.WGMMA_UPCAST_4X
"""16 bytes of a row for each thread: fewer addresses than in the layout of products."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[*ITEM_FIELDS],
    meta_fields=[],
)
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
    """As `multi_token_attention`, on Hopper: bf16 or fp16, head sizes 64 and 128.

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
    need(head_dim in (64, 128), "q", f"head_dim {head_dim}", "64 or 128")
    need(page_size in (16, 32, 64, 128), "kv_pages", f"page_size {page_size}", "16, 32, 64 or 128")
    group = num_heads // num_kv_heads
    need(group <= 16, "q", f"{group} heads for each KV head", "at most 16")
    need(sliding_window is None, "sliding_window", sliding_window, "None")
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
        interpret=interpret,
    )
    out, part_out, part_lse = _attention_call(shape, schedule, q, kv_pages, jnp.asarray(plan.page_table))
    out_ref = jax.new_ref(out)
    merge_parts(shape, schedule, part_out, part_lse, out_ref)
    return jax.freeze(out_ref)[:num_tokens]


def _attention_call(
    shape: KernelShape, schedule: Schedule, q: jax.Array, kv_pages: jax.Array, page_table: jax.Array
) -> list[jax.Array]:
    """The output but for the items that were cut, and their parts with the log-sum-exp of their scores."""
    dtype, head_dim = shape.dtype, shape.head_dim
    tiled, exact = _swizzled(dtype), _swizzled(jnp.float32)
    outputs = (
        plgpu.SMEM((2, TILE_Q, head_dim), dtype, transforms=tiled),
        plgpu.SMEM((2, TILE_Q, head_dim), dtype),
        plgpu.SMEM((TILE_Q, head_dim), jnp.float32, transforms=exact),
    )
    scratch = {
        "ring": plgpu.SMEM((NUM_SLOTS, BLOCK_KV, head_dim), dtype, transforms=tiled),
        "queries": plgpu.SMEM((2, TILE_Q, head_dim), dtype, transforms=tiled),
        # In the interpreter the outputs don't share their memory: it would compare uses of the two halves.
        "outputs": plgpu.RefUnion(*outputs) if shape.interpret is None else outputs,
        "stats": plgpu.SMEM((2, TILE_Q), jnp.float32),
        "loaded": plgpu.Barrier(num_barriers=NUM_SLOTS, num_arrivals=shape.pages_per_block),
        "used": plgpu.Barrier(num_barriers=NUM_SLOTS, num_arrivals=2),
        "narrow_queries": plgpu.Barrier(num_arrivals=shape.narrow_tokens),
        "by_one": plgpu.Barrier(num_barriers=2 + len(BY_ONE)),
        "by_both": plgpu.Barrier(num_arrivals=2, num_barriers=len(BY_BOTH)),
    }
    kernel = plgpu.kernel(
        partial(_attention_kernel, shape),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((schedule.max_parts, TILE_Q, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((schedule.max_parts, TILE_Q), jnp.float32),
        ],
        grid=(schedule.cta_begin.shape[0] - 1,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Rows are reduced among four threads by shuffles, not through shared memory.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **shape.interpreted,
    )
    by_head = q.reshape(-1, shape.head_dim)
    return kernel(schedule.cta_begin, schedule.items, page_table, q, by_head, kv_pages)


def _swizzled(dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows of 128 bytes, as the matrix unit and the copy engine want them."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return (
        plgpu.TilingTransform((ALIGN, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )


def _attention_kernel(
    shape: KernelShape,
    cta_begin: Any,
    items: Any,
    page_table: Any,
    q: Any,
    q_by_head: Any,
    kv_pages: Any,
    out: Any,
    part_out: Any,
    part_lse: Any,
    **scratch: Any,
) -> None:
    by_one, by_both = scratch.pop("by_one"), scratch.pop("by_both")
    scratch |= {name: by_one.at[2 + i] for i, name in enumerate(BY_ONE)}
    scratch |= {name: by_both.at[i] for i, name in enumerate(BY_BOTH)}
    scratch["wide_queries"] = by_one
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    first, last = cta_begin[cta], cta_begin[cta + 1]

    def each_item(run: Callable[[jax.Array, _Item, jax.Array], jax.Array]) -> jax.Array:
        """Run over this CTA's items with the ring slots filled before each; those filled in the end."""

        def step(i: jax.Array, filled: jax.Array) -> jax.Array:
            item = _Item(**{name: items[i, column] for column, name in enumerate(ITEM_FIELDS)})
            return run(i, item, filled)

        return lax.fori_loop(first, last, step, jnp.int32(0))

    @pl.when(warpgroup == 2)
    def _produce() -> None:
        if shape.interpret is None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        producer = _Producer(shape, page_table, q, q_by_head, kv_pages, scratch)

        def run(i: jax.Array, item: _Item, filled: jax.Array) -> jax.Array:
            # The first block of keys goes ahead of the queries, whose place is free only after the last of
            # the item before.
            second = jnp.minimum(item.begin + 1, item.end)
            filled = producer.load_blocks(item, item.begin, second, filled)
            producer.load_queries(item, i > first)
            return producer.load_blocks(item, second, item.end, filled)

        filled = each_item(run)
        pl.when(last > first)(lambda: producer.drain(filled))

    @pl.when(warpgroup < 2)
    def _consume() -> None:
        if shape.interpret is None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consumer = _Consumer(shape, warpgroup, out, part_out, part_lse, scratch)

        def run(i: jax.Array, item: _Item, filled: jax.Array) -> jax.Array:
            # One choice of queries for both kinds: their addresses then hold registers only once.
            queries = scratch["queries"].at[jnp.where(item.kind == WIDE, warpgroup, 0)]
            pl.when(item.kind == WIDE)(lambda: consumer.wide(item, filled, queries))
            pl.when(item.kind != WIDE)(lambda: consumer.narrow(item, filled, queries))
            return filled + 2 * (item.end - item.begin)

        each_item(run)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Producer:
    """Copies queries and KV into shared memory, as far ahead of the consumers as the ring allows."""

    def __init__(
        self,
        shape: KernelShape,
        page_table: Any,
        q: Any,
        q_by_head: Any,
        kv_pages: Any,
        scratch: dict[str, Any],
    ) -> None:
        self.shape, self.page_table, self.q, self.q_by_head = shape, page_table, q, q_by_head
        self.kv_pages, self.scratch = kv_pages, scratch

    def load_queries(self, item: _Item, not_first: jax.Array) -> None:
        """Queries past the item's tokens are read from what follows, zeros past the end: nobody uses them."""
        shape, queries = self.shape, self.scratch["queries"]
        pl.when(not_first)(lambda: plgpu.barrier_wait(self.scratch["queries_used"]))

        @pl.when(item.kind == WIDE)
        def _wide() -> None:
            for consumer in range(2):
                token, head = _part_of(shape, item, consumer)
                plgpu.copy_gmem_to_smem(
                    self.q.at[pl.ds(token, TILE_Q), head],
                    queries.at[consumer],
                    self.scratch["wide_queries"].at[consumer],
                )

        @pl.when(item.kind != WIDE)
        def _narrow() -> None:
            for i in range(shape.narrow_tokens):
                token = item.token + jnp.minimum(i, item.stop - 1)
                line = pl.multiple_of(aligned(token * self.q.shape[1] + item.head), ALIGN)
                plgpu.copy_gmem_to_smem(
                    self.q_by_head.at[pl.ds(line, shape.stride)],
                    queries.at[0, pl.ds(i * shape.stride, shape.stride)],
                    self.scratch["narrow_queries"],
                )

    def load_blocks(self, item: _Item, begin: jax.Array, end: jax.Array, filled: jax.Array) -> jax.Array:
        """K and V of the item's blocks into the next slots; pages past the row's last are the last again."""
        pages_per_block = self.shape.pages_per_block
        last_page = lax.div(item.kv_len - 1, jnp.int32(self.shape.page_size))
        ring, loaded, used = self.scratch["ring"], self.scratch["loaded"], self.scratch["used"]

        def pages_of(block: jax.Array) -> list[jax.Array]:
            return [
                self.page_table[item.row, jnp.minimum(block * pages_per_block + i, last_page)]
                for i in range(pages_per_block)
            ]

        def load(block: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> Any:
            filled, pages = carry
            following = pages_of(block + 1)
            for which in range(2):
                slot = lax.rem(filled + which, jnp.int32(NUM_SLOTS))
                pl.when(filled + which >= NUM_SLOTS)(partial(plgpu.barrier_wait, used.at[slot]))
                for i, page in enumerate(pages):
                    plgpu.copy_gmem_to_smem(
                        self.kv_pages.at[page, which, item.kv_head],
                        ring.at[slot, pl.ds(i * self.shape.page_size, self.shape.page_size)],
                        loaded.at[slot],
                    )
            return filled + 2, following

        filled, _ = lax.fori_loop(begin, end, load, (filled, pages_of(begin)))
        return filled

    def drain(self, filled: jax.Array) -> None:
        """Wait until everything was used: no barrier may be in use when the CTA ends."""
        plgpu.barrier_wait(self.scratch["queries_used"])

        @pl.loop(jnp.maximum(filled - NUM_SLOTS, 0), filled)
        def _wait(slot: jax.Array) -> None:
            plgpu.barrier_wait(self.scratch["used"].at[lax.rem(slot, jnp.int32(NUM_SLOTS))])


class _Consumer:
    """One of the two warpgroups that compute. Its running state: (output, maximum, total) of each row."""

    def __init__(
        self,
        shape: KernelShape,
        index: jax.Array,
        out: Any,
        part_out: Any,
        part_lse: Any,
        scratch: dict[str, Any],
    ) -> None:
        self.shape, self.index, self.scratch = shape, index, scratch
        self.out, self.part_out, self.part_lse = out, part_out, part_lse
        self.out_tiled, self.out_plain, self.out_exact = scratch["outputs"]

    def wide(self, item: _Item, filled: jax.Array, queries: Any) -> None:
        """64 tokens under one head; the other consumer has another head or the next 64 tokens."""
        turn, head_dim = self.scratch["turn"], self.shape.head_dim
        token, _ = _part_of(self.shape, item, self.index)
        position = item.position + (token - item.token)
        row_position = position + plgpu.broadcasted_iota(jnp.int32, (TILE_Q, BLOCK_KV), 0, layout=WGMMA)

        def ask() -> None:
            plgpu.barrier_arrive(turn)

        def wait() -> None:
            plgpu.barrier_wait(turn)

        def take_turn() -> None:
            ask()
            wait()

        def block_step(block: jax.Array, state: Any, *, masked: bool) -> Any:
            slot = filled + 2 * (block - item.begin)
            self.wait_loaded(slot)
            scores = self.scores(queries, slot, take_turn)
            pl.when(block + 1 == item.end)(self.queries_used)
            state, weights = self.softmax(scores, state, block, row_position if masked else None)
            ask()
            self.wait_loaded(slot + 1)
            valid = item.kv_len - block * BLOCK_KV
            if masked:

                @pl.when(valid < BLOCK_KV)
                def _clear_half() -> None:
                    self.clear(slot + 1, valid, [pl.multiple_of(self.index * TILE_Q, TILE_Q)])
                    plgpu.barrier_arrive(self.scratch["cleared"])

            wait()
            if masked:
                pl.when(valid < BLOCK_KV)(partial(plgpu.barrier_wait, self.scratch["cleared"]))
            return self.weigh(state, weights, slot + 1)

        plgpu.barrier_wait(self.scratch["wide_queries"].at[self.index])
        pl.when(self.index == 1)(take_turn)
        state = lax.fori_loop(item.begin, item.full, partial(block_step, masked=False), _start(head_dim))
        output, _, total = lax.fori_loop(item.full, item.end, partial(block_step, masked=True), state)
        pl.when(self.index == 0)(take_turn)

        output = _normalised(output, total).astype(self.shape.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        token, head = _part_of(self.shape, item, self.index)
        skip = jnp.maximum(item.skip - (token - item.token), 0)
        stop = jnp.minimum(item.stop - (token - item.token), TILE_Q)

        @pl.when(stop - skip == TILE_Q)
        def _whole() -> None:
            self.out_tiled[self.index] = output
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.out_tiled.at[self.index], self.out.at[pl.ds(token, TILE_Q), head])

        @pl.when(stop - skip < TILE_Q)
        def _row_by_row() -> None:
            self.out_plain[self.index] = output
            plgpu.commit_smem()

            @pl.loop(skip, stop)
            def _store(i: jax.Array) -> None:
                plgpu.copy_smem_to_gmem(self.out_plain.at[self.index, i], self.out.at[token + i, head])

    def narrow(self, item: _Item, filled: jax.Array, queries: Any) -> None:
        """A few tokens under all heads of a group: this consumer has every other block of their keys."""
        shape, scratch = self.shape, self.scratch
        blocks = item.end - item.begin
        offset = lax.div(
            plgpu.broadcasted_iota(jnp.int32, (TILE_Q, BLOCK_KV), 0, layout=WGMMA), jnp.int32(shape.stride)
        )

        def pass_over(number: jax.Array) -> None:
            """The other's block: a barrier counts only for those who wait for it."""

            @pl.when(number < blocks)
            def _pass() -> None:
                for which in range(2):
                    self.wait_loaded(filled + 2 * number + which)
                    self.release(filled + 2 * number + which)

        def pair_step(pair: jax.Array, state: Any, *, masked: bool) -> Any:
            number = 2 * pair + self.index
            pl.when(self.index == 1)(lambda: pass_over(2 * pair))
            slot = filled + 2 * number
            self.wait_loaded(slot)
            block = item.begin + number
            scores = self.scores(queries, slot)
            state, weights = self.softmax(scores, state, block, item.position + offset if masked else None)
            self.wait_loaded(slot + 1)
            valid = item.kv_len - block * BLOCK_KV
            if masked:
                pl.when(valid < BLOCK_KV)(lambda: self.clear(slot + 1, valid, [0, TILE_Q]))
            state = self.weigh(state, weights, slot + 1)
            pl.when(self.index == 0)(lambda: pass_over(2 * pair + 1))
            return state

        def own(number_of_blocks: jax.Array) -> jax.Array:
            return lax.div(number_of_blocks + 1 - self.index, jnp.int32(2))

        plgpu.barrier_wait(scratch["narrow_queries"])
        full = own(item.full - item.begin)
        state = lax.fori_loop(0, full, partial(pair_step, masked=False), _start(shape.head_dim))
        state = lax.fori_loop(full, own(blocks), partial(pair_step, masked=True), state)
        pl.when((self.index == 1) & (lax.rem(blocks, jnp.int32(2)) == 1))(lambda: pass_over(blocks - 1))
        self.queries_used()
        self.finish_narrow(item, state)

    def finish_narrow(self, item: _Item, state: Any) -> None:
        """The second consumer hands its state to the first, which joins and stores it."""
        shape, scratch, stats = self.shape, self.scratch, self.scratch["stats"]
        output, peak, total = state
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(self.index == 1)
        def _hand_over() -> None:
            plgpu.barrier_wait(scratch["other_may_write"])
            self.out_exact[...] = output
            stats[0] = peak
            stats[1] = total
            plgpu.barrier_arrive(scratch["other_wrote"])
            plgpu.barrier_wait(scratch["other_was_read"])

        @pl.when(self.index == 0)
        def _join() -> None:
            plgpu.barrier_arrive(scratch["other_may_write"])
            plgpu.barrier_wait(scratch["other_wrote"])
            other_output = plgpu.load(self.out_exact, layout=WGMMA)
            other_peak = plgpu.load(stats.at[0], layout=ROWS)
            other_total = plgpu.load(stats.at[1], layout=ROWS)
            both_peak = jnp.maximum(peak, other_peak)
            fade, other_fade = jnp.exp2(peak - both_peak), jnp.exp2(other_peak - both_peak)
            both_total = total * fade + other_total * other_fade
            both = output * _along(fade, output.shape) + other_output * _along(other_fade, output.shape)
            both = _normalised(both, both_total)
            stride = shape.stride

            @pl.when(item.kind == PARTIAL)
            def _part() -> None:
                self.out_exact[...] = both
                stats[0] = both_peak + jnp.log2(both_total)
                plgpu.commit_smem()

                @pl.loop(0, item.stop)
                def _store(i: jax.Array) -> None:
                    rows = pl.ds(pl.multiple_of(i * stride, stride), stride)
                    plgpu.copy_smem_to_gmem(self.out_exact.at[rows], self.part_out.at[item.part, rows])

                plgpu.copy_smem_to_gmem(stats.at[0], self.part_lse.at[item.part])

            @pl.when(item.kind != PARTIAL)
            def _whole() -> None:
                self.out_plain[0] = both.astype(shape.dtype)
                plgpu.commit_smem()

                @pl.loop(0, item.stop)
                def _store(i: jax.Array) -> None:
                    line = (item.token + i) * self.out.shape[1] + item.head
                    row = i * stride + line - aligned(line)
                    plgpu.copy_smem_to_gmem(
                        self.out_plain.at[0, pl.ds(row, shape.group)],
                        self.out.at[item.token + i, pl.ds(item.head, shape.group)],
                    )

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch["other_was_read"])

    def scores(self, queries: Any, slot: jax.Array, meanwhile: Callable[[], None] | None = None) -> jax.Array:
        """queries @ keys.T from a slot, which is free after; `meanwhile` runs during the product."""
        keys = self.slot(slot)
        if self.shape.interpret is None:

            def product(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
                if meanwhile is not None:
                    meanwhile()
                return acc[...]

            scores = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE_Q, BLOCK_KV), jnp.float32))
        else:
            scores = jnp.dot(queries[...].astype(jnp.float32), keys[...].astype(jnp.float32).T)
            plgpu.commit_smem()
            if meanwhile is not None:
                meanwhile()
        self.release(slot)
        return scores

    def softmax(
        self, scores: jax.Array, state: Any, block: jax.Array, last_key: jax.Array | None
    ) -> tuple[Any, jax.Array]:
        """The state, faded to the new maximum, and the weights of a block's values.

        `last_key` is the last key that each row sees; None: all rows see the whole block.
        """
        shape = self.shape
        output, peak, total = state
        factor = shape.scale * LOG2E
        if shape.logit_soft_cap is not None:
            scores = _soft_capped(scores * (shape.scale / shape.logit_soft_cap))
            factor = shape.logit_soft_cap * LOG2E
        if last_key is not None:
            key = block * BLOCK_KV + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
            scores = jnp.where(key <= last_key, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * factor)
        fade = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * factor - _along(new_peak, scores.shape))
        output = output * _along(fade, output.shape)
        total = total * fade + weights.sum(axis=1)
        weights = weights.astype(shape.dtype)
        if shape.interpret is None:
            output, total, new_peak, weights = lax.optimization_barrier((output, total, new_peak, weights))
        return (output, new_peak, total), weights

    def clear(self, slot: jax.Array, valid: jax.Array, first_rows: list[Any]) -> None:
        """Zeros over the values past the row's end, which may be NaN: a weight of 0 wouldn't hide them."""
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_Q, self.shape.head_dim), 0, layout=WIDE_ACCESS)
        for first in first_rows:
            rows = self.slot(slot).at[pl.ds(first, TILE_Q)]
            kept = plgpu.load(rows, layout=WIDE_ACCESS)
            rows[...] = jnp.where(first + row < valid, kept, jnp.zeros_like(kept))
        plgpu.commit_smem()

    def weigh(self, state: Any, weights: jax.Array, slot: jax.Array) -> Any:
        """The state with weights @ values added, from a slot, which is free after."""
        output, peak, total = state
        values = self.slot(slot)
        if self.shape.interpret is None:
            product = pl.run_state(lambda acc: plgpu.wgmma(acc, weights, values))
            output = product(plgpu.WGMMAAccumulatorRef.init(output))
        else:
            output = output + jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
            plgpu.commit_smem()
        self.release(slot)
        return output, peak, total

    def slot(self, number: jax.Array) -> Any:
        return self.scratch["ring"].at[lax.rem(number, jnp.int32(NUM_SLOTS))]

    def wait_loaded(self, slot: jax.Array) -> None:
        plgpu.barrier_wait(self.scratch["loaded"].at[lax.rem(slot, jnp.int32(NUM_SLOTS))])

    def release(self, slot: jax.Array) -> None:
        plgpu.barrier_arrive(self.scratch["used"].at[lax.rem(slot, jnp.int32(NUM_SLOTS))])

    def queries_used(self) -> None:
        plgpu.barrier_arrive(self.scratch["queries_used"])


def _part_of(shape: KernelShape, item: _Item, consumer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """First token and head of one consumer's part of a wide item."""
    if shape.paired:
        return pl.multiple_of(item.token, ALIGN), item.head + consumer
    return pl.multiple_of(item.token + consumer * TILE_Q, ALIGN), item.head


def _start(head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        plgpu.layout_cast(jnp.zeros((TILE_Q, head_dim), jnp.float32), WGMMA),
        plgpu.layout_cast(jnp.full((TILE_Q,), NEVER, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((TILE_Q,), jnp.float32), ROWS),
    )


def _along(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(rows, shape, [0])


def _normalised(output: jax.Array, total: jax.Array) -> jax.Array:
    return output * _along(1.0 / jnp.where(total == 0.0, 1.0, total), output.shape)


def _soft_capped(x: jax.Array) -> jax.Array:
    """tanh to full precision; the hardware's own is good to 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))
