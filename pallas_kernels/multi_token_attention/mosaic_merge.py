"""The second kernel of Hopper's attention: joins the parts of items that the schedule cut."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.multi_token_attention.mosaic_common import NEVER, KernelShape, aligned
from pallas_kernels.multi_token_attention.schedule import MERGE_FIELDS, Schedule

PARTS_AT_ONCE = 4
"""Parts that are loaded together."""


def merge_parts(
    shape: KernelShape, schedule: Schedule, part_out: jax.Array, part_lse: jax.Array, out: Any
) -> None:
    """Join the parts of each item that was cut and store them in `out`."""
    at_once = max(1, 128 // shape.head_dim)
    kernel = plgpu.kernel(
        partial(_merge_kernel, shape, at_once),
        out_type=(),
        grid=(schedule.merges.shape[0], -(-shape.group // at_once)),
        grid_names=("merge", "heads"),
        scratch_types={"line": plgpu.SMEM((at_once * shape.head_dim,), shape.dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **shape.interpreted,
    )
    kernel(schedule.merges, part_out.reshape(schedule.max_parts, -1), part_lse, out)


def _merge_kernel(
    shape: KernelShape, at_once: int, merges: Any, parts: Any, lse: Any, out: Any, line: Any
) -> None:
    """One head (two of 64) of each token of one item: its parts weighted by their share of the total."""
    merge, heads = lax.axis_index("merge"), lax.axis_index("heads")
    count, first, head, token, num_tokens = (merges[merge, i] for i in range(len(MERGE_FIELDS)))
    width = at_once * shape.head_dim

    @pl.when(count > 0)
    def _merge() -> None:
        @pl.loop(0, num_tokens)
        def _token(i: jax.Array) -> None:
            line_of_token = (token + i) * out.shape[1] + head
            row = i * shape.stride + line_of_token - aligned(line_of_token) + heads * at_once

            def add(step: jax.Array, state: tuple[jax.Array, list[jax.Array], list[jax.Array]]) -> Any:
                output, peaks, totals = state
                # All loads of a step are under way together; past the last part they repeat it, and count 0.
                part = [step * PARTS_AT_ONCE + n for n in range(PARTS_AT_ONCE)]
                place = [first + jnp.minimum(p, count - 1) for p in part]
                values = [parts[p, pl.ds(row * shape.head_dim, width)] for p in place]
                sums = [[lse[p, row + k] for k in range(at_once)] for p in place]
                sums = [
                    [jnp.where(p < count, x, NEVER) for x in some] for p, some in zip(part, sums, strict=True)
                ]
                new_peaks = [functools.reduce(jnp.maximum, x) for x in zip(peaks, *sums, strict=True)]
                fades = [jnp.exp2(a - b) for a, b in zip(peaks, new_peaks, strict=True)]
                output = output * _each_head(fades, width)
                totals = [a * b for a, b in zip(totals, fades, strict=True)]
                for some, value in zip(sums, values, strict=True):
                    weights = [jnp.exp2(a - b) for a, b in zip(some, new_peaks, strict=True)]
                    output += value * _each_head(weights, width)
                    totals = [a + b for a, b in zip(totals, weights, strict=True)]
                return output, new_peaks, totals

            zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), plgpu.Layout.WG_STRIDED((width,), 1))
            steps = lax.div(count + PARTS_AT_ONCE - 1, jnp.int32(PARTS_AT_ONCE))
            start = (zero, [jnp.float32(NEVER)] * at_once, [jnp.float32(0)] * at_once)
            output, _, totals = lax.fori_loop(0, steps, add, start)
            line[...] = (output / _each_head(totals, width)).astype(shape.dtype)
            plgpu.commit_smem()
            for k in range(at_once):
                h = heads * at_once + k

                @pl.when(h < shape.group)
                def _store(h: jax.Array = h, k: int = k) -> None:
                    part_of_line = line.at[pl.ds(k * shape.head_dim, shape.head_dim)]
                    plgpu.copy_smem_to_gmem(part_of_line, out.at[token + i, head + h])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _each_head(values: list[jax.Array], width: int) -> jax.Array:
    """One value for each head of a line."""
    if len(values) == 1:
        return values[0]
    layout = plgpu.Layout.WG_STRIDED((width,), 1)
    column = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    return jnp.where(column < width // 2, values[0], values[1])
