"""Tensor parallelism: the mesh, the partition rules and the collectives of a sharded forward pass."""

from pensieve_jax.parallel.sharding import (
    PARTITION_RULES,
    TENSOR_AXIS,
    PartitionRule,
    all_gather,
    axis_index,
    check_head_sharding,
    make_mesh,
    partition_specs,
    psum,
)

__all__ = [
    "PARTITION_RULES",
    "TENSOR_AXIS",
    "PartitionRule",
    "all_gather",
    "axis_index",
    "check_head_sharding",
    "make_mesh",
    "partition_specs",
    "psum",
]
