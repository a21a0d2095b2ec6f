"""Writing KV and moving pages on one GPU: device time, against the copy rates of the same run.

    python -m benchmarks.kernels.moves [--only WORD] [--out DIR]

Each case runs on Triton and, as its peer, in XLA. Lines go to DIR/kernels.jsonl, in the format of
benchmarks/results/.
"""

import argparse
import functools
import os
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks.kernels.common import DTYPE, Report, launch_seconds, random_array
from pallas_kernels.kv_write import Rotary, rotate_and_write
from pallas_kernels.page_move import copy_pages, gather_pages
from pensieve_jax.bench.timing import measure_ceilings

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 40, 10, 128, 32  # Llama-2-13B with 10 KV heads
PAGE = (2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
PAGE_BYTES = 4 * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
NUM_PAGES = 4096
MOVED_PAGES = 640
KV_WRITES = {f"kv_write_{tokens}_h40kv10": tokens for tokens in (1, 64, 1024, 16384)}
PAGE_MOVES = ("gather_xla", "gather_triton", "scatter_xla", "scatter_triton", "from_host", "to_host")
REPEATS = 5
LAUNCHES, MOVES = 200, 6
"""Launches that one timed call makes."""


def stateful(function, state):
    """A call of the arguments alone: the donated state goes round."""

    def call(*args):
        nonlocal state
        out, state = function(state, *args)
        return out if out is not None else state

    return call


def time_kv_write(tokens: int, implementation: str) -> float:
    """Seconds of one pass: of many into one pool, over few arrays, so that dispatch costs little of each."""
    launches = LAUNCHES if tokens < 4096 else 4
    rng = np.random.default_rng(0)
    place = rng.permutation(NUM_PAGES * PAGE_SIZE)[:tokens].astype(np.int32)
    keys = jax.random.split(jax.random.key(0))
    qkv = random_array(keys[1], (tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM))
    angles = rng.uniform(0, 1000, (tokens, HEAD_DIM // 2)).astype(np.float32)
    rotary = Rotary(cos=jnp.cos(angles), sin=jnp.sin(angles))

    @functools.partial(jax.jit, donate_argnums=0)
    def many(pool, qkv, pages, slots, rotary):
        for _ in range(launches):
            q, pool = rotate_and_write(pool, qkv, pages, slots, rotary, implementation=implementation)
            # The next pass depends on this one, and on all that it gives.
            q, pool, qkv = jax.lax.optimization_barrier((q, pool, qkv))
        return q, pool

    call = stateful(many, random_array(keys[0], (NUM_PAGES, *PAGE)))
    where = [jnp.asarray(x) for x in (place // PAGE_SIZE, place % PAGE_SIZE)]
    return launch_seconds(call, launches, qkv, *where, rotary)


def time_move(name: str, device) -> float:
    """Seconds of one move of pages: of several in a row, each of other pages."""
    hbm, host = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    triton = functools.partial(copy_pages, implementation="triton")
    numbers = jnp.arange(MOVED_PAGES, dtype=jnp.int32)
    function, num_target, num_source = {
        "gather_xla": (lambda t, s, a, b: gather_pages(s, b), 1, NUM_PAGES),
        "gather_triton": (lambda t, s, a, b: triton(t, s, numbers, b), MOVED_PAGES, NUM_PAGES),
        "scatter_xla": (lambda t, s, a, b: t.at[a].set(s, mode="drop"), NUM_PAGES, MOVED_PAGES),
        "scatter_triton": (lambda t, s, a, b: triton(t, s, a, numbers), NUM_PAGES, MOVED_PAGES),
        "from_host": (triton, NUM_PAGES, NUM_PAGES),
        "to_host": (triton, NUM_PAGES, NUM_PAGES),
    }[name]
    places = [host if name == "to_host" else hbm, host if name == "from_host" else hbm]
    keys = jax.random.split(jax.random.key(1))
    target, source = (
        jax.device_put(random_array(key, (count, *PAGE)), place)
        for key, count, place in zip(keys, (num_target, num_source), places, strict=True)
    )
    rng = np.random.default_rng(1)
    ids = [
        [rng.permutation(NUM_PAGES)[:MOVED_PAGES].astype(np.int32) for _ in range(2)] for _ in range(MOVES)
    ]

    def many(target, source, ids):
        if name == "gather_xla":  # makes arrays of its own
            return [function(target, source, *pair) for pair in ids], target
        for pair in ids:
            target = function(target, source, *pair)
        return None, target

    jitted = jax.jit(many, donate_argnums=0, out_shardings=(hbm, places[0]))
    return launch_seconds(stateful(jitted, target), MOVES, source, jax.tree.map(jnp.asarray, ids))


def link_rate(device, to_host: bool) -> float:
    """Bytes a second of contiguous copies over the link, of as many bytes."""
    hbm, host = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    start, end = (hbm, host) if to_host else (host, hbm)
    x = jax.device_put(jnp.ones((MOVED_PAGES, *PAGE), DTYPE), start)
    jax.block_until_ready([jax.device_put(x, end) for _ in range(16)])  # the arena of pinned memory grows
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready([jax.device_put(x, end) for _ in range(8)])
        times.append(time.perf_counter() - begin)
    return 8 * MOVED_PAGES * PAGE_BYTES / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains one of these, by comma")
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the results")
    args = parser.parse_args()
    device = jax.devices()[0]
    report = Report(path=Path(args.out) / "kernels.jsonl")
    copy = measure_ceilings(device).copy_bytes_per_s / 1e9

    def chosen(name: str) -> bool:
        return any(word in name for word in args.only.split(","))

    sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    for name, tokens in filter(lambda case: chosen(case[0]), KV_WRITES.items()):
        seconds, peer = (time_kv_write(tokens, implementation) for implementation in ("triton", "xla"))
        more = {"tokens": tokens, "xla_us": round(peer * 1e6, 2), **sizes}
        if tokens < 1024:
            report.add(name, "time", seconds * 1e6, "us", peer * 1e6, peer / seconds, **more)
        else:
            moved = tokens * HEAD_DIM * (4 * (NUM_HEADS + 2 * NUM_KV_HEADS) + 4) / seconds / 1e9
            more["device_us"] = round(seconds * 1e6, 2)
            report.add(name, "bandwidth", moved, "GB/s", copy, moved / copy, **more)
    sizes = {"pages": MOVED_PAGES, "page_bytes": PAGE_BYTES, "dtype": "bfloat16"}
    for name in filter(lambda name: chosen(f"page_move_{name}"), PAGE_MOVES):
        seconds = time_move(name, device)
        over_link = "host" in name
        rate = (1 if over_link else 2) * MOVED_PAGES * PAGE_BYTES / seconds / 1e9
        ceiling = link_rate(device, name == "to_host") / 1e9 if over_link else copy
        report.add(f"page_move_{name}", "bandwidth", rate, "GB/s", ceiling, rate / ceiling, **sizes)


if __name__ == "__main__":
    main()
