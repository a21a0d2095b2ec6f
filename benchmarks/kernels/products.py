"""Products of a decode step on one GPU: the kernel and XLA beside the copy rate of the same run.

    python -m benchmarks.kernels.products [--only WORDS] [--tokens 8,64] [--tilings] [--out FILE]

Times are back to back: one jitted call makes many launches over different weights, together larger than the
cache. Everything is compiled first, in parallel. With --tilings every tiling that fits is timed, not only the
one that the kernel chooses.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.skinny_matmul.api import run_mosaic
from pallas_kernels.skinny_matmul.epilogue import Epilogue
from pallas_kernels.skinny_matmul.tiling import Tiling, candidates, plan_tiling
from pallas_kernels.skinny_matmul.xla import skinny_matmul_xla
from pensieve_jax.bench.timing import measure_ceilings, seconds_each
from pensieve_jax.records import gpu, record, replace_records

DTYPE = jnp.bfloat16
DISTINCT_BYTES = 500e6
"""Weights of all launches of a call together, at least: several times the L2 cache (60 MB)."""
MAX_ERROR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product of a layer."""

    sizes: tuple[int, ...]
    contracted: int
    epilogue: Epilogue
    out_dtype: type = DTYPE

    @property
    def weight_bytes(self) -> int:
        return 2 * sum(self.sizes) * self.contracted


ADD = Epilogue(adds=True)
PRODUCTS = {
    # Llama-2-13B with 10 KV heads
    "llama_qkv": Product(sizes=(5120, 1280, 1280), contracted=5120, epilogue=Epilogue()),
    "llama_o": Product(sizes=(5120,), contracted=5120, epilogue=ADD),
    "llama_gate_up": Product(
        sizes=(13824, 13824), contracted=5120, epilogue=Epilogue(activation=jax.nn.silu, gated=True)
    ),
    "llama_down": Product(sizes=(5120,), contracted=13824, epilogue=ADD),
    "llama_head": Product(sizes=(32000,), contracted=5120, epilogue=Epilogue(), out_dtype=jnp.float32),
    # OPT-13B
    "opt_qkv": Product(sizes=(5120,) * 3, contracted=5120, epilogue=Epilogue(biased=True)),
    "opt_o": Product(sizes=(5120,), contracted=5120, epilogue=Epilogue(biased=True, adds=True)),
    "opt_fc1": Product(
        sizes=(20480,), contracted=5120, epilogue=Epilogue(biased=True, activation=jax.nn.relu)
    ),
    "opt_fc2": Product(sizes=(5120,), contracted=20480, epilogue=Epilogue(biased=True, adds=True)),
}


def limits_of(product: Product, tokens: int) -> dict[str, Any]:
    """Arguments of `plan_tiling`."""
    return {
        "tokens": tokens,
        "sizes": product.sizes,
        "contracted": product.contracted,
        "together": product.epilogue.together,
        "out_bytes": jnp.dtype(product.out_dtype).itemsize,
        "adds": product.epilogue.adds,
    }


def ways(product: Product, tokens: int, every: bool) -> dict[str, Tiling | None]:
    """What is timed: XLA (None), the tiling that is chosen, and on demand all that fit."""
    limits = limits_of(product, tokens)
    found: dict[str, Tiling | None] = {"xla": None}
    if (chosen := plan_tiling(**limits)) is not None:
        found["chosen"] = chosen
    if every:
        some = [tiling for tiling in candidates(**limits) if tiling.num_tiles * tiling.splits >= 60]
        found |= {f"{t.features}x{t.splits}x{t.shares}": t for t in some if t != chosen}
    return found


def arguments(product: Product, tokens: int, make: Callable) -> tuple:
    """Inputs of one call, from `make(shape)`: activations, weights of each launch, biases, what is added."""
    sets = max(2, math.ceil(DISTINCT_BYTES / product.weight_bytes))
    weights = [[make((n, product.contracted)) for n in product.sizes] for _ in range(sets)]
    biases = [make((n,)) for n in product.sizes] if product.epilogue.biased else []
    add = make((tokens, product.sizes[0])) if product.epilogue.adds else None
    return make((tokens, product.contracted)), weights, biases, add


