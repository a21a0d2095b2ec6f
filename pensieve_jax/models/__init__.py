"""Models: the interface to serve one, the families built in, and their checkpoints and tokenizers."""

from pensieve_jax.models.checkpoint_info import CheckpointInfo, checkpoint_fingerprint, describe_checkpoint
from pensieve_jax.models.conversion import convert_checkpoint
from pensieve_jax.models.families import abstract_model, make_model, spec_from_config
from pensieve_jax.models.interface import LayerContext, ModelSpec, ServableModel
from pensieve_jax.models.loading import load_model
from pensieve_jax.models.tokenizer import load_tokenizer

__all__ = [
    "CheckpointInfo",
    "LayerContext",
    "ModelSpec",
    "ServableModel",
    "abstract_model",
    "checkpoint_fingerprint",
    "convert_checkpoint",
    "describe_checkpoint",
    "load_model",
    "load_tokenizer",
    "make_model",
    "spec_from_config",
]
