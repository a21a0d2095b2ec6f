"""Mesh, partition rules by parameter name, and collectives that are the identity on one device.

The scheme is Megatron's (arXiv 1909.08053): projections that produce heads or hidden units of the
feed-forward are split on their outputs (column-parallel), those that consume them on their inputs
(row-parallel), so that one `psum` per block of layers suffices. The vocabulary is split over the rows of
the embedding table and of the language-model head.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pensieve_jax.core.errors import InvalidArgumentError

TENSOR_AXIS = "tp"
"""Name of the mesh axis over which heads, feed-forward and vocabulary are split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRule:
    """How parameters whose name matches are split.

    Attributes:
        pattern: regular expression, matched against the end of the dotted parameter name
            (`layers.0.self_attn.q_proj.weight`) from the start of a name part.
        spec: the split of each array axis.
        replicate_if_uneven: keep a whole copy on every shard where an axis does not divide, instead of
            raising. Only right for parameters whose module works either way.
    """

    pattern: str
    spec: P
    replicate_if_uneven: bool = False

    def matches(self, name: str) -> bool:
        """Whether this rule speaks about the parameter `name`."""
        return re.search(rf"(?:^|\.)(?:{self.pattern})$", name) is not None


PARTITION_RULES: tuple[PartitionRule, ...] = (
    PartitionRule(pattern=r"(q|k|v|gate|up)_proj\.weight|fc1\.weight", spec=P(TENSOR_AXIS, None)),
    PartitionRule(pattern=r"(q|k|v|gate|up)_proj\.bias|fc1\.bias", spec=P(TENSOR_AXIS)),
    PartitionRule(pattern=r"(o|out|down)_proj\.weight|fc2\.weight", spec=P(None, TENSOR_AXIS)),
    # A row-parallel bias is added once, after the partial products are summed.
    PartitionRule(pattern=r"(o|out|down)_proj\.bias|fc2\.bias", spec=P()),
    PartitionRule(
        pattern=r"(embed_tokens|lm_head)\.table", spec=P(TENSOR_AXIS, None), replicate_if_uneven=True
    ),
    PartitionRule(pattern=r"embed_positions\.table|project_(in|out)\.weight", spec=P()),
    PartitionRule(pattern=r"\w*norm\.(scale|bias)", spec=P()),
)
"""The split of every parameter of the models in `pensieve_jax.models`."""


def make_mesh(num_shards: int, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A one-axis mesh (`TENSOR_AXIS`) over the first `num_shards` of `devices`, by default all of JAX's.

    Raises:
        InvalidArgumentError: `num_shards` is not between 1 and the number of devices.
    """
    available = list(jax.devices() if devices is None else devices)
    if not 1 <= num_shards <= len(available):
        raise InvalidArgumentError(
            f"num_shards={num_shards}: expected 1 to {len(available)}, the number of devices"
        )
    return Mesh(np.array(available[:num_shards]), (TENSOR_AXIS,))


def check_head_sharding(*, num_heads: int, num_kv_heads: int, num_shards: int) -> None:
    """Check that query and key/value heads divide over the shards.

    Shapes alone can't tell: 6 heads of 64 columns divide over 4 shards, but not between heads.

    Raises:
        InvalidArgumentError: a head count is not a multiple of `num_shards`.
    """
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if count % num_shards:
            raise InvalidArgumentError(
                f"{name}={count} can't be split over {num_shards} shards: expected a multiple of {num_shards}"
            )


def parameter_name(path: Sequence[Any]) -> str:
    """Dotted name of a leaf of an `nnx.State`, from the key path that `jax.tree_util` gives."""
    return ".".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))


def partition_specs(state: Any, *, num_shards: int, rules: Sequence[PartitionRule] = PARTITION_RULES) -> Any:
    """The split of every parameter: a tree of the structure of `state` with a `PartitionSpec` at each leaf.

    It serves as `in_specs` of `jax.shard_map` for that state, and, with a mesh, as its shardings.

    Args:
        state: an `nnx.State` of whole (global) arrays or of `jax.ShapeDtypeStruct`.
        num_shards: size of the mesh axis `TENSOR_AXIS`.
        rules: first match wins. A model of your own with other parameter names brings its own.

    Raises:
        InvalidArgumentError: no rule speaks about a parameter, or one of its axes does not divide.
    """

    def spec_of(path: Sequence[Any], leaf: Any) -> P:
        name = parameter_name(path)
        for rule in rules:
            if rule.matches(name):
                return _checked_spec(rule, name, leaf.shape, num_shards)
        raise InvalidArgumentError(f"parameter {name}: no partition rule matches its name")

    return jax.tree_util.tree_map_with_path(spec_of, state)


def _checked_spec(rule: PartitionRule, name: str, shape: tuple[int, ...], num_shards: int) -> P:
    if len(rule.spec) > len(shape):
        raise InvalidArgumentError(
            f"parameter {name} of shape {shape}: its rule is for {len(rule.spec)} axes"
        )
    uneven = [axis for axis, split in enumerate(rule.spec) if split is not None and shape[axis] % num_shards]
    if not uneven:
        return rule.spec
    if rule.replicate_if_uneven:
        return P()
    raise InvalidArgumentError(
        f"parameter {name} of shape {shape}: axis {uneven[0]} can't be split over {num_shards} shards"
    )


def psum(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Sum of `x` over the shards; `x` itself when `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def all_gather(x: jax.Array, axis_name: str | None, *, axis: int) -> jax.Array:
    """The shards' `x`, concatenated along `axis`; `x` itself when `axis_name` is None."""
    return x if axis_name is None else jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)


def axis_index(axis_name: str | None) -> jax.Array | int:
    """This shard's index, i32[]; 0 when `axis_name` is None."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name)
