"""Copies from registered host memory on one GPU: what the host waits for, and what hides behind compute.

    python -m benchmarks.kernels.transfers [--only WORD] [--out DIR]

A case copies so many slices of so many MB, as a step's swap-ins are copied layer by layer: alone, and each
before a piece of compute that needs it, some copies ahead, by the caller or by threads. Beside the time of
both stands that of the longer one alone. Lines go to DIR/kernels.jsonl, in the format of benchmarks/results/.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.common import DTYPE, Report, random_array
from host_cache.transfer import register_pinned
from host_cache.transfer.pinned_pool import touch, unregister_pinned

SLICES_MB = (10, 84, 335)
NUM_SLICES = 40
WAYS = ((0, 2), (0, 39), (1, 2), (1, 39), (2, 4), (2, 39))
"""Threads that issue copies, 0 for the caller's own; and how many copies go ahead of the compute."""
WIDTH = 4096
REPEATS = 3


class Copies:
    """Slices of one registered array, and compute that needs each."""

    def __init__(self, slice_mb: int, device: jax.Device, *, products: int, width: int = WIDTH) -> None:
        """Args:
        slice_mb: MB of a slice.
        device: where they go.
        products: matrix products of a piece of compute.
        width: of the square matrices.
        """
        self.device = device
        self.memory = np.empty((NUM_SLICES, slice_mb * 500_000), np.float16)
        touch(self.memory)
        register_pinned(self.memory, device)
        self.x = random_array(jax.random.key(0), (width, width))
        self.weights = random_array(jax.random.key(1), (width, width)) * width**-0.5

        def piece(x: jax.Array, weights: jax.Array, copied: jax.Array) -> jax.Array:
            for _ in range(products):
                x = x @ weights
            return x + copied[0].astype(DTYPE)

        self.piece = jax.jit(piece)

    def close(self) -> None:
        """Give the memory back."""
        unregister_pinned(self.memory, self.device)

    def put(self, number: int) -> jax.Array:
        """Start to copy a slice."""
        return jax.device_put(self.memory[number], self.device)

    def transfer(self) -> float:
        """Copy all slices; seconds until they were handed over."""
        begin = time.perf_counter()
        copied = [self.put(number) for number in range(NUM_SLICES)]
        handed_over = time.perf_counter() - begin
        jax.block_until_ready(copied)
        return handed_over

    def compute(self) -> float:
        """All pieces, of a slice that is there."""
        copied, x = jnp.zeros(self.memory[0].shape, self.memory.dtype), self.x
        begin = time.perf_counter()
        for _ in range(NUM_SLICES):
            x = self.piece(x, self.weights, copied)
        handed_over = time.perf_counter() - begin
        jax.block_until_ready(x)
        return handed_over

    def both(self, threads: int, ahead: int) -> float:
        """Each slice before its piece."""
        pool = ThreadPoolExecutor(threads) if threads else None
        begin, x = time.perf_counter(), self.x
        copies: list[jax.Array | Future[jax.Array] | None] = []
        for number in range(NUM_SLICES):
            while len(copies) <= min(number + ahead, NUM_SLICES - 1):
                put = partial(self.put, len(copies))
                copies.append(pool.submit(put) if pool else put())
            copied, copies[number] = copies[number], None
            x = self.piece(x, self.weights, copied.result() if isinstance(copied, Future) else copied)
        handed_over = time.perf_counter() - begin
        jax.block_until_ready(x)
        if pool is not None:
            pool.shutdown()
        return handed_over


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """Seconds of the fastest of some runs, and until its work was handed over."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        handed_over = run()
        times.append((time.perf_counter() - begin, handed_over))
    return min(times[1:])


def measure(slice_mb: int, report: Report, *, products: int | None = None, width: int = WIDTH) -> None:
    """One size of slices."""
    # Compute takes about a third of the copies' time at 50 GB/s and 600 TFLOP/s.
    found = max(1, round(slice_mb / 50e3 / 3 * 600e12 / (2 * width**3)))
    copies = Copies(slice_mb, jax.devices()[0], products=products or found, width=width)
    gigabytes = copies.memory.nbytes / 1e9
    alone_s, handed_over_s = timed(copies.transfer)
    case = f"transfer_{NUM_SLICES}x{slice_mb}mb"
    handed_over = round(handed_over_s * 1e3, 2)
    report.add(case, "bandwidth", gigabytes / alone_s, "GB/s", handed_over_ms=handed_over)
    compute_s, _ = timed(copies.compute)
    longer_s = max(alone_s, compute_s)
    for threads, ahead in WAYS:
        both_s, handed_over_s = timed(partial(copies.both, threads, ahead))
        report.add(
            f"{case}_beside_compute_{threads}threads_ahead{ahead}",
            "time",
            both_s * 1e3,
            "ms",
            longer_s * 1e3,
            longer_s / both_s,
            transfer_ms=round(alone_s * 1e3, 2),
            compute_ms=round(compute_s * 1e3, 2),
            handed_over_ms=round(handed_over_s * 1e3, 2),
        )
    copies.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, help="slices of so many MB alone")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="folder of the results")
    args = parser.parse_args()
    path = args.out if args.out == Path(os.devnull) else args.out / "kernels.jsonl"
    for slice_mb in SLICES_MB:
        if args.only in (None, slice_mb):
            measure(slice_mb, Report(path=path))


if __name__ == "__main__":
    main()
