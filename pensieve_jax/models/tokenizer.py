"""Tokenizers: from a Hugging Face or Orbax folder as they are, from a GGUF file rebuilt of its metadata."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError
from pensieve_jax.models.gguf_source import GgufMetadata, open_gguf
from pensieve_jax.models.loading import CheckpointFormat, detect_format, gguf_file

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _pre_tokenizer(name: str) -> list[pre_tokenizers.PreTokenizer]:
    """How text is cut before byte pairs are merged (llama.cpp, `llama-vocab.cpp`)."""
    match name:
        case "smollm":
            return [pre_tokenizers.Digits(individual_digits=True), _split(_GPT2_PATTERN)]
        case "llama-bpe" | "llama3" | "llama-v3":
            return [_split(_LLAMA3_PATTERN)]
        case "qwen2":
            return [_split(_QWEN2_PATTERN)]
        case "gpt-2" | "default":
            return [_split(_GPT2_PATTERN)]
    raise UnsupportedModelError(f"GGUF tokenizer.ggml.pre={name!r} is not supported")


# Token types of llama.cpp (`enum llama_token_type`).
_CONTROL, _USER_DEFINED = 3, 4

_SPECIAL_TOKENS: Mapping[str, str] = MappingProxyType(
    {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint, with its special tokens and its chat template if it has one.

    Args:
        path: anything that `load_model` takes.

    Raises:
        CheckpointError: nothing there, or its tokenizer is missing or malformed.
        UnsupportedModelError: a GGUF file's kind of tokenizer is unknown here.
    """
    path = Path(path)
    if detect_format(path) is CheckpointFormat.GGUF:
        return _gguf_tokenizer(gguf_file(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{path}: its tokenizer can't be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{path}: {type(tokenizer).__name__} has no fast form (tokenizer.json)")
    return tokenizer


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    metadata = GgufMetadata(open_gguf(file), file)
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    match kind := metadata.require("tokenizer.ggml.model"):
        case "gpt2":
            backend = _byte_level_bpe(metadata, tokens)
        case "llama":
            backend = _sentencepiece_bpe(metadata, tokens)
        case _:
            raise UnsupportedModelError(f"{file}: tokenizer.ggml.model={kind!r} is not supported")
    backend.add_special_tokens(_added_tokens(metadata, tokens, _CONTROL))
    backend.add_tokens(_added_tokens(metadata, tokens, _USER_DEFINED))
    special = {
        name: tokens[token_id]
        for name, key in _SPECIAL_TOKENS.items()
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    _add_template(backend, metadata, tokens, kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _added_tokens(metadata: GgufMetadata, tokens: Sequence[str], token_type: int) -> list[AddedToken]:
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, normalized=False, special=token_type == _CONTROL)
        for token, its_type in zip(tokens, types, strict=False)
        if its_type == token_type
    ]


def _byte_level_bpe(metadata: GgufMetadata, tokens: Sequence[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.require("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for merge in merges:
        if not vocabulary.keys() >= {*merge, "".join(merge)}:
            raise CheckpointError(f"GGUF tokenizer.ggml.merges: {merge} or its result is not a token")
    # Llama 3 takes a piece that is a token as it is, whatever the merges say.
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=name.startswith("llama")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_pre_tokenizer(name), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(metadata: GgufMetadata, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's byte pair encoding as ordered merges: the pair of the best-scored result goes first."""
    scores: Sequence[float] = metadata.require("tokenizer.ggml.scores")
    ids = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges.extend((score, left, right) for left, right in known)
    merges.sort(key=lambda merge: merge[0], reverse=True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        BPE(
            ids,
            [(left, right) for _, left, right in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_template(backend: Tokenizer, metadata: GgufMetadata, tokens: Sequence[str], kind: str) -> None:
    """Let `encode` add the begin token (and the end token) where the file says so.

    Absent keys mean what they mean to llama.cpp: SentencePiece and Llama 3 vocabularies begin a text.
    """
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre", "").startswith("llama")
    ends: list[Any] = []
    template = ["$A:0"]
    for key, at_front, default in (("bos", True, begins), ("eos", False, False)):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None or not metadata.get(f"tokenizer.ggml.add_{key}_token", default):
            continue
        ends.append((tokens[token_id], token_id))
        template.insert(0 if at_front else len(template), f"{tokens[token_id]}:0")
    byte_level = processors.ByteLevel(trim_offsets=False) if kind == "gpt2" else None
    if ends:
        added = processors.TemplateProcessing(single=template, special_tokens=ends)
        backend.post_processor = processors.Sequence([byte_level, added]) if byte_level else added
    elif byte_level:
        backend.post_processor = byte_level
