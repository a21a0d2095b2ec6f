"""Tensors of a folder with config.json and safetensors files, whole or sharded."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError
from pensieve_jax.models.tensor_source import FLOAT_DTYPES, TensorInfo

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(jnp.bfloat16),
    }
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those its index names, or `model.safetensors`, or the only one there.

    Raises:
        CheckpointError: none, several without an index, or one that the index names is missing.
    """
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: expected an object 'weight_map'")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{folder}: missing {', '.join(missing)}, named in {INDEX_FILE}")
        return files
    files = [folder / SINGLE_FILE]
    if files[0].is_file():
        return files
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise CheckpointError(f"{folder}: {len(files)} safetensors files, but no {INDEX_FILE}")
    hint = "; convert pytorch_model.bin to safetensors first" if any(folder.glob("*.bin")) else ""
    raise CheckpointError(f"{folder}: no safetensors files{hint}")


class SafetensorsSource:
    """A `TensorSource` over safetensors files. Opening reads the headers only.

    Raises:
        CheckpointError: config.json or a weight file is missing, malformed or truncated.
        UnsupportedModelError: a tensor's dtype is not a float.
    """

    def __init__(self, folder: Path) -> None:
        self.config: Mapping[str, Any] = read_json(folder / "config.json")
        tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for file in safetensors_files(folder):
            tensors.update(_header(file))
            self._offsets.update({name: start for name, (start, _) in tensor_offsets(file).items()})
        self._check_index(folder, tensors)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.dtype = self._own_dtype()

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        info = self.tensors[name]
        if not np.prod(info.shape):
            return np.zeros(info.shape, info.dtype)  # Nothing can't be mapped.
        return np.memmap(info.file, info.dtype, mode="r", offset=self._offsets[name], shape=info.shape)

    @staticmethod
    def _check_index(folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        if not (folder / INDEX_FILE).exists():
            return
        for name, file in read_json(folder / INDEX_FILE)["weight_map"].items():
            if name not in tensors or tensors[name].file.name != file:
                raise CheckpointError(f"{folder / file}: tensor {name} is missing, {INDEX_FILE} names it")

    def _own_dtype(self) -> np.dtype:
        declared = self.config.get("dtype") or self.config.get("torch_dtype")
        for dtype in FLOAT_DTYPES:
            if declared == str(dtype):
                return dtype
        # As transformers does where config.json is silent: that of the weights.
        sizes: dict[np.dtype, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + int(np.prod(tensor.shape))
        dtype = max(sizes, key=lambda dtype: sizes[dtype], default=FLOAT_DTYPES[0])
        return dtype if dtype in FLOAT_DTYPES else FLOAT_DTYPES[0]


def tensor_offsets(file: Path) -> dict[str, tuple[int, int]]:
    """(offset in the file, bytes) of each tensor, in the order of the file.

    Raises:
        CheckpointError: truncated or not a safetensors file.
    """
    _check_whole(file)
    with file.open("rb") as handle:
        # 8 bytes of length, then JSON whose offsets count from its end.
        header_bytes = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(header_bytes))
    header.pop("__metadata__", None)
    ranges = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    return {name: (8 + header_bytes + begin, end - begin) for begin, end, name in ranges}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a safetensors file: {error}") from error


def _check_whole(file: Path) -> None:
    with _open(file):
        pass  # Opening compares the header with the length of the file.


def _header(file: Path) -> dict[str, TensorInfo]:
    tensors = {}
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            piece = handle.get_slice(name)
            dtype = piece.get_dtype()
            if dtype not in _DTYPES:
                raise UnsupportedModelError(
                    f"{file}: tensor {name} has dtype {dtype}, expected one of {sorted(_DTYPES)}"
                )
            tensors[name] = TensorInfo(shape=tuple(piece.get_shape()), dtype=_DTYPES[dtype], file=file)
    return tensors
