"""What Pallas has no words for, in PTX: stores of some rows of registers, and counting arrivals of CTAs."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
FLAT_VECTOR = 4
"""Numbers that a thread holds side by side in a flat array, at most."""
THREADS = 128
"""Of a warpgroup."""


def flat_layout(size: int) -> Any:
    """Of a flat array of a multiple of 128 numbers, spread over a warpgroup."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(FLAT_VECTOR, size // THREADS))


def store_rows(
    to: Any, values: jax.Array, line_of: Callable[..., tuple[Any, Any]], *scalars: jax.Array
) -> None:
    """Store rows of a [rows, columns] array in the layout of products, straight from registers.

    The copy engine works off its queue in order: what it stores waits behind all loads under way.

    Args:
        to: global memory, taken as lines of the array's columns.
        values: rows to store, in the dtype of `to`.
        line_of: from MLIR values, a row and the scalars: the line it goes to and whether it's stored.
        scalars: int32 numbers for `line_of`.
    """

    def store(_: Any, to: Any, values: Any, *scalars: Any) -> None:
        layout, columns = values.layout, values.shape[1]
        tile_strides = layout.tiling.tile_strides(tuple(mgpu_utils.get_contiguous_strides(values.shape)))
        strides = [i32(s) for s in tile_strides[-layout.tiled_tiling_rank :]]
        own = arith.addi(
            mgpu_utils.dyn_dot(layout.warp_indices(), strides),
            mgpu_utils.dyn_dot(layout.lane_indices(), strides),
        )
        row, column = arith.divui(own, i32(columns)), arith.remui(own, i32(columns))
        numbers = [s.registers.item() for s in scalars]
        lines: dict[int, tuple[Any, Any]] = {}
        for place in np.ndindex(values.registers.shape):
            further = sum(i * s for i, s in zip(place, tile_strides, strict=True))
            down, right = divmod(further, columns)
            if down not in lines:
                lines[down] = line_of(arith.addi(row, i32(down)), *numbers)
            line, stored = lines[down]
            _store(to, line, columns, arith.addi(column, i32(right)), values.registers[place], stored)

    _inline(store, (plgpu.RefType(), plgpu.Layout.WGMMA, *[SCALAR] * len(scalars)), to, values, *scalars)


def store_flat(
    to: Any,
    values: jax.Array,
    columns: int,
    line_of: Callable[..., tuple[Any, Any]],
    *scalars: jax.Array,
) -> None:
    """As `store_rows`, of a flat array of rows of that many columns."""

    def store(_: Any, to: Any, values: Any, *scalars: Any) -> None:
        index_type = ir.IntegerType.get_signless(32)
        numbers = [s.registers.item() for s in scalars]
        for place, number in zip(_flat(values.registers), values.layout.linear_thread_idxs(), strict=True):
            number = arith.index_castui(index_type, number)
            row, column = arith.divui(number, i32(columns)), arith.remui(number, i32(columns))
            line, stored = line_of(row, *numbers)
            _store(to, line, columns, column, place, stored)

    layout = flat_layout(values.shape[0])
    _inline(store, (plgpu.RefType(), layout, *[SCALAR] * len(scalars)), to, values, *scalars)


def clear_rows(of: Any, transforms: tuple[Any, ...], first: jax.Array) -> None:
    """Zeros over the rows of a block in shared memory from `first` on, for any reader.

    Args:
        of: [rows, columns] of 16 bits in tiles of 8 rows of 32, 64 or 128 bytes; the swizzle stays within
            a row of a tile.
        transforms: those of `of`.
        first: the first row to clear.
    """
    rows, columns = of.shape
    tile_columns = transforms[0].tiling[1]
    row_bits = (2 * tile_columns).bit_length() - 1  # of a place within a row of a tile, which has 8

    def clear(_: Any, of: Any, first: Any) -> None:
        thread = arith.remui(mgpu_utils.thread_idx(), i32(THREADS))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [mgpu_utils.memref_ptr(of), first.registers.item(), thread],
            f"""{{
                .reg .u32 place, row, inner, address, zero;
                .reg .pred in, more;
                mov.u32 zero, 0;
                shl.b32 place, $2, 4;
            CLEAR_NEXT:
                shr.u32 row, place, {row_bits + 3};
                div.u32 row, row, {columns // tile_columns};
                shl.b32 row, row, 3;
                bfe.u32 inner, place, {row_bits}, 3;
                add.u32 row, row, inner;
                setp.ge.s32 in, row, $1;
                add.u32 address, $0, place;
                @in st.shared.v4.u32 [address], {{zero, zero, zero, zero}};
                add.u32 place, place, 2048;
                setp.lt.u32 more, place, {rows * columns * 2};
                @more bra CLEAR_NEXT;
            }}""",
            "r,r,r,~{memory}",
            has_side_effects=True,
        )
        mgpu_utils.commit_shared()

    _inline(clear, (plgpu.RefType(transforms), SCALAR), of, first)


