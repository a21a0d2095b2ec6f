"""The dimensions of a model that is there, or that is only described."""

import jax
import numpy as np
from flax import nnx

from pensieve_jax.core.model_shape import KvDtype, ModelShape
from pensieve_jax.models.interface import ServableModel


def shape_of(model: ServableModel, num_devices: int = 1, *, kv_dtype: KvDtype | None = None) -> ModelShape:
    """What step times and sizes depend on.

    Args:
        model: with its weights, or as `abstract_model` makes it.
        num_devices: how many it is spread over.
        kv_dtype: how keys and values are kept; None: in the model's dtype.
    """
    spec = model.spec
    return ModelShape(
        name=spec.name,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_parameters=num_parameters(model.layers) + num_parameters(model.head),
        num_devices=num_devices,
        bytes_per_value=np.dtype(spec.dtype).itemsize,
        kv_dtype=kv_dtype,
    )


def num_parameters(part: object) -> int:
    """Weights of a module, or of a sequence of them."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(part)))
