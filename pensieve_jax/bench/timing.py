"""Timing calls that run on the device, and the rates that this device reaches at best."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

COPY_BYTES = 2 << 30
"""Bytes of the arrays that are copied: many times the caches of a GPU."""
MATMUL_SIZE = 8192


def seconds_each(
    run: Callable[[], Any], *, repeats: int = 5, few: int = 2, many: int = 8, wait: Callable[[Any], Any]
) -> float:
    """Time of one of several calls in a row, whose device work queues up: the median.

    It comes from the difference between `few` and `many` calls, which leaves out what the first call's
    dispatch and the last one's answer cost.

    Args:
        run: starts the work and returns something to wait for.
        repeats: how often both are measured.
        few: calls in a row.
        many: calls in a row; more than `few`.
        wait: waits for what `run` returned.
    """
    wait(run())

    def median_s(calls: int) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            out = None
            for _ in range(calls):
                out = run()
            wait(out)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return one_more_s(few, median_s(few), many, median_s(many))


def one_more_s(few: int, few_s: float, many: int, many_s: float) -> float:
    """Time of one more of several in a row, by the times of `few` and of `many`."""
    if many_s <= few_s:  # work so short that only noise is left
        return many_s / many
    return (many_s - few_s) / (many - few)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What one device reaches now.

    Attributes:
        copy_bytes_per_s: a copy within device memory; bytes read and written count.
        matmul_flops: a large bfloat16 product of random matrices, operations a second.
    """

    copy_bytes_per_s: float
    matmul_flops: float


def measure_ceilings(device: Any, *, scale: int = 1) -> Ceilings:
    """Measure them; `scale` divides the sizes."""
    wait = jax.block_until_ready
    random = jax.jit(partial(jax.random.normal, dtype=jnp.bfloat16), static_argnames="shape")
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0), 4)
        elements = COPY_BYTES // scale // 4
        arrays = [random(key, shape=(elements,)) for key in keys[:2]]
        copies = (
            jax.jit(lambda arrays: [lax.optimization_barrier(a) + jnp.bfloat16(0) for a in arrays]),
            lambda arrays: [jnp.copy(a) for a in arrays],
        )
        copy_s = min(seconds_each(partial(copy, arrays), wait=wait) for copy in copies)
        del arrays
        n = max(64, MATMUL_SIZE // scale)
        a, b = (random(key, shape=(n, n)) for key in keys[2:])
        factors = [a * (1 + i / 64) for i in range(8)]
        product = jax.jit(lambda factors, b: [x @ b for x in factors])
        matmul_s = seconds_each(partial(product, factors, b), wait=wait) / len(factors)
    return Ceilings(copy_bytes_per_s=2 * 2 * 2 * elements / copy_s, matmul_flops=2 * n**3 / matmul_s)