def compile_many(product: Product, tokens: int, tiling: Tiling | None) -> Callable:
    """One call with a launch for each set of weights."""
    if tiling is None:
        run = partial(skinny_matmul_xla, epilogue=product.epilogue, out_dtype=product.out_dtype)
    else:
        options = {"tiling": tiling, "epilogue": product.epilogue, "out_dtype": product.out_dtype}
        run = partial(run_mosaic, overlap=True, **options)

    def many(x, weights, biases, add):
        return [run(x, tuple(some), tuple(biases), add) for some in weights]

    shapes = arguments(product, tokens, lambda shape: jax.ShapeDtypeStruct(shape, DTYPE))
    return jax.jit(many).lower(*shapes).compile()


def measure(product: Product, tokens: int, compiled: dict[str, Callable], seed: int) -> dict[str, float]:
    """Seconds of one launch, of each way; those that are wrong, or differ from run to run, are left out."""
    keys = (jax.random.key(seed + i) for i in itertools.count())
    random = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, DTYPE) * shape[-1] ** -0.5, static_argnums=1
    )
    args = arguments(product, tokens, lambda shape: random(next(keys), shape))
    want: Sequence[jax.Array] = ()
    times = {}
    for name, many in compiled.items():
        outs, again = many(*args), many(*args)
        if name == "xla":
            want = outs[0]
        wrong = max(
            float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))
            for a, b in zip(outs[0], want, strict=True)
        )
        same = all(bool(jnp.array_equal(a, b)) for a, b in zip(outs[-1], again[-1], strict=True))
        if wrong > MAX_ERROR or not same:
            print(f"  {name}: error {wrong:.1e}, same again: {same}", flush=True)
            continue
        del outs, again
        times[name] = seconds_each(partial(many, *args), wait=jax.block_until_ready) / len(args[1])
    return times


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="products whose name contains one of these, by comma")
    parser.add_argument("--tokens", default="8,64,128", help="numbers of tokens, multiples of 8, by comma")
    parser.add_argument("--tilings", action="store_true", help="time every tiling that fits")
    parser.add_argument("--no-kernel", action="store_true", help="time XLA alone, as on a CPU")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    args = parser.parse_args()
    names = [name for name in PRODUCTS if any(word in name for word in args.only.split(","))]
    cases = [(name, int(tokens)) for name in names for tokens in args.tokens.split(",")]
    plans = {case: ways(PRODUCTS[case[0]], case[1], args.tilings) for case in cases}
    if args.no_kernel:
        plans = {case: {"xla": None} for case in cases}
    with ThreadPoolExecutor(8) as pool:
        futures = {
            case: {
                way: pool.submit(compile_many, PRODUCTS[case[0]], case[1], tiling)
                for way, tiling in plan.items()
            }
            for case, plan in plans.items()
        }
    rates = measure_ceilings(jax.devices()[0], scale=64 if args.no_kernel else 1)
    copy = rates.copy_bytes_per_s / 1e9
    print(f"copy {copy:,.0f} GB/s", flush=True)
    device, driver = gpu() or (None, None)
    for seed, (case, compiled) in enumerate(futures.items()):
        name, tokens = case
        done = {way: future.result() for way, future in compiled.items() if future.exception() is None}
        for way in compiled.keys() - done.keys():
            print(f"  {way}: {str(compiled[way].exception())[:300]}", flush=True)
        times = measure(PRODUCTS[name], tokens, done, 1000 * seed)
        speeds = {way: PRODUCTS[name].weight_bytes / s / 1e9 for way, s in times.items()}
        shown = ", ".join(f"{way} {speed:,.0f}" for way, speed in speeds.items())
        print(f"{name} {tokens}: {shown} GB/s", flush=True)
        best = speeds.get("chosen", speeds.get("xla"))
        if args.out is None or best is None:
            continue
        line = record(
            bench="kernels",
            case=f"product_{name}_{tokens}",
            metric="weight_bandwidth",
            value=round(best, 1),
            unit="GB/s",
            ceiling=round(copy, 1),
            ratio=round(best / copy, 4),
            device=device,
            driver=driver,
            packages=("jax", "jaxlib"),
            shapes={
                "tokens": tokens,
                "sizes": PRODUCTS[name].sizes,
                "contracted": PRODUCTS[name].contracted,
                "gb_per_s": {way: round(speed, 1) for way, speed in speeds.items()},
            },
        )
        replace_records(args.out, [line])


if __name__ == "__main__":
    main()
