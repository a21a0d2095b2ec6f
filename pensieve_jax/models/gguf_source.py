"""Tensors and configuration of a GGUF file of the Llama family, as llama.cpp writes them.

Names and layouts are turned back into those of transformers: see `convert_hf_to_gguf.py` of llama.cpp for
the other direction.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from gguf.quants import QuantError

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError
from pensieve_jax.models.tensor_source import TensorInfo

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_MODULE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_TOP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT_TYPES: Mapping[GGMLQuantizationType, np.dtype] = MappingProxyType(
    {
        GGMLQuantizationType.F32: np.dtype(np.float32),
        GGMLQuantizationType.F16: np.dtype(np.float16),
        GGMLQuantizationType.BF16: np.dtype(jnp.bfloat16),
    }
)


def open_gguf(file: Path) -> GGUFReader:
    """The file's metadata and the map of its tensors.

    The reader of the file that was opened last is kept: walking over a vocabulary takes seconds, and
    weights, tokenizer and fingerprint each need it. It maps the file and holds little memory of its own.

    Raises:
        CheckpointError: missing, truncated or not a GGUF file.
    """
    try:
        status = file.stat()
        return _read_gguf(file.resolve(), status.st_size, status.st_mtime_ns)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    # The reader checks little: a short or damaged file shows as whatever numpy or decoding raises.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise CheckpointError(f"{file}: truncated or not a GGUF file: {error}") from error


@lru_cache(maxsize=1)
def _read_gguf(file: Path, size: int, modified_ns: int) -> GGUFReader:
    """A reader; `size` and `modified_ns` tell a changed file from the one that was read."""
    return GGUFReader(file)


class GgufMetadata:
    """The key/value pairs of a file, ticked off as they are read."""

    def __init__(self, reader: GGUFReader, file: Path) -> None:
        self._reader, self._file = reader, file
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as a Python value, `default` where the key is absent."""
        self._read.add(key)
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The value; raises `CheckpointError` where the key is absent."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._file}: metadata {key} is missing")
        return value

    def refuse_rest(self, prefix: str) -> None:
        """Check that every set key under `prefix` was read; raises `UnsupportedModelError`."""
        for key, field in self._reader.fields.items():
            if not key.startswith(prefix) or key in self._read:
                continue
            value = field.contents()
            if value:
                raise UnsupportedModelError(
                    f"{self._file}: metadata {key}={value!r} is not supported: "
                    "it may change what the model computes"
                )


class GgufSource:
    """A `TensorSource` over a GGUF file.

    Quantised tensors are dequantised exactly, one at a time, to float32; a file that has any is therefore
    meant for float32. Ask the loader for another dtype to save memory.

    Raises:
        CheckpointError: truncated, or a tensor or metadata is missing.
        UnsupportedModelError: another architecture, or metadata that asks for other mathematics.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        reader = open_gguf(file)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        metadata = GgufMetadata(reader, file)
        self._architecture = metadata.require("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file}: architecture {self._architecture!r} is not supported, "
                f"expected one of {list(ARCHITECTURES)}"
            )
        self.config: Mapping[str, Any] = self._read_config(metadata)
        self._gguf_names = {
            self._transformers_name(name): name for name in self._tensors if name != _ROPE_FACTORS
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(gguf_name) for name, gguf_name in self._gguf_names.items()
        }
        self.dtype = self._own_dtype()

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        gguf_name = self._gguf_names[name]
        values = self._dequantise(gguf_name)
        if self._architecture == "llama" and ".attn_q." in gguf_name:
            return _undo_permutation(values, self.config["num_attention_heads"])
        if self._architecture == "llama" and ".attn_k." in gguf_name:
            return _undo_permutation(values, self.config["num_key_value_heads"])
        return values

    def _dequantise(self, gguf_name: str) -> np.ndarray:
        tensor = self._tensors[gguf_name]
        kind = tensor.tensor_type
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            return np.array(tensor.data)
        try:
            values = dequantize(tensor.data, kind)
        except (NotImplementedError, QuantError) as error:
            raise UnsupportedModelError(
                f"{self._file}: tensor {gguf_name} has type {kind.name}, which can't be dequantised"
            ) from error
        return values.astype(self._info(gguf_name).dtype, copy=False)

    def _info(self, gguf_name: str) -> TensorInfo:
        tensor = self._tensors[gguf_name]
        return TensorInfo(
            shape=tuple(int(size) for size in reversed(tensor.shape)),  # GGUF lists the fastest axis first
            dtype=_FLOAT_TYPES.get(tensor.tensor_type, np.dtype(np.float32)),
            file=self._file,
        )

    def _own_dtype(self) -> np.dtype:
        # Files keep norms in float32 whatever the matrices are in.
        dtypes = {info.dtype for info in self.tensors.values() if len(info.shape) > 1}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def _transformers_name(self, gguf_name: str) -> str:
        if gguf_name in _TOP_NAMES:
            return _TOP_NAMES[gguf_name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
        if match and match[2] in _MODULE_NAMES:
            return f"model.layers.{match[1]}.{_MODULE_NAMES[match[2]]}.{match[3]}"
        return gguf_name  # The loader refuses it as a tensor that the model has no use for.

    def _read_config(self, metadata: GgufMetadata) -> dict[str, Any]:
        arch = self._architecture
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self._file}: tensor token_embd.weight is missing")
        hidden_size = metadata.require(f"{arch}.embedding_length")
        num_heads = metadata.require(f"{arch}.attention.head_count")
        head_dim = metadata.get(f"{arch}.attention.key_length", hidden_size // num_heads)
        for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
            if (value := metadata.get(key, head_dim)) != head_dim:
                raise UnsupportedModelError(f"{self._file}: metadata {key}={value}, expected {head_dim}")
        config = {
            "model_type": arch,
            "hidden_size": hidden_size,
            "num_hidden_layers": metadata.require(f"{arch}.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": metadata.require(f"{arch}.feed_forward_length"),
            "max_position_embeddings": metadata.require(f"{arch}.context_length"),
            "rms_norm_eps": metadata.require(f"{arch}.attention.layer_norm_rms_epsilon"),
            "vocab_size": int(embedding.shape[1]),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_theta": metadata.get(f"{arch}.rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(metadata),
        }
        for token in ("bos", "eos"):
            config[f"{token}_token_id"] = metadata.get(f"tokenizer.ggml.{token}_token_id")
        if arch == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
            if window := metadata.get("llama.attention.sliding_window"):
                config |= {"model_type": "mistral", "sliding_window": window}
                config["attention_bias"] = None
        metadata.get(f"{arch}.vocab_size")  # The table itself says it.
        metadata.refuse_rest(f"{arch}.")
        return config

    def _rope_scaling(self, metadata: GgufMetadata) -> dict[str, Any] | None:
        prefix = f"{self._architecture}.rope.scaling."
        kind = metadata.get(f"{prefix}type", "none")
        factor = metadata.get(f"{prefix}factor")
        original = metadata.get(f"{prefix}original_context_length")
        if _ROPE_FACTORS in self._tensors:
            factors = [float(value) for value in self._dequantise(_ROPE_FACTORS)]
            return {"rope_type": "factors", "factors": factors}
        match kind:
            case "none":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": factor}
            case "yarn":
                yarn = {"rope_type": "yarn", "factor": factor}
                return yarn | ({"original_max_position_embeddings": original} if original else {})
        raise UnsupportedModelError(f"{self._file}: metadata {prefix}type={kind!r} is not supported")


def _undo_permutation(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of each head's two halves: its rotation pairs (2i, 2i + 1)."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
