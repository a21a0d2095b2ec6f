"""Compile the attention kernel for an H200 without one.

`python -m tests.pallas_kernels.compile_for_h200 PARTS CASE...` prints a line of JSON for each case:
spilled bytes of each kernel, and the program's memory.
"""

from tests.pallas_kernels.for_h200 import abstract, mosaic_report

# isort: split
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention
from pallas_kernels.multi_token_attention.shapes import SHAPES, Shape

OTHERS = {
    "d64_odd_group": (
        Shape(rows=((1, 700), (100, 900)), num_heads=9, num_kv_heads=3, head_dim=64),
        "float16",
    ),
    "page_16": (Shape(rows=((1, 700), (100, 900)), num_heads=16, num_kv_heads=1, page_size=16), "bfloat16"),
    "page_64": (Shape(rows=((1, 700), (100, 900)), num_heads=8, num_kv_heads=8, page_size=64), "float16"),
    "page_128": (Shape(rows=((1, 700), (100, 900)), num_heads=28, num_kv_heads=4, page_size=128), "bfloat16"),
    "d80_page_16": (
        Shape(rows=((1, 700), (100, 900)), num_heads=16, num_kv_heads=1, head_dim=80, page_size=16),
        "float16",
    ),
    "d96_page_64": (
        Shape(rows=((1, 700), (100, 900)), num_heads=9, num_kv_heads=3, head_dim=96, page_size=64),
        "float16",
    ),
    "d256_page_128": (
        Shape(rows=((1, 700), (100, 900)), num_heads=16, num_kv_heads=1, head_dim=256, page_size=128),
        "float16",
    ),
}


def main() -> None:
    for name in sys.argv[2:]:
        shape, dtype = OTHERS.get(name) or (SHAPES[name], "bfloat16")
        counts = [-(-kv // shape.page_size) for _, kv in shape.rows]
        tokens = -(-shape.num_tokens // 8) * 8
        plan = plan_attention(
            q_lens=[q for q, _ in shape.rows],
            kv_lens=[kv for _, kv in shape.rows],
            pages=[np.zeros(count, np.int32) for count in counts],
            max_rows=len(counts),
            max_pages=max(counts),
            max_tokens=tokens,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )
        pool = (sum(counts), 2, shape.num_kv_heads, shape.page_size, shape.head_dim)
        q = abstract((tokens, shape.num_heads, shape.head_dim), jnp.dtype(dtype))
        args = (q, abstract(pool, jnp.dtype(dtype)), jax.tree.map(lambda x: abstract(x.shape, x.dtype), plan))
        lowered = jax.jit(multi_token_attention, static_argnames="implementation").lower(
            *args, implementation="mosaic"
        )
        print(json.dumps({"case": name} | mosaic_report(lowered)), flush=True)


main()
