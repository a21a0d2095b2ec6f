"""Multi-token paged attention on one GPU: device time of the named shapes, against ceilings of the same run.

    python -m benchmarks.kernels.attention [--only WORD] [--implementation NAME] [--out DIR]

Times are back to back: one jitted call makes many launches over different inputs, together larger than the
cache. Each shape is first compared with a float32 reference on the device. Lines go to DIR/kernels.jsonl,
in the format of benchmarks/results/.
"""

import argparse
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.common import DTYPE, NO_LOCK, Report, alone, launch_seconds, random_array
from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention, tile_tokens
from pallas_kernels.multi_token_attention.shapes import DECODE, MIXED, PAPER, PREFILL, SHAPES, Shape
from pensieve_jax.bench.timing import Ceilings, measure_ceilings

DISTINCT_BYTES = 400e6
"""KV of all inputs together, at least: several times the L2 cache (60 MB)."""
TARGET_S, MAX_LAUNCHES = 0.004, 40
"""Device time of one timed call, about, and its most launches."""
MAX_ERROR = 1e-2


def make_pages(shape: Shape, rng: np.random.Generator) -> tuple[list[np.ndarray], int]:
    """Pages of each row, permuted; those of two rows of one request overlap. And the number of pages."""
    counts = [-(-kv // shape.page_size) for _, kv in shape.rows]
    if shape.shared_pages:
        own = counts[1::2]
        starts = np.cumsum(own) - own
        order = rng.permutation(sum(own)).astype(np.int32)
        rows = []
        for i, (start, count) in enumerate(zip(starts, own, strict=True)):
            whole = order[start : start + count]
            rows += [whole[: counts[2 * i]], whole]
        return rows, sum(own)
    order = rng.permutation(sum(counts)).astype(np.int32)
    return np.split(order, np.cumsum(counts)[:-1]), sum(counts)


def padded_tokens(shape: Shape) -> int:
    return -(-shape.num_tokens // 8) * 8


def make_plan(shape: Shape, pages: list[np.ndarray], **options):
    return jax.tree.map(
        jnp.asarray,
        plan_attention(
            q_lens=[q for q, _ in shape.rows],
            kv_lens=[kv for _, kv in shape.rows],
            pages=pages,
            max_rows=len(shape.rows),
            max_pages=max(len(p) for p in pages),
            max_tokens=padded_tokens(shape),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_q=tile_tokens(shape.num_heads // shape.num_kv_heads),
            **options,
        ),
    )


@functools.partial(jax.jit, static_argnames=("kv_len",), compiler_options={"xla_gpu_autotune_level": "0"})
def reference_row(q, kv_pages, pages, *, kv_len: int):
    """Float32 attention of one row: q [n, heads, head_dim] at the end of its kv_len tokens."""
    n, num_heads, head_dim = q.shape
    _, _, num_kv_heads, _, _ = kv_pages.shape
    kv = kv_pages[pages].astype(jnp.float32).transpose(1, 2, 0, 3, 4)
    k, v = kv.reshape(2, num_kv_heads, -1, head_dim)[:, :, :kv_len]
    chunk = math.gcd(n, 256)
    q = q.astype(jnp.float32).reshape(n // chunk, chunk, num_kv_heads, -1, head_dim)

    def part(args):
        i, some = args
        scores = jnp.einsum("qhgd,hkd->hgqk", some, k, precision="highest") * head_dim**-0.5
        position = kv_len - n + i * chunk + jnp.arange(chunk)
        scores = jnp.where(jnp.arange(kv_len) <= position[:, None], scores, -jnp.inf)
        return jnp.einsum("hgqk,hkd->qhgd", jax.nn.softmax(scores, axis=-1), v, precision="highest")

    return lax.map(part, (jnp.arange(n // chunk), q)).reshape(n, num_heads, head_dim)


def compile_references(shape: Shape, pool_shape: tuple[int, ...]) -> dict[tuple[int, int], Callable]:
    """`reference_row` for each kind of row."""
    compiled = {}
    for n, kv_len in set(shape.rows):
        q = jax.ShapeDtypeStruct((n, shape.num_heads, shape.head_dim), DTYPE)
        pages = jax.ShapeDtypeStruct((-(-kv_len // shape.page_size),), jnp.int32)
        pool = jax.ShapeDtypeStruct(pool_shape, DTYPE)
        compiled[n, kv_len] = reference_row.lower(q, pool, pages, kv_len=kv_len).compile()
    return compiled


def relative_error(kernel: "Kernel", out, q, kv_pages) -> float:
    """Of a sample of rows: the first and the last of each kind. NaN stays NaN."""
    rows = kernel.shape.rows
    starts = np.cumsum([0] + [n for n, _ in rows])
    kinds, backwards = set(rows), rows[::-1]
    chosen = {rows.index(k) for k in kinds} | {len(backwards) - 1 - backwards.index(k) for k in kinds}
    wrong = right = 0.0
    for i in sorted(chosen):
        n, at = rows[i][0], starts[i]
        want = kernel.references[rows[i]](q[at : at + n], kv_pages, jnp.asarray(kernel.pages[i]))
        wrong += float(jnp.sum((out[at : at + n].astype(jnp.float32) - want) ** 2))
        right += float(jnp.sum(want**2))
    return math.sqrt(wrong / right)


def launches_for(shape: Shape) -> int:
    guess_s = max(shape.kv_bytes / 4e12, shape.flops / 5e14, 10e-6)
    return max(2, min(math.ceil(TARGET_S / guess_s), MAX_LAUNCHES))


def num_sets(shape: Shape) -> int:
    return max(2, math.ceil(DISTINCT_BYTES / shape.kv_bytes))


attend = jax.jit(multi_token_attention, static_argnames="implementation")


def compiled(function: Callable, *args) -> Callable:
    """`function`, for arguments of these shapes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    return jax.jit(function).lower(*shapes).compile()


class Kernel:
    """The kernel for one shape, compiled: many launches over different queries and pools."""

    def __init__(self, shape: Shape, seed: int, implementation: str, **options) -> None:
        self.attend = functools.partial(attend, implementation=implementation)
        self.shape, self.launches = shape, launches_for(shape)
        self.pages, num_pages = make_pages(shape, np.random.default_rng(seed))
        self.plan = make_plan(shape, self.pages, **options)
        self.references = {}
        sets = num_sets(shape)

        def many(queries, pools, plan):
            return [self.attend(q, pools[i % sets], plan) for i, q in enumerate(queries)]

        pool = (num_pages, 2, shape.num_kv_heads, shape.page_size, shape.head_dim)
        q = jax.ShapeDtypeStruct((padded_tokens(shape), shape.num_heads, shape.head_dim), DTYPE)
        self.queries = [q] * self.launches
        self.pools = [jax.ShapeDtypeStruct(pool, DTYPE)] * sets
        self.many = compiled(many, self.queries, self.pools, self.plan)

    def inputs(self, key):
        arrays = self.queries + self.pools
        keys = jax.random.split(key, len(arrays))
        made = [random_array(k, x.shape) for k, x in zip(keys, arrays, strict=True)]
        return made[: self.launches], made[self.launches :]

    def seconds(self, queries, pools) -> float:
        return launch_seconds(self.many, self.launches, queries, pools, self.plan)


class Cudnn:
    """cuDNN over contiguous KV of the same sizes; all rows are alike."""

    def __init__(self, kernel: Kernel) -> None:
        shape = kernel.shape
        (n, kv_len), batch = shape.rows[0], len(shape.rows)
        # Causal only where rows have no past: elsewhere the mask changes little, and its is of another kind.
        cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=n == kv_len, implementation="cudnn")
        kv = jax.ShapeDtypeStruct((batch, kv_len, shape.num_kv_heads, shape.head_dim), DTYPE)
        q = jax.ShapeDtypeStruct((batch, n, shape.num_heads, shape.head_dim), DTYPE)
        self.shapes = [q] * kernel.launches, [kv] * len(kernel.pools), [kv] * len(kernel.pools)

        def many(qs, ks, vs):
            return [cudnn(q, ks[i % len(ks)], vs[i % len(ks)]) for i, q in enumerate(qs)]

        self.many = compiled(many, *self.shapes)

    def seconds(self, key) -> float:
        keys = iter(jax.random.split(key, sum(map(len, self.shapes))))
        inputs = [[random_array(next(keys), x.shape) for x in arrays] for arrays in self.shapes]
        return launch_seconds(self.many, len(inputs[0]), *inputs)


class CopyOut:
    """The paper's CopyOut: pages gathered to contiguous memory, then cuDNN; all rows are alike."""

    def __init__(self, kernel: Kernel) -> None:
        shape = kernel.shape
        (n, kv_len), batch = shape.rows[0], len(shape.rows)
        cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        self.table = jnp.asarray(np.stack(kernel.pages))

        def many(queries, pools, table):
            out = []
            for i, q in enumerate(queries):
                # The compiler would gather a pool once for all queries.
                table = lax.optimization_barrier((table, out[-1:]))[0]
                kv = pools[i % len(pools)][table].transpose(2, 0, 1, 4, 3, 5)
                k, v = kv.reshape(2, batch, -1, shape.num_kv_heads, shape.head_dim)[:, :, :kv_len]
                out.append(cudnn(q[: batch * n].reshape(batch, n, shape.num_heads, shape.head_dim), k, v))
            return out

        self.many = compiled(many, kernel.queries, kernel.pools, self.table)

    def seconds(self, queries, pools) -> float:
        return launch_seconds(self.many, len(queries), queries, pools, self.table)


class MultiRound:
    """The paper's multi-round: one launch of the kernel for each query token, as for decoding."""

    def __init__(self, kernel: Kernel) -> None:
        shape = kernel.shape
        n, batch = shape.rows[0][0], len(shape.rows)
        self.rounds = [
            make_plan(replace(shape, rows=tuple((1, kv - n + i + 1) for _, kv in shape.rows)), kernel.pages)
            for i in range(n)
        ]

        def many(queries, pools, rounds):
            out = []
            for i, q in enumerate(queries):
                by_round = q[: batch * n].reshape(batch, n, *q.shape[1:]).swapaxes(0, 1)
                pool = pools[i % len(pools)]
                out.append(jnp.stack([kernel.attend(by_round[j], pool, r) for j, r in enumerate(rounds)]))
            return out

        self.many = compiled(many, kernel.queries, kernel.pools, self.rounds)

    def seconds(self, queries, pools) -> float:
        return launch_seconds(self.many, len(queries), queries, pools, self.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured of one shape, compiled."""

    kernel: Kernel
    groups: list[Kernel]
    """What a mixed batch is compared with (`groups_of`)."""
    cudnn: Cudnn | None
    rivals: dict[str, CopyOut | MultiRound]
    """The paper's, for its shapes, by name."""


def compile_case(name: str, implementation: str, *, cudnn: bool, **options) -> Case:
    shape = (SHAPES | PAPER)[name]
    kernel = Kernel(shape, 0, implementation, **options)
    kernel.references |= compile_references(shape, kernel.pools[0].shape)
    groups = [Kernel(s, 1 + i, implementation, **options) for i, s in enumerate(groups_of(name, shape))]
    rivals = {"copy_out_us": CopyOut(kernel), "multi_round_us": MultiRound(kernel)} if name in PAPER else {}
    peer = Cudnn(kernel) if cudnn and name in PREFILL else None
    return Case(kernel=kernel, groups=groups, cudnn=peer, rivals=rivals)


def describe(shape: Shape, error: float, **more) -> dict:
    return {
        "rows": len(shape.rows),
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.page_size,
        "dtype": "bfloat16",
        "relative_error": float(f"{error:.2e}"),
        **more,
    }


def groups_of(name: str, shape: Shape) -> list[Shape]:
    """What a mixed batch is compared with: its kinds of rows apart; gaps with rows that share no pages."""
    if name not in MIXED:
        return []
    if shape.shared_pages:
        return [replace(shape, shared_pages=False)]
    first = shape.rows[0]
    kinds = [tuple(row for row in shape.rows if (row == first) == same) for same in (True, False)]
    return [replace(shape, rows=rows) for rows in kinds]


def run_case(name: str, case: Case, rates: Ceilings, report: Report) -> None:
    kernel, shape, key = case.kernel, case.kernel.shape, jax.random.key(len(name))
    queries, pools = kernel.inputs(key)
    out = kernel.many(queries, pools, kernel.plan)[0]
    error = relative_error(kernel, out, queries[0], pools[0])
    same = bool(jnp.array_equal(out, kernel.many(queries, pools, kernel.plan)[0]))
    if not error < MAX_ERROR or not same:
        print(f"{name}: relative error {error}, same again: {same}", flush=True)
    del out
    seconds = kernel.seconds(queries, pools)
    micros, tflops = seconds * 1e6, shape.flops / seconds / 1e12
    more = {"device_us": round(micros, 2)}
    if name in DECODE:
        gb, copy = shape.kv_bytes / seconds / 1e9, rates.copy_bytes_per_s / 1e9
        report.add(name, "kv_bandwidth", gb, "GB/s", copy, gb / copy, **describe(shape, error, **more))
    elif case.rivals:
        others = {what: round(r.seconds(queries, pools) * 1e6, 2) for what, r in case.rivals.items()}
        best = min(others.values())
        report.add(name, "time", micros, "us", best, best / micros, **describe(shape, error, **others))
    elif case.groups:
        del queries, pools
        apart = sum(group.seconds(*group.inputs(key)) for group in case.groups)
        other = "without_gap_us" if shape.shared_pages else "apart_us"
        more |= {other: round(apart * 1e6, 2), "tflops": round(tflops, 1)}
        report.add(name, "time", micros, "us", apart * 1e6, apart / seconds, **describe(shape, error, **more))
    else:
        ceiling = rates.matmul_flops / 1e12
        more["of_matmul"] = round(tflops / ceiling, 4)
        if case.cudnn is not None:
            peer = case.cudnn.seconds(key)
            more["cudnn_contiguous_us"] = round(peer * 1e6, 2)
            ceiling = shape.flops / peer / 1e12
        report.add(
            name, "rate", tflops, "TFLOP/s", ceiling, tflops / ceiling, **describe(shape, error, **more)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains one of these, by comma")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the results")
    parser.add_argument("--implementation", default="mosaic", help="one but this stands before case names")
    parser.add_argument("--batch-invariant", action="store_true", help="rows cut as they alone want it")
    parser.add_argument("--no-cudnn", action="store_true", help="leave the peer out")
    parser.add_argument("--lock", type=Path, default=NO_LOCK, help="one process at a time measures under it")
    args = parser.parse_args()
    prefix = "" if args.implementation == "mosaic" else f"{args.implementation}_"
    prefix += "batch_invariant_" if args.batch_invariant else ""
    report = Report(path=Path(args.out) / "kernels.jsonl", prefix=prefix)
    names = [name for name in SHAPES | PAPER if any(word in name for word in args.only.split(","))]
    options = {"cudnn": not args.no_cudnn, "batch_invariant": args.batch_invariant}
    start = time.perf_counter()
    with ThreadPoolExecutor(15) as pool:
        cases = {name: pool.submit(compile_case, name, args.implementation, **options) for name in names}
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    with alone(args.lock):
        measure(cases, report)


def measure(cases: Mapping[str, Future[Case]], report: Report) -> None:
    rates = measure_ceilings(jax.devices()[0])
    report.add("ceiling_copy", "bandwidth", rates.copy_bytes_per_s / 1e9, "GB/s")
    report.add("ceiling_matmul", "rate", rates.matmul_flops / 1e12, "TFLOP/s")
    for name, case in cases.items():
        try:
            run_case(name, case.result(), rates, report)
        except Exception as error:  # noqa: BLE001 one case must not cost the others
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)


if __name__ == "__main__":
    main()
