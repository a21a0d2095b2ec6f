"""Compile whole steps for H200s without one: two layers of known dimensions, for one GPU and for two.

`python -m tests.worker.compile_step_for_h200 PARTS` prints a line of JSON for each case: the pools' bytes,
how many of them are written in place, temporary bytes, launches, and how many of these are ours.
"""

from tests.pallas_kernels.for_h200 import devices

# isort: split
import json
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

from pallas_kernels.dispatch import RUNS_HERE
from pensieve_jax.core.plans import Row, SampleRequest
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.models.families import abstract_model
from pensieve_jax.models.presets import preset
from pensieve_jax.parallel import TENSOR_AXIS
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, pack
from pensieve_jax.worker.runner import by_tokens
from pensieve_jax.worker.step_functions import KV_SPEC, StepFunctions, split_model

# What is compiled for is not the default device.
RUNS_HERE.update(dict.fromkeys(RUNS_HERE, lambda: True))
triton_lib.triton_kernel_call_lib.get_compute_capability = lambda device: 90

LAYERS, PAGE_TOKENS = 2, 32
GREEDY = SampleRequest(
    params=SamplingParams(temperature=0.0), num_generated=0, context_ids=np.zeros(0, np.int32)
)
CASES = {
    "decode 64, 13B": ("llama-2-13b-kv10", 1, 64, 1, 1024),
    "prefill 2048, 13B": ("llama-2-13b-kv10", 1, 1, 2048, 2048),
    "decode 64, 70B on two": ("llama-2-70b", 2, 64, 1, 1024),
}
"""Name -> (dimensions, GPUs, rows, query tokens of each, context of each)."""


class AbstractStep:
    """The functions of a step, with weights and pools that are shapes."""

    def __init__(self, name: str, mesh: Mesh, num_pages: int) -> None:
        model = abstract_model(
            dict(preset(name)) | {"num_hidden_layers": LAYERS}, dtype=np.dtype(jax.numpy.bfloat16)
        )
        self.spec, self.mesh = model.spec, mesh
        parts, weights = split_model(model, num_shards=mesh.size)
        self.functions = StepFunctions(model.spec, parts, mesh)
        self.weights = [
            [self.placed(leaf, split) for leaf, split in zip(leaves, part.specs, strict=True)]
            for leaves, part in zip(weights, parts, strict=True)
        ]
        pool = (num_pages, 2, self.spec.num_kv_heads, PAGE_TOKENS, self.spec.head_dim)
        self.pools = [self.placed(jax.ShapeDtypeStruct(pool, self.spec.dtype), KV_SPEC)] * LAYERS

    def placed(self, leaf, split):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, split))


def main() -> None:
    for case, (name, num_gpus, rows, tokens, context) in CASES.items():
        pages = -(-context // PAGE_TOKENS)
        step = AbstractStep(name, Mesh(np.array(devices(num_gpus)), (TENSOR_AXIS,)), rows * pages)
        spec = step.spec
        shapes = BatchShapes(
            num_pages=rows * pages,
            page_tokens=PAGE_TOKENS,
            max_rows=rows,
            max_tokens=max(rows * tokens, 64),
            max_pages=pages,
            planned_heads=(spec.num_heads // num_gpus, spec.num_kv_heads // num_gpus),
        )
        batch, _ = pack(
            [
                Row(
                    request_id=i,
                    token_ids=np.zeros(tokens, np.int32),
                    start=context - tokens,
                    page_ids=np.arange(pages, dtype=np.int32),
                    sample=GREEDY,
                )
                for i in range(rows)
            ],
            shapes,
            PreviousSamples(token_ids=np.zeros(shapes.max_samples, np.int32), places={}),
        )
        placed = jax.tree.map(lambda x, step=step: step.placed(x, P()), batch)
        whole = by_tokens("whole", step.functions.whole, None, donate=(1,))
        compiled = whole(batch).lower(step.weights, step.pools, placed).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        entry = text[text.index("ENTRY") :]
        launches = re.findall(r" (fusion|custom-call|copy|all-reduce|all-reduce-start)\(", entry)
        print(
            json.dumps(
                {
                    "case": case,
                    "pool_bytes": sum(int(np.prod(pool.shape)) * 2 for pool in step.pools) // num_gpus,
                    "in_place_bytes": memory.alias_size_in_bytes,
                    "temp_bytes": memory.temp_size_in_bytes,
                    "launches": len(launches),
                    "kernels": len(re.findall(r"custom_call_target=\"(?:mosaic_gpu|triton_kernel)", entry)),
                }
            ),
            flush=True,
        )


main()
