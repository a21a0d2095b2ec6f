"""The dimensions of a model that is there, or that is only described."""

import jax
import numpy as np
from flax import nnx

from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.models.interface import ServableModel


def shape_of(model: ServableModel, num_devices: int = 1) -> ModelShape:
    """What step times and sizes depend on.

    Args:
        model: with its weights, or as `abstract_model` makes it.
        num_devices: how many it is spread over.
    """
    spec = model.spec
    weights = [nnx.state(part) for part in (model.layers, model.head)]
    return ModelShape(
        name=spec.name,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_parameters=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(weights)),
        num_devices=num_devices,
        bytes_per_value=np.dtype(spec.dtype).itemsize,
    )
