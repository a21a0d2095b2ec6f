"""Pages on their way from the device."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def all_layers(layers, page_sharding):
    """Pages per layer, [n, *page] each, as they are gathered: one array [num_layers, n, *page]."""
    sharding = NamedSharding(page_sharding.mesh, PartitionSpec(None, *page_sharding.spec))
    return jax.device_put(np.stack(layers), sharding)
