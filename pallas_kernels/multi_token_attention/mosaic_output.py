"""Where the outputs of narrow items go: to their place, or among the parts, which the last of them merges."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.multi_token_attention.mosaic_common import NEVER, KernelShape
from pallas_kernels.multi_token_attention.mosaic_device import (
    arrivals_before,
    flat_layout,
    i32,
    store_flat,
    store_rows,
)
from pallas_kernels.multi_token_attention.schedule import ALIGN, ITEM_FIELDS, PARTIAL, TILE_Q

PARTS_AT_ONCE = 8
"""Parts that are loaded together."""


class Outputs:
    """The arrays in global memory that narrow items write, of one CTA."""

    def __init__(self, shape: KernelShape, out: Any, part_out: Any, part_lse: Any, arrived: Any) -> None:
        self.shape, self.out = shape, out
        self.part_out, self.part_lse, self.arrived = part_out, part_lse, arrived

    def store(self, item: Any, output: jax.Array, lse: jax.Array) -> None:
        """Of a narrow item: f32[TILE_Q, head_dim] and the log-sum-exp of its scores, along the columns."""
        shape = self.shape
        if shape.interpret is not None:
            self.store_interpreted(item, output, lse)
            return

        @pl.when(item.kind == PARTIAL)
        def _part() -> None:
            def line_of(row: Any, part: Any, rows: Any) -> tuple[Any, Any]:
                line = arith.addi(arith.muli(part, i32(TILE_Q)), row)
                return line, arith.cmpi(arith.CmpIPredicate.slt, row, rows)

            rows = item.stop * shape.stride
            store_rows(self.part_out, output, line_of, item.part, rows)
            store_rows(self.part_lse, lse, line_of, item.part, rows)

        @pl.when(item.kind != PARTIAL)
        def _whole() -> None:
            def line_of(row: Any, token: Any, stop: Any, head: Any) -> tuple[Any, Any]:
                i = arith.divui(row, i32(shape.stride))
                line, stored = self.line_of(arith.remui(row, i32(shape.stride)), arith.addi(token, i), head)
                return line, arith.andi(stored, arith.cmpi(arith.CmpIPredicate.slt, i, stop))

            store_rows(self.out, output.astype(shape.dtype), line_of, item.token, item.stop, item.head)

    def count_part(self, item: Any, note: Any) -> None:
        """Count a part as done, and merge the parts of its item if it was the last.

        `note` is a number of shared memory that nobody else uses.
        """
        if self.shape.interpret is not None:
            return
        before = arrivals_before(self.arrived.at[item.merge], note, item.parts)
        pl.when(before == item.parts - 1)(lambda: self.merge(item))

    def store_interpreted(self, item: Any, output: jax.Array, lse: jax.Array) -> None:
        """As `store`, without merging: the interpreter has neither stores of some rows only nor counters."""
        shape = self.shape

        @pl.when(item.kind == PARTIAL)
        def _part() -> None:
            self.part_out[item.part] = output.reshape(-1)
            self.part_lse[item.part] = lse.reshape(-1)

        @pl.when(item.kind != PARTIAL)
        def _whole() -> None:
            @pl.loop(0, item.stop)
            def _store(i: jax.Array) -> None:
                row = i * shape.stride + lax.rem(
                    (item.token + i) * self.out.shape[1] + item.head, jnp.int32(ALIGN)
                )
                lines = lax.dynamic_slice_in_dim(output, row, shape.group)
                self.out[item.token + i, pl.ds(item.head, shape.group)] = lines.astype(shape.dtype)

    def line_of(self, row: Any, token: Any, head: Any) -> tuple[Any, Any]:
        """Line of the output for a row of a token's rows, which start aligned; whether it's of the group."""
        first = arith.addi(arith.muli(token, i32(self.out.shape[1])), head)
        number = arith.subi(row, arith.remui(first, i32(ALIGN)))
        stored = arith.cmpi(arith.CmpIPredicate.ult, number, i32(self.shape.group))
        return arith.addi(first, number), stored

    def merge(self, item: Any) -> None:
        """Each token of an item, some rows at a time: its parts weighted by their share of the total."""
        rows = self.shape.merged_rows
        pieces, width = jnp.int32(self.shape.stride // rows), rows * self.shape.head_dim
        steps = lax.div(item.parts + PARTS_AT_ONCE - 1, jnp.int32(PARTS_AT_ONCE))
        layout = flat_layout(width)

        def line_of(row: Any, token: Any, head: Any, first_row: Any) -> tuple[Any, Any]:
            return self.line_of(arith.addi(row, first_row), token, head)

        @pl.loop(0, item.stop * pieces)
        def _piece(i: jax.Array) -> None:
            def load(of: Any, part: jax.Array) -> jax.Array:
                place = item.first_part + jnp.minimum(part, item.parts - 1)
                return plgpu.load(of.at[place, pl.ds(i * width, width)], layout=layout)

            def add(step: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
                # All loads of a step are under way together; past the last part they repeat it, and count 0.
                parts = [step * PARTS_AT_ONCE + n for n in range(PARTS_AT_ONCE)]
                values = [load(self.part_out, p) for p in parts]
                sums = [jnp.where(p < item.parts, load(self.part_lse, p), NEVER) for p in parts]
                output, peak, total = state
                new_peak = functools.reduce(jnp.maximum, [peak, *sums])
                fade = jnp.exp2(peak - new_peak)
                output, total = output * fade, total * fade
                for value, part_sum in zip(values, sums, strict=True):
                    weight = jnp.exp2(part_sum - new_peak)
                    output, total = output + value * weight, total + weight
                return output, new_peak, total

            zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)
            never = plgpu.layout_cast(jnp.full((width,), NEVER, jnp.float32), layout)
            output, _, total = lax.fori_loop(0, steps, add, (zero, never, zero))
            output = (output / total).astype(self.shape.dtype)
            token, first_row = item.token + lax.div(i, pieces), lax.rem(i, pieces) * rows
            store_flat(self.out, output, self.shape.head_dim, line_of, token, item.head, first_row)


def merge_interpreted(
    shape: KernelShape, items: np.ndarray, out: np.ndarray, part_out: np.ndarray, part_lse: np.ndarray
) -> np.ndarray:
    """`out` with the merges done, which the interpreter can't: it has no counters."""
    column = {name: i for i, name in enumerate(ITEM_FIELDS)}
    firsts = (items[:, column["kind"]] == PARTIAL) & (
        items[:, column["part"]] == items[:, column["first_part"]]
    )
    for item in items[firsts]:
        token, head, stop, first, count = (
            item[column[name]] for name in ("token", "head", "stop", "first_part", "parts")
        )
        parts = part_out[first : first + count].reshape(count, TILE_Q, -1)
        lse = part_lse[first : first + count].reshape(parts.shape)
        weights = 2.0 ** (lse - lse.max(0))
        merged = (parts * weights).sum(0) / weights.sum(0)
        for i in range(stop):
            row = i * shape.stride + ((token + i) * out.shape[1] + head) % ALIGN
            out[token + i, head : head + shape.group] = merged[row : row + shape.group]
    return out
