"""Compile the products of a decode step for an H200 without one: python compile_products_for_h200.py PARTS

PARTS is a folder made from requirements/aot.txt. Prints a line of JSON for each case: spilled bytes and the
program's memory. A process of its own, as `compile_for_h200.py`.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

PARTS = sys.argv[1]
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
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels.norm.mosaic import norm_mosaic  # noqa: E402
from pallas_kernels.skinny_matmul import products  # noqa: E402

CASES = {
    "qkv": (64, [5120, 1280, 1280], 5120, {}),
    "o": (64, [5120], 5120, {"add": True}),
    "gate_up": (64, [13824] * 2, 5120, {"activation": jax.nn.silu, "gated": True}),
    "gate_up_128": (128, [13824] * 2, 5120, {"activation": jax.nn.silu, "gated": True}),
    "down_8": (8, [5120], 13824, {"add": True}),
    "head": (8, [32000], 5120, {"out_dtype": jnp.float32}),
    "fc1": (64, [20480], 5120, {"biases": True, "activation": jax.nn.relu}),
    "fc2": (64, [5120], 20480, {"biases": True, "add": True}),
}


def main() -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=target, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])

    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    def report(name, function, *args):
        for old in Path(DUMP).iterdir():
            old.unlink()
        memory = jax.jit(function).lower(*args).compile().memory_analysis()
        reports = "".join(path.read_text() for path in sorted(Path(DUMP).glob("*.ptxas")))
        spilled = [int(x) for x in re.findall(r"stack frame, (\d+) bytes spill stores", reports)]
        result = {"case": name, "spilled_bytes": spilled, "serialized": "serialized" in reports}
        print(json.dumps(result | {"temp_bytes": memory.temp_size_in_bytes}), flush=True)

    for name, (tokens, sizes, contracted, options) in CASES.items():
        biases = [abstract(n) for n in sizes] if options.pop("biases", False) else []
        add = abstract(tokens, sizes[0]) if options.pop("add", False) else None

        def run(x, weights, biases, add, options=options):
            return products(
                x, weights, biases=biases, add=add, overlap=True, implementation="mosaic", **options
            )

        report(name, run, abstract(tokens, contracted), [abstract(n, contracted) for n in sizes], biases, add)
    for centred in (False, True):
        report(
            f"norm_{centred}",
            lambda x, scale, centred=centred: norm_mosaic(x, scale, scale, epsilon=1e-5, centred=centred),
            abstract(64, 5120),
            abstract(5120),
        )


main()
