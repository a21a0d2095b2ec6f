"""What a checkpoint is, and whether it is still the same, without loading its weights."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from pensieve_jax.core.model_shape import ModelShape
from pensieve_jax.models import orbax_checkpoint
from pensieve_jax.models.families import abstract_model
from pensieve_jax.models.gguf_source import open_gguf
from pensieve_jax.models.interface import ModelSpec
from pensieve_jax.models.loading import (
    CheckpointFormat,
    config_and_dtype,
    detect_format,
    gguf_file,
)
from pensieve_jax.models.safetensors_source import (
    read_json,
    safetensors_files,
    tensor_offsets,
)
from pensieve_jax.models.shape import shape_of

SAMPLES_PER_TENSOR = 8
SAMPLE_BYTES = 4096
"""Training moves nearly every weight, so a few pages of each tensor tell two checkpoints apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint at a glance.

    Attributes:
        family: the `model_type` of its configuration.
        format: how it is stored.
        num_parameters: weights, a shared one counted once.
        dtype: in which it is loaded unless asked otherwise.
        size_bytes: of the weights in `dtype`.
        file_bytes: of the weight files.
        spec: of the model.
        shape: what step times depend on, on one device.
    """

    family: str
    format: CheckpointFormat
    num_parameters: int
    dtype: np.dtype
    size_bytes: int
    file_bytes: int
    spec: ModelSpec
    shape: ModelShape


def describe_checkpoint(path: str | Path) -> CheckpointInfo:
    """Describe a checkpoint from its configuration and headers. Raises as `load_model`."""
    path = Path(path)
    config, dtype = config_and_dtype(path)
    model = abstract_model(config, dtype=dtype)
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    num_parameters = sum(int(np.prod(parameter.shape)) for parameter in parameters)
    return CheckpointInfo(
        family=config["model_type"],
        format=detect_format(path),
        num_parameters=num_parameters,
        dtype=dtype,
        size_bytes=num_parameters * dtype.itemsize,
        file_bytes=sum(file.stat().st_size for file in _weight_files(path)),
        spec=model.spec,
        shape=shape_of(model),
    )


def checkpoint_fingerprint(path: str | Path) -> str:
    """A short text that changes when the configuration or the weights do.

    It covers config.json, the names, sizes and headers of the weight files, and samples of the bytes of each
    tensor: some megabytes are read where the weights have gigabytes.

    Returns:
        64 hexadecimal digits (SHA-256).

    Raises:
        CheckpointError: nothing loadable there, or a file is truncated.
    """
    path = Path(path)
    digest = hashlib.sha256()
    if detect_format(path) is not CheckpointFormat.GGUF:
        read_json(path / "config.json")
        _add(digest, (path / "config.json").read_bytes())
    for file in _weight_files(path):
        size = file.stat().st_size
        _add(digest, f"{file.name}:{size}".encode())
        header_bytes, tensors = _layout(file, size)
        with file.open("rb") as handle:
            _add(digest, handle.read(header_bytes))
            for start, length in tensors:
                for offset, count in _samples(start, length):
                    handle.seek(offset)
                    _add(digest, handle.read(count))
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    digest.update(struct.pack("<Q", len(data)))  # So that no two lists of parts run together alike.
    digest.update(data)


def _weight_files(path: Path) -> list[Path]:
    match detect_format(path):
        case CheckpointFormat.GGUF:
            return [gguf_file(path)]
        case CheckpointFormat.SAFETENSORS:
            return safetensors_files(path)
        case CheckpointFormat.ORBAX:
            weights = path / orbax_checkpoint.WEIGHTS_FOLDER
            return sorted(file for file in weights.rglob("*") if file.is_file())


def _layout(file: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the header, and (offset, bytes) of each tensor; a file of another kind is one tensor."""
    match file.suffix.lower():
        case ".gguf":
            reader = open_gguf(file)
            tensors = [(int(tensor.data_offset), int(tensor.n_bytes)) for tensor in reader.tensors]
            return int(reader.data_offset), tensors
        case ".safetensors":
            tensors = list(tensor_offsets(file).values())
            return min((start for start, _ in tensors), default=size), tensors
        case _:
            return 0, [(0, size)]


def _samples(start: int, length: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of pieces spread evenly over a tensor, its ends included; all of a small one."""
    if length <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        yield start, length
        return
    stride = (length - SAMPLE_BYTES) / (SAMPLES_PER_TENSOR - 1)
    for i in range(SAMPLES_PER_TENSOR):
        yield start + int(i * stride), SAMPLE_BYTES