def some_of_warp(values: jax.Array, than: float) -> jax.Array:
    """Whether some number of the calling warp's is below another: not the same for all warps.

    For branches around work that each warp does by itself.
    """

    def vote(_: Any, values: Any) -> Any:
        below = mgpu_utils.c(0, ir.IntegerType.get_signless(1))
        for value in values.registers.flat:
            if isinstance(value.type, ir.VectorType):
                value = llvm.extractelement(value, i32(0))
            limit = mgpu_utils.c(than, value.type)
            below = arith.ori(below, arith.cmpf(arith.CmpFPredicate.OLT, value, limit))
        some = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [below],
            "{ .reg .pred some; vote.sync.any.pred some, $1, 0xffffffff; selp.u32 $0, 1, 0, some; }",
            "=r,b",
            has_side_effects=True,
        )
        return type(values).splat(some, (), is_signed=True)

    returned = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    return _inline(vote, (plgpu.Layout.WGMMA.reduce(1),), values, return_type=returned)


def arrivals_before(arrived: Any, note: Any, count: jax.Array) -> jax.Array:
    """Count this CTA among `count` that arrive; how many came before. The last leaves 0 for the next launch.

    What the warpgroup wrote to global memory before is seen by the CTAs that arrive after it.

    Args:
        arrived: one number in global memory.
        note: one number of shared memory that only this function uses.
        count: CTAs that arrive in all.
    """

    def arrive(_: Any, arrived: Any, note: Any, count: Any) -> Any:
        mgpu_utils.warpgroup_barrier()
        one = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)
        last = arith.subi(count.registers.item(), i32(1))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [mgpu_utils.memref_ptr(arrived), mgpu_utils.memref_ptr(note), last, one],
            "{ .reg .u32 before; @$3 atom.acq_rel.gpu.global.inc.u32 before, [$0], $2;"
            " @$3 st.shared.u32 [$1], before; }",
            "l,r,r,b,~{memory}",
            has_side_effects=True,
        )
        mgpu_utils.warpgroup_barrier()
        before = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [mgpu_utils.memref_ptr(note)],
            "ld.shared.u32 $0, [$1];",
            "=r,r,~{memory}",
            has_side_effects=True,
        )
        return type(count).splat(before, (), is_signed=True)

    types = (plgpu.RefType(), plgpu.RefType(), SCALAR)
    returned = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    return _inline(arrive, types, arrived, note, count, return_type=returned)


def i32(value: int) -> Any:
    """A constant as an MLIR value."""
    return mgpu_utils.c(int(value), ir.IntegerType.get_signless(32))


def _inline(body: Callable[..., Any], types: tuple[Any, ...], *operands: Any, return_type: Any = None) -> Any:
    """What `body` emits from MLIR values, for operands of these types."""
    emit: Any = plgpu.inline_mgpu(arg_types=types, return_type=return_type)(body)
    return emit(*operands)


def _flat(registers: Any) -> Iterator[Any]:
    return iter(registers.flat)


def _store(to: Any, line: Any, columns: int, column: Any, value: Any, stored: Any) -> None:
    """The numbers of one register at a line and column of global memory, if `stored`."""
    i64 = ir.IntegerType.get_signless(64)
    kind = ir.MemRefType(to.type).element_type
    width = mgpu_utils.bitwidth(kind) // 8
    start = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(to))
    number = arith.addi(
        arith.muli(arith.extsi(i64, line), mgpu_utils.c(columns, i64)), arith.extsi(i64, column)
    )
    address = arith.addi(start, arith.muli(number, mgpu_utils.c(width, i64)))
    count = ir.VectorType(value.type).shape[0] if isinstance(value.type, ir.VectorType) else 1
    bits = 8 * count * width
    word = ir.IntegerType.get_signless(min(bits, 32))
    words = max(bits // 32, 1)
    if words == 1:
        parts = [llvm.bitcast(word, value)]
    else:
        whole = llvm.bitcast(ir.VectorType.get((words,), word), value)
        parts = [llvm.extractelement(whole, i32(i)) for i in range(words)]
    vector = {16: "b16", 32: "b32", 64: "v2.b32", 128: "v4.b32"}[bits]
    register = "h" if bits == 16 else "r"
    names = ", ".join(f"${i + 2}" for i in range(words))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, stored, *parts],
        f"@$1 st.global.{vector} [$0], " + (names if words == 1 else "{" + names + "}") + ";",
        "l,b," + ",".join([register] * words) + ",~{memory}",
        has_side_effects=True,
    )
