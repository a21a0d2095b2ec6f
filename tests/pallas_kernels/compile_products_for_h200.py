"""Compile a decode step's products for an H200 without one.

`python -m tests.pallas_kernels.compile_products_for_h200 PARTS` prints a line of JSON for each case:
spilled bytes and the program's memory.
"""

from tests.pallas_kernels import for_h200

# isort: split
import json

import jax
import jax.numpy as jnp

from pallas_kernels.norm.mosaic import norm_mosaic
from pallas_kernels.skinny_matmul import products

CASES = {
    "qkv": (64, [5120, 1280, 1280], 5120, {}),
    "qkv_128": (128, [5120, 1280, 1280], 5120, {}),
    "o": (64, [5120], 5120, {"add": True}),
    "gate_up": (64, [13824] * 2, 5120, {"activation": jax.nn.silu, "gated": True}),
    "gate_up_128": (128, [13824] * 2, 5120, {"activation": jax.nn.silu, "gated": True}),
    "down_8": (8, [5120], 13824, {"add": True}),
    "down_128": (128, [5120], 13824, {"add": True}),
    "head": (8, [32000], 5120, {"out_dtype": jnp.float32}),
    "fc1": (64, [20480], 5120, {"biases": True, "activation": jax.nn.relu}),
    "fc1_128": (128, [20480], 5120, {"biases": True, "activation": jax.nn.relu}),
    "fc2": (64, [5120], 20480, {"biases": True, "add": True}),
}


def main() -> None:
    def abstract(*shape):
        return for_h200.abstract(shape, jnp.bfloat16)

    def report(name, function, *args):
        result = for_h200.mosaic_report(jax.jit(function).lower(*args))
        print(json.dumps({"case": name} | result), flush=True)

    for name, (tokens, sizes, contracted, options) in CASES.items():
        biases = [abstract(n) for n in sizes] if options.pop("biases", False) else []
        add = abstract(tokens, sizes[0]) if options.pop("add", False) else None

        def run(x, weights, biases, add, options=options):
            return products(
                x, weights, biases=biases, add=add, overlap=True, implementation="mosaic", **options
            )

        report(name, run, abstract(tokens, contracted), [abstract(n, contracted) for n in sizes], biases, add)
    for biased in (False, True):
        report(
            f"norm_{biased}",
            lambda x, scale, biased=biased: norm_mosaic(x, scale, scale if biased else None, epsilon=1e-5),
            abstract(64, 5120),
            abstract(5120),
        )


main()
