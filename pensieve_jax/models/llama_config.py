"""config.json of the Llama family (llama, mistral, qwen2, qwen3) -> what `llama.py` computes with.

Defaults of absent fields are those of `transformers/models/*/configuration_*.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pensieve_jax.core.errors import CheckpointError
from pensieve_jax.models.config_fields import ConfigFields, refuse
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.models.layers import ACTIVATIONS
from pensieve_jax.models.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """One model of the family.

    Attributes:
        spec: sizes, limits and dtype.
        intermediate_size: width of the gated feed-forward.
        activation: key of `ACTIVATIONS`, of the gate.
        rms_norm_epsilon: of all norms.
        rope: rotary embedding of queries and keys.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the attention's output projection.
        mlp_bias: biases on the feed-forward's three projections.
        qk_norm: RMS norm of each query and key head before the rotation (Qwen3).
        tied: the head uses the embedding table.
        sliding_windows: of each layer, tokens; None attends to everything.
    """

    spec: ModelSpec
    intermediate_size: int
    activation: str
    rms_norm_epsilon: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    sliding_windows: tuple[int | None, ...]


def read_llama_config(config: Mapping[str, Any], *, dtype: np.dtype) -> LlamaConfig:
    """Read a config.json whose `model_type` is llama, mistral, qwen2 or qwen3.

    Raises:
        CheckpointError: a field is missing or malformed.
        UnsupportedModelError: a field asks for other mathematics.
    """
    fields = ConfigFields(config)
    model_type = fields.value("model_type")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    default_head_dim = 128 if model_type == "qwen3" else None
    head_dim = fields.optional_integer("head_dim", default_head_dim) or hidden_size // num_heads
    max_positions = fields.integer("max_position_embeddings")
    windows = _sliding_windows(fields, model_type, num_layers)
    attention_bias = fields.flag("attention_bias", False) if model_type in ("llama", "qwen3") else False
    result = LlamaConfig(
        spec=ModelSpec(
            name=f"{model_type}-{num_layers}x{hidden_size}",
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            max_context_tokens=max_positions,
            dtype=dtype,
            # Full attention in one layer keeps all of the KV alive; else the widest window does.
            sliding_window=None if None in windows else max(w for w in windows if w is not None),
        ),
        intermediate_size=fields.integer("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        rms_norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rope=Rope(head_dim=head_dim, **_rope_arguments(fields, max_positions, head_dim)),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        tied=fields.flag("tie_word_embeddings", False),
        sliding_windows=windows,
    )
    fields.refuse_rest()
    return result


def _sliding_windows(fields: ConfigFields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    layer_types = fields.value("layer_types", None)
    if layer_types is not None and (
        len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}
    ):
        raise refuse("layer_types", layer_types, "expected full_attention or sliding_attention per layer")
    if model_type == "llama":
        window, first_sliding = fields.optional_integer("sliding_window"), 0
        if window is not None:
            raise refuse("sliding_window", window, "a llama model attends to everything")
    elif model_type == "mistral":
        window, first_sliding = fields.optional_integer("sliding_window", 4096), 0
    else:
        window, first_sliding = (
            fields.optional_integer("sliding_window", 4096),
            fields.value("max_window_layers", 28),
        )
        if not fields.flag("use_sliding_window", False):
            window = None
    if window is None:
        return (None,) * num_layers
    if layer_types is None:
        return tuple(window if layer >= first_sliding else None for layer in range(num_layers))
    if model_type == "mistral" and "full_attention" in layer_types:
        raise refuse("layer_types", layer_types, "every layer of a mistral model has the window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope_arguments(fields: ConfigFields, max_positions: int, head_dim: int) -> dict[str, Any]:
    """`theta` and `scaling` from either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    theta = fields.number("rope_theta", 10_000.0)
    scaling = fields.value("rope_scaling", None)
    parameters = fields.value("rope_parameters", None)
    name = "rope_scaling" if scaling else "rope_parameters"
    given = dict(scaling or parameters or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise refuse(name, given, "one rotary embedding must serve all layers")
    partial = fields.value("partial_rotary_factor", None) or given.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise refuse("partial_rotary_factor", partial)
    rope = ConfigFields(given)
    theta = rope.number("rope_theta", theta)
    kind = rope.value("rope_type", rope.value("type", "default"))
    rope.value("type", None)
    readers = {
        "default": lambda: None,
        "linear": lambda: LinearScaling(factor=rope.number("factor")),
        "llama3": lambda: _llama3_scaling(rope, max_positions),
        "yarn": lambda: _yarn_scaling(rope, max_positions),
        "factors": lambda: _frequency_factors(rope, head_dim),
    }
    if kind not in readers:
        # Among them "dynamic", whose frequencies depend on the length so far: keys rotated earlier no
        # longer fit, so no cache can be exact.
        raise refuse(f"{name}.rope_type", kind, f"expected one of {sorted(readers)}")
    result = {"theta": theta, "scaling": readers[kind]()}
    rope.refuse_rest()
    return result


def _llama3_scaling(rope: ConfigFields, max_positions: int) -> RopeScaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_positions),
    )


def _yarn_scaling(rope: ConfigFields, max_positions: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", max_positions)
    factor = rope.value("factor")
    factor = max_positions / original if factor is None else rope.number("factor")
    mscale, mscale_all_dim = rope.value("mscale", None), rope.value("mscale_all_dim", None)
    attention_factor = rope.value("attention_factor", None)
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        beta_fast=float(rope.value("beta_fast", None) or 32),
        beta_slow=float(rope.value("beta_slow", None) or 1),
        truncate=rope.flag("truncate", True),
    )


def _frequency_factors(rope: ConfigFields, head_dim: int) -> RopeScaling:
    factors = tuple(float(factor) for factor in rope.value("factors"))
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"rope factors: {len(factors)} values, expected head_dim / 2 = {head_dim // 2}")
    return FrequencyFactors(factors=factors)
