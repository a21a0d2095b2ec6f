"""Loading a checkpoint into a model, one tensor at a time, each straight to its devices."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from pensieve_jax.core.errors import CheckpointError, InvalidArgumentError
from pensieve_jax.models import orbax_checkpoint
from pensieve_jax.models.families import abstract_model, checkpoint_tensor_name, family_of
from pensieve_jax.models.gguf_source import GgufSource
from pensieve_jax.models.interface import ServableModel
from pensieve_jax.models.safetensors_source import SafetensorsSource, read_json
from pensieve_jax.models.tensor_source import TensorInfo, TensorSource, resolve_dtype
from pensieve_jax.parallel import TENSOR_AXIS, check_head_sharding, partition_specs
from pensieve_jax.parallel.sharding import parameter_name

logger = logging.getLogger(__name__)
LOADING_THREADS = 4
"""Tensors that are read, converted and put on a GPU at once: one thread is slower than disk and link. Each
holds a tensor beside the weights, which a CPU, where the copy itself is the work, is spared."""

Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes of weights loaded so far and in all."""

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Ends of the names of buffers that old checkpoints carry and that are computed here."""


class CheckpointFormat(Enum):
    """How a checkpoint is stored."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    ORBAX = "orbax"


def load_model(
    path: str | Path, *, dtype: Any = None, mesh: Mesh | None = None, progress: Progress | None = None
) -> ServableModel:
    """Load a model from a Hugging Face folder, a GGUF file or a folder of `convert_checkpoint`.

    Beside the weights themselves, about one tensor at a time is held in host memory.

    Args:
        path: a folder with config.json and safetensors files; a .gguf file, or a folder with exactly one and
            no config.json; or an Orbax checkpoint of ours.
        dtype: of the weights: "float32", "bfloat16", "float16", or None or "auto" for the checkpoint's own.
            Quantised files count as float32.
        mesh: a one-axis mesh over which weights are split; None puts them on the default device.
        progress: see `Progress`.

    Raises:
        CheckpointError: something is missing, truncated, superfluous or of a wrong shape.
        UnsupportedModelError: the checkpoint asks for mathematics that no family here computes.
        InvalidArgumentError: unknown `dtype`, or a model that doesn't divide over the mesh.
    """
    path = Path(path)
    if detect_format(path) is CheckpointFormat.ORBAX:
        config, own_dtype = config_and_dtype(path)
        model = abstract_model(config, dtype=resolve_dtype(dtype, own_dtype))
        nnx.update(model, orbax_checkpoint.restore(path, _with_shardings(model, mesh)))
        if progress is not None:
            size_bytes = parameter_bytes(model)
            progress(size_bytes, size_bytes)
        return model
    return _load_from_source(open_source(path), dtype=dtype, mesh=mesh, progress=progress)


def detect_format(path: Path) -> CheckpointFormat:
    """How the checkpoint at `path` is stored.

    Raises:
        CheckpointError: there is nothing, or nothing that can be loaded.
    """
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return CheckpointFormat.GGUF
        raise CheckpointError(f"{path}: expected a .gguf file or a folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / "config.json").exists():
        is_ours = (path / orbax_checkpoint.WEIGHTS_FOLDER).is_dir()
        return CheckpointFormat.ORBAX if is_ours else CheckpointFormat.SAFETENSORS
    gguf_file(path)
    return CheckpointFormat.GGUF


def gguf_file(path: Path) -> Path:
    """The GGUF file at `path`: itself, or the only one in the folder; raises `CheckpointError`."""
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{path}: no config.json, and {len(files)} .gguf files where one is expected")
    return files[0]


def open_source(path: Path) -> TensorSource:
    """The tensors of a safetensors or GGUF checkpoint. Raises as `load_model`."""
    if detect_format(path) is CheckpointFormat.GGUF:
        return GgufSource(gguf_file(path))
    return SafetensorsSource(path)


def config_and_dtype(path: Path) -> tuple[Mapping[str, Any], np.dtype]:
    """config.json, or what it would say for a GGUF file, and the dtype to load in unless asked otherwise.

    Raises as `load_model`.
    """
    if detect_format(path) is CheckpointFormat.ORBAX:
        config = read_json(path / "config.json")
        return config, orbax_checkpoint.stored_dtype(config, path)
    source = open_source(path)
    return source.config, source.dtype


def parameter_bytes(model: ServableModel) -> int:
    """Bytes of all weights; a shared one counts once."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(_parameters(model)))


def _parameters(model: ServableModel) -> nnx.State:
    return nnx.state(model, nnx.Param)


def _with_shardings(model: ServableModel, mesh: Mesh | None) -> nnx.State:
    """The model's parameters as `jax.ShapeDtypeStruct` that say where each belongs."""
    state = _parameters(model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state)
    if mesh.axis_names != (TENSOR_AXIS,):
        raise InvalidArgumentError(f"mesh axes {mesh.axis_names}: expected ({TENSOR_AXIS!r},)")
    spec = model.spec
    check_head_sharding(num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, num_shards=mesh.size)
    return jax.tree.map(
        lambda leaf, split: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, split)),
        state,
        partition_specs(state, num_shards=mesh.size),
    )


