"""Compile the Triton kernels for a GPU that isn't there.

`python -m tests.pallas_kernels.compile_triton PARTS CAPABILITY CASE...` prints a line of JSON for each case:
spilled bytes and shared memory of each kernel, and the program's memory (for an H200, the one target that XLA
is told about here).
"""

from tests.pallas_kernels.for_h200 import DUMP, PARTS, abstract

# isort: split
import functools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write import Rotary
from pallas_kernels.kv_write.triton import rotate_and_write_triton
from pallas_kernels.multi_token_attention import plan_attention, tile_tokens
from pallas_kernels.multi_token_attention.triton import attention_triton
from pallas_kernels.page_move.triton import copy_pages_triton, read_pages_triton

CAPABILITY, CASES = sys.argv[2], sys.argv[3:]
NUM_PAGES = 2**31 // (2 * 10 * 32 * 128) + 1  # more than 2**31 numbers
PAGE = (2, 10, 32, 128)

compile_for = {"compute_capability": int(CAPABILITY)}


def attention(heads, head_dim, dtype, rows, fp8=False, **options):
    counts = [-(-kv_len // 32) for _, kv_len in rows]
    tokens = sum(q_len for q_len, _ in rows)
    plan = plan_attention(
        q_lens=[q_len for q_len, _ in rows],
        kv_lens=[kv_len for _, kv_len in rows],
        pages=[np.zeros(count, np.int32) for count in counts],
        max_rows=len(rows),
        max_pages=max(counts),
        max_tokens=tokens,
        block_q=tile_tokens(heads[0] // heads[1]),
    )
    options = {"scale": 0.1, "sliding_window": None, "logit_soft_cap": None, **options}
    pool = abstract((NUM_PAGES, 2, heads[1], 32, head_dim), dtype)
    if fp8:
        pool = abstract((NUM_PAGES, 2, heads[1], 33, head_dim), jnp.uint8)
    plan = jax.tree.map(lambda x: abstract(x.shape, x.dtype), plan)
    run = functools.partial(attention_triton, **options, **compile_for)
    return run, (), (abstract((tokens, heads[0], head_dim), dtype), pool, plan)


def kv_write(fused, norm, fp8=False):
    pool, tokens = abstract((NUM_PAGES, *PAGE), jnp.bfloat16), 64
    if fp8:
        pool = abstract((NUM_PAGES, *PAGE[:2], PAGE[2] + 1, PAGE[3]), jnp.uint8)
    heads = [60] if fused else [40, 10, 10]
    qkv = tuple(abstract((tokens, n, 128), jnp.bfloat16) for n in heads)
    angles, place = abstract((tokens, 64), jnp.float32), abstract((tokens,), jnp.int32)
    scale = abstract((128,), jnp.bfloat16) if norm else None
    rotary = Rotary(cos=angles, sin=angles, q_norm=scale, k_norm=scale, epsilon=1e-6)
    run = functools.partial(rotate_and_write_triton, **compile_for)
    return run, (0,), (pool, qkv[0] if fused else qkv, place, place, rotary)


def copy_pages():
    pools = [abstract((n, *PAGE), jnp.bfloat16) for n in (NUM_PAGES, 100)]
    ids = abstract((64,), jnp.int32)
    return functools.partial(copy_pages_triton, **compile_for), (0,), (*pools, ids, ids)


def read_pages():
    ids, addresses = abstract((64,), jnp.int32), abstract((80,), jnp.int32)
    run = functools.partial(read_pages_triton, num_source=12000, **compile_for)
    return (
        lambda pool, addresses, to, start: run(pool, addresses, 7, to, start),
        (0,),
        (abstract((NUM_PAGES, *PAGE), jnp.bfloat16), addresses, ids, ids),
    )


DECODE, MIXED = ((1, 4096),) * 2, ((1, 4096), (300, 3000))
PROGRAMS = {
    "decode": lambda: attention((32, 8), 128, jnp.bfloat16, DECODE),
    "mixed": lambda: attention((40, 10), 128, jnp.bfloat16, MIXED),
    "one_head_a_group": lambda: attention((8, 8), 128, jnp.float16, MIXED),
    "window_d256": lambda: attention((10, 2), 256, jnp.bfloat16, MIXED, sliding_window=700),
    "cap_d80": lambda: attention((16, 1), 80, jnp.bfloat16, MIXED, logit_soft_cap=20.0),
    "float32_d96": lambda: attention((6, 2), 96, jnp.float32, MIXED),
    "kv_write": lambda: kv_write(fused=True, norm=False),
    "kv_write_norm": lambda: kv_write(fused=False, norm=True),
    "fp8_decode": lambda: attention((32, 8), 128, jnp.bfloat16, DECODE, fp8=True),
    "fp8_mixed": lambda: attention((40, 10), 128, jnp.bfloat16, MIXED, fp8=True),
    "fp8_window_d80": lambda: attention(
        (16, 1), 80, jnp.float16, MIXED, fp8=True, sliding_window=700, logit_soft_cap=20.0
    ),
    "fp8_d256": lambda: attention((10, 2), 256, jnp.bfloat16, MIXED, fp8=True),
    "fp8_write": lambda: kv_write(fused=True, norm=True, fp8=True),
    "copy_pages": copy_pages,
    "read_pages": read_pages,
}


def main() -> None:
    for case in CASES:
        function, donated, arguments = PROGRAMS[case]()
        before = set(DUMP.iterdir())
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        result = {"case": case, "kernels": []}
        for folder in set(DUMP.iterdir()) - before:
            (ptx,), (info,) = folder.glob("*.ptx"), folder.glob("*.compile_info")
            architecture = f"sm_{CAPABILITY}" + ("a" if int(CAPABILITY) >= 90 else "")
            command = [f"{PARTS}/nvidia/cu13/bin/ptxas", "-v", f"-arch={architecture}", ptx, "-o", os.devnull]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            result["kernels"].append(
                {
                    "kernel": ptx.stem,
                    "spilled_bytes": int(re.findall(r"(\d+) bytes spill stores", report)[0]),
                    "shared_bytes": int(info.read_text().rsplit(":", 1)[1]),
                }
            )
        if CAPABILITY == "90":
            memory = lowered.compile().memory_analysis()
            result |= {"temp_bytes": memory.temp_size_in_bytes, "alias_bytes": memory.alias_size_in_bytes}
        print(json.dumps(result), flush=True)


main()
