"""Dimensions of known models by name, for measurements with random weights: times don't depend on weights."""

import itertools
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models.families import abstract_model
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.models.layers import INIT_STDDEV
from pensieve_jax.parallel import check_head_sharding, make_mesh, partition_specs
from pensieve_jax.parallel.sharding import parameter_name

PAPER_CONTEXT = 16_384
"""Longest context of the paper's evaluation (section 6.1), to which it extends its models."""


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": PAPER_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        **others,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": 50_272,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": PAPER_CONTEXT,
    }


_SMOLLM2 = {
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # OPT (arXiv 2205.01068, table 1)
        "opt-13b": _opt(5120, 40, 40),
        "opt-66b": _opt(9216, 64, 72),
        # Llama 2 (arXiv 2307.09288), the smaller one with KV heads reduced from 40 to 10 as in the paper
        "llama-2-13b-kv10": _llama(5120, 13_824, 40, 40, 10),
        "llama-2-70b": _llama(8192, 28_672, 80, 64, 8),
        # Llama 3 (arXiv 2407.21783, table 3)
        "llama-3-8b": _llama(4096, 14_336, 32, 32, 8, vocab_size=128_256, rope_theta=500_000.0),
        # SmolLM2 (arXiv 2502.02737)
        "smollm2-135m": _llama(576, 1536, 30, 9, 3, **_SMOLLM2),
    }
)
"""Name -> what config.json says."""


def preset(name: str) -> Mapping[str, Any]:
    """The configuration of a name.

    Raises:
        InvalidArgumentError: there is none.
    """
    if name not in PRESETS:
        raise InvalidArgumentError(f"dimensions: got {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def random_model(
    dimensions: str | Mapping[str, Any], *, dtype: np.dtype, seed: int = 0, mesh: Mesh | None = None
) -> ServableModel:
    """A model with random weights, each made where it belongs; norms and biases are those of a fresh model.

    Args:
        dimensions: one of `PRESETS`, or what a config.json says.
        dtype: of the weights and KV.
        seed: of the weights.
        mesh: a one-axis mesh over which weights are split; None puts them on the default device.

    Raises:
        InvalidArgumentError: there is no such name, or the model doesn't divide over the mesh.
        CheckpointError, UnsupportedModelError: the configuration is wrong.
    """
    config = preset(dimensions) if isinstance(dimensions, str) else dimensions
    model = abstract_model(config, dtype=dtype)
    mesh = make_mesh(1) if mesh is None else mesh
    check_head_sharding(
        num_heads=model.spec.num_heads, num_kv_heads=model.spec.num_kv_heads, num_shards=mesh.size
    )
    state = nnx.state(model, nnx.Param)
    numbers = itertools.count()

    def weight(path: Any, leaf: Any, split: PartitionSpec) -> jax.Array:
        return _weight(
            jax.random.fold_in(jax.random.key(seed), next(numbers)),
            kind=parameter_name(path).rpartition(".")[2],
            shape=leaf.shape,
            dtype=leaf.dtype,
            sharding=NamedSharding(mesh, split),
        )

    splits = partition_specs(state, num_shards=mesh.size)
    nnx.update(model, jax.tree_util.tree_map_with_path(weight, state, splits))
    return model


@partial(jax.jit, static_argnames=("kind", "shape", "dtype", "sharding"))
def _weight(
    key: jax.Array, *, kind: str, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.Array:
    if kind in ("scale", "bias"):
        values = jnp.full(shape, 1 if kind == "scale" else 0, dtype)
    else:
        values = (INIT_STDDEV * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return jax.lax.with_sharding_constraint(values, sharding)
