"""Loading holds little beside the weights themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from pensieve_jax.models import abstract_model
from pensieve_jax.models.families import checkpoint_tensor_name, family_of
from pensieve_jax.parallel.sharding import parameter_name

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}


def write_random_checkpoint(folder: Path, dtype: np.dtype) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"dtype": str(dtype)}))
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(abstract_model(CONFIG, dtype=dtype)))
    rng = np.random.default_rng(0)
    tensors = {}
    for path, leaf in leaves:
        parameter = parameter_name(path)
        values = rng.standard_normal(leaf.shape, np.float32).astype(dtype)
        tensors[checkpoint_tensor_name(parameter, family_of(CONFIG))] = values
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "loaded"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_peak_memory_is_little_above_the_weights(stored, loaded, tmp_path):
    dtype = np.dtype(np.float32 if stored == "float32" else ml_dtypes.bfloat16)
    write_random_checkpoint(tmp_path, dtype)
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("measure_loading.py")), str(tmp_path), loaded],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    weights_bytes, peak_bytes = map(int, result.stdout.split())
    assert peak_bytes < 1.2 * weights_bytes
    assert peak_bytes > 0.9 * weights_bytes  # Else something else was measured.