def _load_from_source(
    source: TensorSource, *, dtype: Any, mesh: Mesh | None, progress: Progress | None
) -> ServableModel:
    model = abstract_model(source.config, dtype=resolve_dtype(dtype, source.dtype))
    leaves, structure = jax.tree_util.tree_flatten_with_path(_with_shardings(model, mesh))
    targets = [target for _, target in leaves]
    names = _match_tensors(source, [parameter_name(path) for path, _ in leaves])
    for target, name in zip(targets, names.values(), strict=True):
        _check_shape(source.tensors[name], name, target.shape)
    _check_leftover(source, set(names.values()))

    total_bytes = sum(int(np.prod(target.shape)) * target.dtype.itemsize for target in targets)
    done_bytes = 0
    arrays: list[Any] = [None] * len(targets)
    stored_names = list(names.values())

    def load(i: int) -> int:
        view = source.read(stored_names[i])
        # Always a copy: on the CPU an array may share the memory it is made of, and a file can change.
        values = np.array(view, dtype=targets[i].dtype, order="C")
        arrays[i] = jax.block_until_ready(jax.device_put(values, targets[i].sharding))
        return values.nbytes

    # Largest first: what is held beside the weights is at its peak while few of them are there.
    order = sorted(range(len(targets)), key=lambda i: -int(np.prod(targets[i].shape)))
    with ThreadPoolExecutor(_num_threads(), "pensieve-load") as threads:
        loads = [threads.submit(load, i) for i in order]
        try:
            for loaded in as_completed(loads):
                done_bytes += loaded.result()
                if progress is not None:
                    progress(done_bytes, total_bytes)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    nnx.update(model, jax.tree_util.tree_unflatten(structure, arrays))
    logger.info("loaded %s: %d parameters' arrays, %d bytes", model.spec.name, len(arrays), total_bytes)
    return model


def _num_threads() -> int:
    return 1 if jax.local_devices()[0].platform == "cpu" else LOADING_THREADS


def _match_tensors(source: TensorSource, parameters: list[str]) -> dict[str, str]:
    """The checkpoint's tensor of each parameter; raises `CheckpointError` naming those that are missing."""
    family = family_of(source.config)
    matched, missing = {}, []
    for parameter in parameters:
        name = checkpoint_tensor_name(parameter, family)
        # Checkpoints of the bare decoder lack the outermost "model.".
        for candidate in (name, name.removeprefix("model.")):
            if candidate in source.tensors:
                matched[parameter] = candidate
                break
        else:
            missing.append(name)
    if missing:
        raise CheckpointError(f"{_place(source)}: missing {_some(missing)}")
    return matched


def _check_shape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}"
        )


def _check_leftover(source: TensorSource, used: set[str]) -> None:
    leftover = [n for n in source.tensors if n not in used and not n.endswith(_IGNORED_SUFFIXES)]
    if "lm_head.weight" in leftover:
        # Only a tied model has no use for it; many checkpoints store the table twice.
        leftover.remove("lm_head.weight")
        embedding = next(name for name in used if name.endswith("embed_tokens.weight"))
        if not np.array_equal(source.read("lm_head.weight"), source.read(embedding)):
            raise CheckpointError(
                f"{source.tensors['lm_head.weight'].file}: lm_head.weight differs from {embedding}, "
                "but the configuration says that they are tied"
            )
    if leftover:
        raise CheckpointError(f"{_place(source)}: unexpected {_some(leftover)}")


def _place(source: TensorSource) -> str:
    files = sorted({str(info.file) for info in source.tensors.values()})
    return files[0] if len(files) == 1 else str(Path(files[0]).parent) if files else "checkpoint"


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return f"tensors {shown}" if len(names) <= 5 else f"{len(names)} tensors, among them {shown}"
