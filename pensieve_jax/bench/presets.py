"""What `pensieve bench` measures: models of known dimensions, and one for a quick look on any machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.models.presets import PRESETS as DIMENSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model without a checkpoint.

    Attributes:
        config: what its config.json would say.
        dtype: of weights and KV.
        scale: by which sizes of the cases are divided.
    """

    config: Mapping[str, Any]
    dtype: str = "bfloat16"
    scale: int = 1


TINY = Preset(
    config={
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
    dtype="float32",
    scale=64,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {name: Preset(config=config) for name, config in DIMENSIONS.items()} | {"tiny": TINY}
)
"""Presets by name."""


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        InvalidArgumentError: there is none.
    """
    if name not in PRESETS:
        raise InvalidArgumentError(f"MODEL: got {name!r}, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
