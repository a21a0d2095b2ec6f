"""A layer's products on one GPU, chained as in a decode step: weights of one stream while another still runs.

    python -m benchmarks.kernels.layer [--layer llama|opt] [--tokens 64] [--every] [--cut o=40,down=80-split2]

Times are of a layer: norm, q k v, something small in attention's place, projection, norm, up, down, over
several layers of different weights, back to back. With --every each product is also cut in every other way
that seems worth a look, one at a time, and --cut names several at once: that is how the rates in
`pallas_kernels/skinny_matmul/tiling.py` and the choice between them are found. Everything is compiled
first; then --lock waits until no other process that names the same file measures, so that several can
compile side by side.
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.common import DTYPE, NO_LOCK, Report, alone, launch_seconds, random_array
from benchmarks.kernels.products import PRODUCTS, Product, limits_of
from pallas_kernels.norm import layer_norm, rms_norm
from pallas_kernels.skinny_matmul.api import run_mosaic
from pallas_kernels.skinny_matmul.tiling import Tiling, candidates, plan_tiling
from pallas_kernels.skinny_matmul.xla import skinny_matmul_xla
from pensieve_jax.bench.timing import measure_ceilings

LAYERS = {
    "llama": ("llama_qkv", "llama_o", "llama_gate_up", "llama_down"),
    "opt": ("opt_qkv", "opt_o", "opt_fc1", "opt_fc2"),
}
"""Products of a layer: q k v, projection, up, down."""
DEPTH = 8
"""Layers of a call: together many times the caches of a GPU."""
LEAST_CTAS = 90
"""Fewer don't draw the memory's rate."""

type Cut = Mapping[str, Tiling | None]
"""How each product of a layer is cut; None: XLA's."""


def name_of(tiling: Tiling | None) -> str:
    """Features, and how CTAs work together."""
    if tiling is None:
        return "xla"
    ways = {"split": tiling.splits, "share": tiling.shares}
    return "-".join([str(tiling.features), *(f"{way}{n}" for way, n in ways.items() if n > 1)])


def cuts(names: tuple[str, ...], tokens: int, *, every: bool, asked: Sequence[str] = ()) -> dict[str, Cut]:
    """The chosen way, XLA's products, and, on demand, the chosen way with products cut in another."""
    limits = {name: limits_of(PRODUCTS[name], tokens) for name in names}
    chosen = {name: plan_tiling(**limits[name]) for name in names}
    found: dict[str, Cut] = {"chosen": chosen, "xla": dict.fromkeys(names)}
    for name in names if every else ():
        others: list[Tiling | None] = [
            tiling for tiling in candidates(**limits[name]) if tiling.num_tiles * tiling.splits >= LEAST_CTAS
        ]
        for other in [*others, None]:
            if other != chosen[name]:
                found[f"{name}={name_of(other)}"] = chosen | {name: other}
    for combination in asked:
        changes = {}
        for word in combination.split(","):
            short, _, way = word.partition("=")
            name = next(name for name in names if name.endswith(f"_{short}"))
            tilings = {name_of(tiling): tiling for tiling in candidates(**limits[name])}
            changes[name] = None if way == "xla" else tilings[way]
        found[combination] = chosen | changes
    return found


def weights_of(names: tuple[str, ...], make: Callable[[tuple[int, ...]], Any]) -> list[Any]:
    """Weights of each product, and its biases, of each layer."""

    def one(product: Product) -> tuple[list[Any], list[Any]]:
        weights = [make((n, product.contracted)) for n in product.sizes]
        return weights, [make((n,)) for n in product.sizes] if product.epilogue.biased else []

    return [[one(PRODUCTS[name]) for name in names] for _ in range(DEPTH)]


def layers(names: tuple[str, ...], cut: Cut, x: jax.Array, scale: jax.Array, weights: list[Any]) -> jax.Array:
    """[tokens, width] after all layers."""
    biased = PRODUCTS[names[0]].epilogue.biased
    norm = partial(layer_norm, bias=scale, epsilon=1e-5) if biased else partial(rms_norm, epsilon=1e-5)

    def product(name: str, x: jax.Array, given: tuple, add: jax.Array | None = None) -> list[jax.Array]:
        options: dict[str, Any] = {"epilogue": PRODUCTS[name].epilogue, "out_dtype": DTYPE}
        ws, biases = map(tuple, given)
        if (tiling := cut[name]) is None:
            return skinny_matmul_xla(x, ws, biases, add, **options)
        return run_mosaic(x, ws, biases, add, tiling=tiling, overlap=True, **options)

    qkv, o, up, down = names
    for given in weights:
        q, k, v = product(qkv, norm(x, scale), given[0])
        mixed = jnp.tanh(q) + jnp.tile(k + v, (1, q.shape[1] // k.shape[1]))
        (x,) = product(o, jax.lax.optimization_barrier(mixed), given[1], x)
        (wide,) = product(up, norm(x, scale), given[2])
        (x,) = product(down, wide, given[3], x)
    return x


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", default="llama", choices=LAYERS)
    parser.add_argument("--tokens", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--every", action="store_true", help="cut each product in other ways, too")
    parser.add_argument("--cut", action="append", default=[], help="cut the named products so")
    parser.add_argument("--lock", type=Path, default=NO_LOCK, help="one process at a time measures under it")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    args = parser.parse_args()
    names, tokens = LAYERS[args.layer], args.tokens
    width = PRODUCTS[names[0]].contracted
    plans = cuts(names, tokens, every=args.every, asked=args.cut)

    def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, DTYPE)

    shapes = abstract((tokens, width)), abstract((width,)), weights_of(names, abstract)
    with ThreadPoolExecutor() as pool:
        compiled = {}
        for plan, cut in plans.items():  # traced one after the other, compiled side by side
            lowered = jax.jit(partial(layers, names, cut)).lower(*shapes)
            compiled[plan] = pool.submit(lowered.compile)
    with alone(args.lock):
        copy = measure_ceilings(jax.devices()[0]).copy_bytes_per_s / 1e9
        keys = (jax.random.key(i) for i in itertools.count())
        weights = weights_of(names, lambda shape: random_array(next(keys), shape) * shape[-1] ** -0.5)
        x, scale = random_array(next(keys), (tokens, width)), jnp.ones((width,), DTYPE)
        num_bytes = sum(PRODUCTS[name].weight_bytes for name in names)
        times = {}
        for plan, run in compiled.items():
            times[plan] = seconds = launch_seconds(run.result(), DEPTH, x, scale, weights)
            print(
                f"{tokens} {plan}: {seconds * 1e6:.1f} us, {num_bytes / seconds / 1e9:,.0f} GB/s", flush=True
            )
    if args.out is not None:
        best = num_bytes / times["chosen"] / 1e9
        Report(path=args.out).add(
            f"layer_{args.layer}_{tokens}",
            "weight_bandwidth",
            best,
            "GB/s",
            copy,
            best / copy,
            tokens=tokens,
            tilings={name: name_of(tiling) for name, tiling in plans["chosen"].items()},
            us={plan: round(seconds * 1e6, 1) for plan, seconds in times.items()},
        )


if __name__ == "__main__":
    main()
