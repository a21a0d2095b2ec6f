"""Tokenizers built from GGUF metadata equal the ones they describe."""

import json

import gguf
import pytest
from dense_context import GOLDEN_FOLDER

from pensieve_jax.core.errors import CheckpointError, UnsupportedModelError
from pensieve_jax.models import convert_checkpoint, load_tokenizer
from tests.assets import smollm2_path

needs_smollm2 = pytest.mark.skipif(smollm2_path() is None, reason="SmolLM2 was not fetched")
CONTROL, NORMAL, UNKNOWN, BYTE = 3, 1, 2, 6


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(smollm2_path())


@needs_smollm2
def test_smollm2_tokens_equal_transformers(smollm2):
    for entry in json.loads((GOLDEN_FOLDER / "smollm2-tokens.json").read_text()):
        assert smollm2(entry["text"]).input_ids == entry["ids"], entry["text"]
        assert smollm2.decode(entry["ids"]) == entry["text"]


@needs_smollm2
def test_smollm2_chat_template_and_special_tokens(smollm2):
    for entry in json.loads((GOLDEN_FOLDER / "smollm2-greedy.json").read_text()):
        message = {"role": "user", "content": entry["prompt"]}
        ids = smollm2.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        assert ids == entry["prompt_ids"]
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert smollm2.decode([1, 2, 19556], skip_special_tokens=True) == "Hello"
    assert len(smollm2) == 49152


@needs_smollm2
def test_tokenizer_survives_conversion(smollm2, tmp_path):
    """The tokenizer alone: converting the weights of a model of this size is left to the small ones."""
    smollm2.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    again = load_tokenizer(tmp_path)
    text = "<|im_start|>user\nIs 2  3?<|im_end|>"
    assert again(text).input_ids == smollm2(text).input_ids
    assert again.chat_template == smollm2.chat_template
    assert again.eos_token_id == smollm2.eos_token_id


def write_vocabulary(file, model, tokens, types, **fields):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "merges" in fields:
        writer.add_token_merges(fields["merges"])
    if "scores" in fields:
        writer.add_token_scores(fields["scores"])
    if "pre" in fields:
        writer.add_tokenizer_pre(fields["pre"])
    writer.add_bos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


BYTE_TOKENS = ["<s>", *"0123456789abcd!", "Ġ", "Ċ", "ab", "abc", "12", "Ġa"]
BYTE_MERGES = ["a b", "ab c", "1 2", "Ġ a"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["abc", "1", "2", "Ġ", "Ġa", "!"]),
        ("llama-bpe", ["<s>", "abc", "12", "Ġ", "Ġa", "!"]),
        ("qwen2", ["abc", "1", "2", "Ġ", "Ġa", "!"]),
        ("gpt-2", ["abc", "12", "Ġ", "Ġa", "!"]),
    ],
)
def test_pre_tokenizers(pre, expected, tmp_path):
    types = [CONTROL] + [NORMAL] * (len(BYTE_TOKENS) - 1)
    file = write_vocabulary(tmp_path / "v.gguf", "gpt2", BYTE_TOKENS, types, merges=BYTE_MERGES, pre=pre)
    tokenizer = load_tokenizer(file)
    ids = tokenizer("abc12  a!").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc12  a!"


def test_sentencepiece_vocabulary(tmp_path):
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁a", "bc", "▁abc", "▁", "a", "b", "c"]
    tokens = ["<s>", "<unk>", *byte_tokens, *pieces]
    types = [CONTROL, UNKNOWN] + [BYTE] * 256 + [NORMAL] * len(pieces)
    scores = [0.0] * 258 + [-float(i) for i in range(len(pieces))]
    file = write_vocabulary(tmp_path / "v.gguf", "llama", tokens, types, scores=scores)
    tokenizer = load_tokenizer(file)
    ids = tokenizer("abc bca é").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == (["<s>", "▁abc", "▁", "bc", "a", "▁", "<0xC3>", "<0xA9>"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc bca é"


@pytest.mark.parametrize(
    ("model", "pre", "message"), [("bert", "default", "model='bert'"), ("gpt2", "tekken", "pre='tekken'")]
)
def test_unknown_kinds_are_refused(model, pre, message, tmp_path):
    tokens, types = ["<s>", "a", "aa"], [CONTROL, NORMAL, NORMAL]
    file = write_vocabulary(tmp_path / "v.gguf", model, tokens, types, merges=["a a"], pre=pre)
    with pytest.raises(UnsupportedModelError, match=message):
        load_tokenizer(file)


def test_merge_without_a_token_is_refused(tmp_path):
    file = write_vocabulary(tmp_path / "v.gguf", "gpt2", ["<s>", "a"], [CONTROL, NORMAL], merges=["a a"])
    with pytest.raises(CheckpointError, match="its result is not a token"):
        load_tokenizer(file)


def test_folder_without_a_tokenizer():
    with pytest.raises(CheckpointError, match="tokenizer can't be loaded"):
        load_tokenizer(GOLDEN_FOLDER / "llama")


def test_conversion_copies_the_tokenizer(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in (GOLDEN_FOLDER / "llama").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    types = [CONTROL] + [NORMAL] * (len(BYTE_TOKENS) - 1)
    vocabulary = write_vocabulary(tmp_path / "v.gguf", "gpt2", BYTE_TOKENS, types, merges=BYTE_MERGES)
    load_tokenizer(vocabulary).save_pretrained(source)
    convert_checkpoint(source, tmp_path / "orbax")
    converted, original = load_tokenizer(tmp_path / "orbax"), load_tokenizer(vocabulary)
    assert converted("abc12").input_ids == original("abc12").input_ids
