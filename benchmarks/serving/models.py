"""What is served: a checkpoint, or a model of known dimensions with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.engine.build import open_checkpoint
from pensieve_jax.models import ModelSpec, ServableModel, load_tokenizer
from pensieve_jax.models.families import abstract_model
from pensieve_jax.models.loading import config_and_dtype
from pensieve_jax.models.presets import PRESETS, preset, random_model
from pensieve_jax.models.shape import shape_of
from pensieve_jax.parallel import make_mesh

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
"""For quick runs on a CPU."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model by name: `tiny`, one of the known dimensions (random weights), or a checkpoint's path."""

    name: str
    dtype: str = "bfloat16"
    num_shards: int = 1

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint's path; None for random weights."""
        return None if self.name == "tiny" or self.name in PRESETS else Path(self.name)

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json says, of a model with random weights.

        Raises:
            InvalidArgumentError: there is no such name.
        """
        return TINY if self.name == "tiny" else preset(self.name)

    @property
    def label(self) -> str:
        """For people and results."""
        return self.name if self.checkpoint is None else self.checkpoint.name

    @property
    def spec(self) -> ModelSpec:
        """Its dimensions; no weights are read for them."""
        return self._abstract.spec

    @property
    def shape(self) -> ModelShape:
        """What the simulator needs to know of it."""
        return shape_of(self._abstract, self.num_shards)

    @cached_property
    def _abstract(self) -> ServableModel:
        config = self.config if self.checkpoint is None else config_and_dtype(self.checkpoint)[0]
        return abstract_model(config, dtype=np.dtype(jnp.dtype(self.dtype)))

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token over all layers, on one device."""
        return self.shape.kv_bytes_per_token

    @cached_property
    def tokenizer(self) -> Any | None:
        """Of the checkpoint; None for random weights."""
        return None if self.checkpoint is None else load_tokenizer(self.checkpoint)

    def load(self, progress: Callable[[int, int], None] | None = None) -> ServableModel:
        """The weights, on the devices.

        Raises:
            PensieveError: there is no such model, or it can't be read.
        """
        if self.checkpoint is not None:
            return open_checkpoint(
                self.checkpoint, dtype=self.dtype, num_shards=self.num_shards, progress=progress
            ).model
        mesh = make_mesh(self.num_shards)
        return random_model(self.config, dtype=np.dtype(jnp.dtype(self.dtype)), mesh=mesh)
