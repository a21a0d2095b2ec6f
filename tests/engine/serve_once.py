"""Start engines with compiled programs kept in a folder, serve, and say what was traced for each.

`python -m tests.engine.serve_once FOLDER` prints a line of JSON for each model: what was lowered while the
engine compiled ahead and served, programs compiled, tokens, and files in the folder.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

# isort: split
import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.models import make_model
from tests.engine.serving import config, ids
from tests.tiny import VOCAB, TinyModel

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 256}
OPT = {"model_type": "opt", "ffn_dim": 64, "max_position_embeddings": 256, "word_embed_proj_dim": 32}
MODELS = {"llama": (LLAMA, 1), "llama again": (LLAMA, 1), "opt on two": (OPT, 2), "own": (None, 1)}
"""In this order. The second is the next of a series of systems: the same without a host tier."""
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def main() -> None:
    folder, lowered = Path(sys.argv[1]), []

    def listen(event, duration_secs, **details):
        if event == LOWERED:
            lowered.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    settings = {"device_pages": 6, "step_tokens": 8, "max_rows": 2, "paranoid": False}
    for name, (dimensions, num_shards) in MODELS.items():
        model = TinyModel()
        if dimensions is not None:
            model = make_model(SIZES | dimensions, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
        settings["execution"] = "layered" if dimensions is LLAMA else "resident"
        settings["host_pages"] = 0 if name == "llama again" else 4
        engine = Engine(model, config=config(compilation_cache=folder, **settings), num_shards=num_shards)
        lowered.clear()
        greedy, drawn = SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1.0, seed=1)
        warm_up(engine, (greedy, drawn))
        results = engine.generate([ids(20), ids(9, 1), ids(70, 2)], greedy) + engine.generate([ids(5)], drawn)
        print(
            json.dumps(
                {
                    "model": name,
                    "lowered": [*lowered],
                    "compiled_while_serving": engine.num_compilations,
                    "tokens": [[token.token_id for token in result.tokens] for result in results],
                    "kept": len(list((folder / "programs").glob("*"))),
                }
            )
        )
        engine.close()


main()
