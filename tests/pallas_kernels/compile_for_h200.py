"""Compile the attention kernel for an H200 without one: python compile_for_h200.py PARTS CASE...

PARTS is the folder that `make compiler` makes. Prints a line of JSON for each case: spilled bytes of each
kernel, its shared memory, and the program's memory. A process of its own, since the compiler's plugin and
the settings must be there before JAX starts.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

PARTS, *CASES = sys.argv[1:]
DUMP = tempfile.mkdtemp()
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache leaves no report
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={PARTS}/nvidia/cu13",
    "MOSAIC_GPU_DUMP_TO": DUMP,
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}
sys.path[:0] = [str(Path(__file__).parents[2])]
sys.path.append(PARTS)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels.multi_token_attention import multi_token_attention, plan_attention  # noqa: E402
from pallas_kernels.multi_token_attention.shapes import SHAPES, Shape  # noqa: E402

OTHERS = {
    "d64_odd_group": (
        Shape(rows=((1, 700), (100, 900)), num_heads=9, num_kv_heads=3, head_dim=64),
        "float16",
    ),
    "page_16": (Shape(rows=((1, 700), (100, 900)), num_heads=16, num_kv_heads=1, page_size=16), "bfloat16"),
    "page_64": (Shape(rows=((1, 700), (100, 900)), num_heads=8, num_kv_heads=8, page_size=64), "float16"),
    "page_128": (Shape(rows=((1, 700), (100, 900)), num_heads=28, num_kv_heads=4, page_size=128), "bfloat16"),
}


def main() -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=target, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])

    def abstract(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    for name in CASES:
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
        for old in Path(DUMP).iterdir():
            old.unlink()
        compiled = jax.jit(multi_token_attention, static_argnames="implementation").lower(
            *args, implementation="mosaic"
        )
        memory = compiled.compile().memory_analysis()
        reports = "".join(path.read_text() for path in sorted(Path(DUMP).glob("*.ptxas")))
        result = {
            "case": name,
            "spilled_bytes": [int(x) for x in re.findall(r"stack frame, (\d+) bytes spill stores", reports)],
            "serialized": "serialized" in reports,
            "temp_bytes": memory.temp_size_in_bytes,
            "pool_bytes": int(np.prod(pool)) * 2,
        }
        print(json.dumps(result), flush=True)


main()
