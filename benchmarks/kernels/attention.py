"""Multi-token paged attention on one GPU: device time of the named shapes, against ceilings of the same run.

    python -m benchmarks.kernels.attention [--only WORD] [--implementation NAME] [--out DIR]

Times are back to back: one jitted call makes many launches over different inputs, together larger than the
cache. Each shape is first compared with a float32 reference on the device. Lines go to DIR/kernels.jsonl,
in the format of benchmarks/results/.
"""

import argparse
import fcntl
import functools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.common import DTYPE, Report, launch_seconds, random_array
from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention, tile_tokens
from pallas_kernels.multi_token_attention.shapes import DECODE, MIXED, PAPER, SHAPES, Shape
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


def relative_error(shape: Shape, out, q, kv_pages, pages: list[np.ndarray]) -> float:
    """Of a sample of rows: the first and the last of each kind. NaN stays NaN."""
    starts = np.cumsum([0] + [n for n, _ in shape.rows])
    kinds, backwards = set(shape.rows), shape.rows[::-1]
    chosen = {shape.rows.index(k) for k in kinds} | {len(backwards) - 1 - backwards.index(k) for k in kinds}
    wrong = right = 0.0
    for i in sorted(chosen):
        (n, kv_len), at = shape.rows[i], starts[i]
        want = reference_row(q[at : at + n], kv_pages, jnp.asarray(pages[i]), kv_len=kv_len)
        wrong += float(jnp.sum((out[at : at + n].astype(jnp.float32) - want) ** 2))
        right += float(jnp.sum(want**2))
    return math.sqrt(wrong / right)


def launches_for(shape: Shape) -> int:
    guess_s = max(shape.kv_bytes / 4e12, shape.flops / 5e14, 10e-6)
    return max(2, min(math.ceil(TARGET_S / guess_s), MAX_LAUNCHES))


def num_sets(shape: Shape) -> int:
    return max(2, math.ceil(DISTINCT_BYTES / shape.kv_bytes))


attend = jax.jit(multi_token_attention, static_argnames="implementation")


class Kernel:
    """The kernel for one shape, compiled: many launches over different queries and pools."""

    def __init__(self, shape: Shape, seed: int, implementation: str) -> None:
        self.attend = functools.partial(attend, implementation=implementation)
        self.shape, self.launches = shape, launches_for(shape)
        self.pages, self.num_pages = make_pages(shape, np.random.default_rng(seed))
        self.plan = make_plan(shape, self.pages)
        sets = num_sets(shape)

        def many(queries, pools, plan):
            return [self.attend(q, pools[i % sets], plan) for i, q in enumerate(queries)]

        q = jax.ShapeDtypeStruct((padded_tokens(shape), shape.num_heads, shape.head_dim), DTYPE)
        pool = jax.ShapeDtypeStruct(self.pool_shape, DTYPE)
        self.many = jax.jit(many).lower([q] * self.launches, [pool] * sets, self.plan).compile()

    @property
    def pool_shape(self) -> tuple[int, ...]:
        shape = self.shape
        return (self.num_pages, 2, shape.num_kv_heads, shape.page_size, shape.head_dim)

    def inputs(self, key):
        shape, sets = self.shape, num_sets(self.shape)
        keys = jax.random.split(key, sets + self.launches)
        size = (padded_tokens(shape), shape.num_heads, shape.head_dim)
        return [random_array(k, size) for k in keys[sets:]], [
            random_array(k, self.pool_shape) for k in keys[:sets]
        ]

    def seconds(self, queries, pools) -> float:
        return launch_seconds(self.many, self.launches, queries, pools, self.plan)


def time_cudnn(shape: Shape, key) -> float:
    """cuDNN over contiguous KV of the same sizes; all rows are alike."""
    (n, kv_len), batch = shape.rows[0], len(shape.rows)
    sets, launches = num_sets(shape), launches_for(shape)
    keys = jax.random.split(key, 3 * max(sets, launches))
    kv = (batch, kv_len, shape.num_kv_heads, shape.head_dim)
    ks = [random_array(keys[3 * i], kv) for i in range(sets)]
    vs = [random_array(keys[3 * i + 1], kv) for i in range(sets)]
    qs = [random_array(keys[3 * i + 2], (batch, n, shape.num_heads, shape.head_dim)) for i in range(launches)]
    # Causal only where rows have no past: elsewhere the mask changes little, and cuDNN's is of another kind.
    cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=n == kv_len, implementation="cudnn")

    @jax.jit
    def many(qs, ks, vs):
        return [cudnn(q, ks[i % sets], vs[i % sets]) for i, q in enumerate(qs)]

    return launch_seconds(many, launches, qs, ks, vs)


def time_copy_out(shape: Shape, kernel: "Kernel", queries, pools) -> float:
    """The paper's CopyOut: pages gathered to contiguous memory, then cuDNN; all rows are alike."""
    (n, kv_len), batch = shape.rows[0], len(shape.rows)
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    @jax.jit
    def many(queries, pools, table):
        out = []
        for i, q in enumerate(queries):
            # The compiler would gather a pool once for all queries.
            table = lax.optimization_barrier((table, out[-1:]))[0]
            kv = pools[i % len(pools)][table].transpose(2, 0, 1, 4, 3, 5)
            k, v = kv.reshape(2, batch, -1, shape.num_kv_heads, shape.head_dim)[:, :, :kv_len]
            out.append(cudnn(q[: batch * n].reshape(batch, n, shape.num_heads, shape.head_dim), k, v))
        return out

    table = jnp.asarray(np.stack(kernel.pages))
    return launch_seconds(many, len(queries), queries, pools, table)


