"""config.json of OPT -> what `opt.py` computes with.

Defaults of absent fields are those of `transformers/models/opt/configuration_opt.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.core.errors import CheckpointError
from pensieve_jax.models.config_fields import ConfigFields
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.models.layers import ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig:
    """One size of OPT.

    Attributes:
        spec: sizes, limits and dtype.
        ffn_size: width of the feed-forward.
        embedding_size: width of the token embedding; unlike the hidden size, it is projected (350M).
        activation: key of `ACTIVATIONS`.
        norm_first: norms stand before attention and feed-forward; else behind their sums (350M).
        final_norm: a norm stands before the head.
        norm_affine: norms have scale and bias.
        use_bias: projections have biases.
        tied: the head uses the embedding table.
    """

    spec: ModelSpec
    ffn_size: int
    embedding_size: int
    activation: str
    norm_first: bool
    final_norm: bool
    norm_affine: bool
    use_bias: bool
    tied: bool


def read_opt_config(config: Mapping[str, Any], *, dtype: np.dtype) -> OptConfig:
    """Read a config.json whose `model_type` is opt.

    Raises:
        CheckpointError: a field is missing or malformed.
        UnsupportedModelError: a field asks for other mathematics.
    """
    fields = ConfigFields(config)
    fields.value("model_type")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}"
        )
    norm_first = fields.flag("do_layer_norm_before", True)
    result = OptConfig(
        spec=ModelSpec(
            name=f"opt-{num_layers}x{hidden_size}",
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_context_tokens=fields.integer("max_position_embeddings"),
            dtype=dtype,
        ),
        ffn_size=fields.integer("ffn_dim"),
        embedding_size=fields.optional_integer("word_embed_proj_dim") or hidden_size,
        activation=fields.choice("activation_function", ACTIVATIONS, "relu"),
        norm_first=norm_first,
        final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        use_bias=fields.flag("enable_bias", True),
        tied=fields.flag("tie_word_embeddings", True),
    )
    fields.refuse_rest()
    return result
