"""What the kernels' benchmarks share: random inputs, the time of a launch, and results as they come."""

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pensieve_jax.bench.timing import seconds_each
from pensieve_jax.records import gpu, record, replace_records

DTYPE = jnp.bfloat16
NO_LOCK = Path(os.devnull)


@functools.partial(jax.jit, static_argnums=(1,))
def random_array(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Normally distributed."""
    return jax.random.normal(key, shape, DTYPE)


def launch_seconds(many: Callable[..., Any], launches: int, *args: Any) -> float:
    """Device time of one of the launches that a call of `many` makes."""
    return seconds_each(functools.partial(many, *args), wait=jax.block_until_ready) / launches


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process that names the same file is in here: several compile, one measures."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of kernels, printed and written as they come.

    Attributes:
        path: the file; a line takes the place of an earlier one of its case.
        prefix: before the names of the cases there.
        machine: name and driver of the GPU; None where there is none.
    """

    path: Path
    prefix: str = ""
    machine: tuple[str | None, str | None] = field(default_factory=lambda: gpu() or (None, None))

    def add(
        self,
        case: str,
        metric: str,
        value: float,
        unit: str,
        ceiling: float | None = None,
        ratio: float | None = None,
        **shapes: Any,
    ) -> None:
        """Keep one; see `record`."""
        device, driver = self.machine
        line = record(
            bench="kernels",
            case=self.prefix + case,
            metric=metric,
            value=round(value, 3),
            unit=unit,
            ceiling=None if ceiling is None else round(ceiling, 3),
            ratio=None if ratio is None else round(ratio, 4),
            device=device,
            driver=driver,
            packages=("jax", "jaxlib"),
            shapes=shapes,
        )
        replace_records(self.path, [line])
        against = "" if ceiling is None else f"ceiling {ceiling:8.1f} ratio {ratio:.3f}"
        print(f"{case:40s} {value:10.1f} {unit:9s} {against} {shapes.get('relative_error', '')}", flush=True)