def time_multi_round(shape: Shape, kernel: "Kernel", queries, pools) -> float:
    """The paper's multi-round: one launch of the kernel for each query token, as for decoding."""
    n, batch = shape.rows[0][0], len(shape.rows)
    rounds = [
        make_plan(
            Shape(
                rows=tuple((1, kv - n + i + 1) for _, kv in shape.rows),
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
            ),
            kernel.pages,
        )
        for i in range(n)
    ]

    @jax.jit
    def many(queries, pools, rounds):
        out = []
        for i, q in enumerate(queries):
            by_round = q[: batch * n].reshape(batch, n, *q.shape[1:]).swapaxes(0, 1)
            out.append(
                jnp.stack(
                    [kernel.attend(by_round[j], pools[i % len(pools)], plan) for j, plan in enumerate(rounds)]
                )
            )
        return out

    return launch_seconds(many, len(queries), queries, pools, rounds)


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
    """The batches that a mixed one is compared with: its kinds of rows apart, no pages shared."""
    if name not in MIXED:
        return []
    first = shape.rows[0]
    kinds = [tuple(row for row in shape.rows if (row == first) == same) for same in (True, False)]
    return [Shape(rows=rows, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads) for rows in kinds]


def run_case(
    name: str, kernel: Kernel, groups: list[Kernel], rates: Ceilings, report: Report, cudnn: bool
) -> None:
    shape, key = kernel.shape, jax.random.key(len(name))
    queries, pools = kernel.inputs(key)
    out = kernel.many(queries, pools, kernel.plan)[0]
    error = relative_error(shape, out, queries[0], pools[0], kernel.pages)
    same = bool(jnp.array_equal(out, kernel.many(queries, pools, kernel.plan)[0]))
    if not error < MAX_ERROR or not same:
        print(f"{name}: relative error {error}, same again: {same}", flush=True)
    del out
    seconds = kernel.seconds(queries, pools)
    more = {"device_us": round(seconds * 1e6, 2)}
    tflops = shape.flops / seconds / 1e12
    if name in DECODE:
        gb, copy = shape.kv_bytes / seconds / 1e9, rates.copy_bytes_per_s / 1e9
        report.add(name, "kv_bandwidth", gb, "GB/s", copy, gb / copy, **describe(shape, error, **more))
    elif name in PAPER:
        others = {
            "copy_out_us": round(time_copy_out(shape, kernel, queries, pools) * 1e6, 2),
            "multi_round_us": round(time_multi_round(shape, kernel, queries, pools) * 1e6, 2),
        }
        micros, best = seconds * 1e6, min(others.values())
        report.add(name, "time", micros, "us", best, best / micros, **describe(shape, error, **others))
    elif groups:
        del queries, pools
        apart = sum(group.seconds(*group.inputs(key)) for group in groups)
        more |= {"apart_us": round(apart * 1e6, 2), "tflops": round(tflops, 1)}
        micros = seconds * 1e6
        report.add(name, "time", micros, "us", apart * 1e6, apart / seconds, **describe(shape, error, **more))
    else:
        ceiling = rates.matmul_flops / 1e12
        more["of_matmul"] = round(tflops / ceiling, 4)
        if cudnn:
            peer = time_cudnn(shape, key)
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
    parser.add_argument("--no-cudnn", action="store_true", help="leave the peer out")
    parser.add_argument("--lock", default=os.devnull, help="a file that one process at a time measures under")
    args = parser.parse_args()
    prefix = "" if args.implementation == "mosaic" else f"{args.implementation}_"
    report = Report(path=Path(args.out) / "kernels.jsonl", prefix=prefix)
    shapes = SHAPES | PAPER
    names = [name for name in shapes if any(word in name for word in args.only.split(","))]
    start = time.perf_counter()
    with ThreadPoolExecutor(15) as pool:
        compiled = {
            name: [
                pool.submit(Kernel, shape, seed, args.implementation)
                for seed, shape in enumerate([shapes[name], *groups_of(name, shapes[name])])
            ]
            for name in names
        }
        for futures in compiled.values():
            for future in futures:
                future.exception()
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    with Path(args.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        measure(names, compiled, report, cudnn=not args.no_cudnn)


def measure(names: list[str], compiled: dict, report: Report, *, cudnn: bool) -> None:
    rates = measure_ceilings(jax.devices()[0])
    report.add("ceiling_copy", "bandwidth", rates.copy_bytes_per_s / 1e9, "GB/s")
    report.add("ceiling_matmul", "rate", rates.matmul_flops / 1e12, "TFLOP/s")
    for name in names:
        try:
            kernel, *groups = [future.result() for future in compiled[name]]
            run_case(name, kernel, groups, rates, report, cudnn)
        except Exception as error:  # noqa: BLE001 one case must not cost the others
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)


if __name__ == "__main__":
    main()
