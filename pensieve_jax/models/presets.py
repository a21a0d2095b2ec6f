"""Dimensions of known models by name, for measurements with random weights: times don't depend on weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models.families import make_model
from pensieve_jax.models.interface import ServableModel

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


def random_model(name: str, *, dtype: np.dtype, seed: int = 0) -> ServableModel:
    """A model of named dimensions with random weights, on the default device.

    Args:
        name: one of `PRESETS`.
        dtype: of the weights and KV.
        seed: of the weights.

    Raises:
        InvalidArgumentError: there is no such name.
    """
    return make_model(preset(name), dtype=dtype, rngs=nnx.Rngs(seed))
