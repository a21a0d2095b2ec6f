"""Weights as an Orbax checkpoint, which restores straight onto a mesh.

Each parameter is stored under its dotted name, in the layout in which it is computed with, and in chunks
small enough that a shard reads little more than its own part.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from pensieve_jax.core.errors import CheckpointError
from pensieve_jax.models.tensor_source import FLOAT_DTYPES
from pensieve_jax.parallel.sharding import parameter_name

WEIGHTS_FOLDER = "orbax_weights"
"""Folder of the weights, beside config.json."""

CHUNK_BYTES = 8 << 20
"""Size of the pieces of an array on disk: a shard reads whole pieces."""


def save(folder: Path, state: nnx.State) -> None:
    """Write all parameters below `folder`, which exists and has no weights yet."""
    tree = _by_name(state)
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            (folder / WEIGHTS_FOLDER).absolute(), args=ocp.args.PyTreeSave(tree, save_args=arguments)
        )


def restore(folder: Path, targets: nnx.State) -> nnx.State:
    """Read parameters to where they belong.

    Args:
        folder: what `save` was given.
        targets: a `jax.ShapeDtypeStruct` with a sharding for each parameter.

    Returns:
        The same tree of arrays, cast to the dtypes of `targets`.

    Raises:
        CheckpointError: parameters are missing, superfluous, of another shape or not readable.
    """
    weights = (folder / WEIGHTS_FOLDER).absolute()
    wanted = _by_name(targets)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        _check_shapes(weights, stored_shapes(folder), {name: leaf.shape for name, leaf in wanted.items()})
        arguments = ocp.args.PyTreeRestore(
            wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
        )
        try:
            arrays = checkpointer.restore(weights, args=arguments)
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{weights}: not readable: {error}") from error
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[parameter_name(path)], targets)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each stored parameter; raises `CheckpointError` where the checkpoint is not readable."""
    weights = (folder / WEIGHTS_FOLDER).absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            tree = checkpointer.metadata(weights).item_metadata.tree
        except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{weights}: not an Orbax checkpoint: {error}") from error
    return {name: tuple(leaf.shape) for name, leaf in tree.items()}


def stored_dtype(config: Mapping[str, Any], folder: Path) -> np.dtype:
    """The dtype that `config` says the weights are in; raises `CheckpointError` where it says none."""
    for dtype in FLOAT_DTYPES:
        if config.get("dtype") == str(dtype):
            return dtype
    raise CheckpointError(f"{folder / 'config.json'}: dtype={config.get('dtype')!r}, expected a float dtype")


def _by_name(state: nnx.State) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {parameter_name(path): leaf for path, leaf in leaves}


def _check_shapes(
    weights: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{weights}: missing parameter {name}")
        if found[name] != tuple(shape):
            raise CheckpointError(
                f"{weights}: parameter {name} has shape {list(found[name])}, expected {list(shape)}"
            )
    if extra := sorted(set(found) - set(expected)):
        raise CheckpointError(f"{weights}: unexpected parameter {extra[0]}")
