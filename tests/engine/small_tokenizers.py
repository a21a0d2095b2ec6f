"""Small tokenizers of the two kinds in use, trained on the spot, with the special tokens of real models."""

import json
from functools import cache

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pensieve_jax.models.tokenizer import load_tokenizer
from tests.assets import smollm2_path

CORPUS = [
    "Hello there, how are you today? I am fine, thank you. What is the weather like in Paris?",
    "The quick brown fox jumps over the lazy dog. The answer to the question is forty-two.",
    "system user assistant You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "<think>\nThe user asks a question, so let me think about the answer.\n</think>\n\nWhy not?",
    "[INST] Hello world [/INST] Hello to you too\n\n  print('hi')\n\tgrüße, naïve café 漢字 🙂🙂",
] * 3

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|endoftext|>",
)


def _wrapped(tokenizer: Tokenizer, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("<think>", special=False)])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@cache
def byte_level(bos: str | None = None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3, Qwen and SmolLM2: byte pairs of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, bos, eos)


@cache
def sentence_piece(*, bos: str | None = "<s>", legacy: bool = True) -> PreTrainedTokenizerFast:
    """As in Llama 2 and Mistral: a space before the text, and bytes for characters without a piece.

    Args:
        bos: the token that begins a text; None for none.
        legacy: also put a space after every special token, as the first of these tokenizers do.
    """
    training = Tokenizer(models.BPE(unk_token="<unk>"))
    training.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    training.train_from_iterator([text for text in CORPUS if "🙂" not in text], trainer)
    model = json.loads(training.to_str())["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        *SPECIAL_TOKENS,
        *byte_tokens,
        *(t for t in model["vocab"] if t not in SPECIAL_TOKENS),
        "\ufffd",
    ]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(content=" ", left=1)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    return _wrapped(tokenizer, bos, "</s>")


@cache
def smollm2() -> PreTrainedTokenizerFast:
    """The real one, or a skipped test."""
    path = smollm2_path()
    if path is None:
        pytest.skip("SmolLM2 was not fetched")
    return load_tokenizer(path)
