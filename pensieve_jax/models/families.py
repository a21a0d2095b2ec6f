"""The model families: which modules a checkpoint's `model_type` stands for, and how it names its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError
from pensieve_jax.models.interface import ModelSpec, ServableModel
from pensieve_jax.models.llama import LlamaModel
from pensieve_jax.models.llama_config import read_llama_config
from pensieve_jax.models.opt import OptModel
from pensieve_jax.models.opt_config import read_opt_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family.

    Attributes:
        read_config: `(config.json as a mapping, dtype=...) -> the family's configuration`, which has a
            `spec`; raises `CheckpointError` and `UnsupportedModelError`.
        make_model: `(configuration, rngs=...) -> model with random weights`.
        tensor_prefix: of all tensors of the checkpoint but the head's table.
    """

    read_config: Callable[..., Any]
    make_model: Callable[..., ServableModel]
    tensor_prefix: str


_LLAMA = ModelFamily(read_config=read_llama_config, make_model=LlamaModel, tensor_prefix="model.")
_OPT = ModelFamily(read_config=read_opt_config, make_model=OptModel, tensor_prefix="model.decoder.")

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "opt": _OPT}
)
"""Families by the `model_type` of config.json. SmolLM2 says llama."""


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a checkpoint.

    Raises:
        CheckpointError: `model_type` is missing.
        UnsupportedModelError: no family of that name, or quantised weights.
    """
    if "model_type" not in config:
        raise CheckpointError("config.json: field 'model_type' is missing")
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"config.json: model_type={model_type!r} is not supported, expected one of {sorted(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            f"config.json: quantization_config={config['quantization_config']!r} is not supported"
        )
    return FAMILIES[model_type]


def spec_from_config(config: Mapping[str, Any], *, dtype: np.dtype) -> ModelSpec:
    """Sizes and limits of the model that a config.json describes. Raises as `family_of` and its reader."""
    return family_of(config).read_config(config, dtype=dtype).spec


def make_model(config: Mapping[str, Any], *, dtype: np.dtype, rngs: nnx.Rngs) -> ServableModel:
    """The model that a config.json describes, with random weights. Raises as `family_of` and its reader."""
    family = family_of(config)
    return family.make_model(family.read_config(config, dtype=dtype), rngs=rngs)


def abstract_model(config: Mapping[str, Any], *, dtype: np.dtype) -> ServableModel:
    """As `make_model`, with a `jax.ShapeDtypeStruct` for each weight, to be filled with `nnx.update`."""
    return nnx.eval_shape(lambda: make_model(config, dtype=dtype, rngs=nnx.Rngs(0)))


_LEAF_NAMES: Mapping[str, str] = MappingProxyType(
    {"weight": "weight", "scale": "weight", "table": "weight", "bias": "bias"}
)


def checkpoint_tensor_name(parameter: str, family: ModelFamily) -> str:
    """The checkpoint's name of a parameter: modules are named as in transformers, so only ends differ.

    `layers.0.mlp.up_proj.weight` -> `model.layers.0.mlp.up_proj.weight`.
    """
    *modules, leaf = parameter.split(".")
    if modules[0] in ("embedding", "head"):
        modules = modules[1:]
    prefix = "" if modules[0] == "lm_head" else family.tensor_prefix
    return f"{prefix}{'.'.join(modules)}.{_LEAF_NAMES[leaf]}"
