"""Pieces add up to the whole text, and end before a stop string however the tokens come."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pensieve_jax.engine.detokenizer import Detokenizer
from tests.engine.small_tokenizers import byte_level, sentence_piece, smollm2

TOKENIZERS = {
    "byte_level": byte_level(),
    "sentence_piece_legacy": sentence_piece(legacy=True),
    "sentence_piece": sentence_piece(legacy=False),
}
TEXTS = st.text(alphabet="ab he\n.é漢🙂👩\u200d", max_size=30)


def whole_text(tokenizer: PreTrainedTokenizerFast, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string."""
    found = [(text.find(string) + len(string), -len(string), string) for string in stop if string in text]
    if not found:
        return text, None
    end, negative_length, string = min(found)
    return text[: end + negative_length], string


def run(detokenizer: Detokenizer, groups: list[list[int]]) -> str:
    return "".join([*(detokenizer.push(group) for group in groups), detokenizer.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # What a tokenizer makes of texts, and what a model may produce: any tokens at all, some of them past the
    # vocabulary, as embeddings are padded.
    encoded = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    any_ids = st.lists(st.integers(0, len(tokenizer) + 5), max_size=12)
    bytes_only = st.lists(st.integers(10, 265), max_size=6)
    groups = data.draw(st.lists(st.one_of(encoded, any_ids, bytes_only), max_size=8))
    stop = tuple(data.draw(st.lists(st.text(alphabet="ab he\n.é", min_size=1, max_size=4), max_size=3)))

    expected, stop_string = cut(whole_text(tokenizer, [i for group in groups for i in group]), stop)
    grouped = Detokenizer(tokenizer, stop)
    assert run(grouped, groups) == expected
    assert grouped.stop_string == stop_string
    assert grouped.stopped == (stop_string is not None)
    single = Detokenizer(tokenizer, stop)
    assert run(single, [[i] for group in groups for i in group]) == expected
    assert single.stop_string == stop_string


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_given_out_as_soon_as_it_is_certain(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("Hello there, how are you", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    for count, token_id in enumerate(token_ids, start=1):
        piece = detokenizer.push([token_id])
        before, after = (whole_text(tokenizer, token_ids[:n]) for n in (count - 1, count))
        assert before + piece == after
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_held_back() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a👩b", add_special_tokens=False)
    assert len(token_ids) == 5
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in token_ids] == ["a", "", "", "👩", "b"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in token_ids[:3]] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, ("abac", "xyz"))

    def push(text: str) -> str:
        return detokenizer.push(tokenizer.encode(text, add_special_tokens=False))

    assert [push(text) for text in ("1a", "b", "a", "b", "!", "x")] == ["1", "", "", "ab", "ab!", ""]
    assert [push(text) for text in ("y", "a", "ba", "c?")] == ["", "xy", "", ""]
    assert detokenizer.stopped
    assert detokenizer.stop_string == "abac"
    assert push("more") == ""
    assert detokenizer.finish() == ""


def test_of_stop_strings_the_one_that_is_complete_first_counts() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("_abcd", add_special_tokens=False)
    for stop, text, matched in (
        (("abcd", "bc"), "_a", "bc"),
        (("bc", "abc"), "_", "abc"),
        (("d",), "_abc", "d"),
    ):
        detokenizer = Detokenizer(tokenizer, stop)
        assert run(detokenizer, [token_ids]) == text
        assert detokenizer.stop_string == matched


def test_a_stop_string_that_only_the_end_completes() -> None:
    tokenizer = byte_level()
    token_ids = tokenizer.encode("a👩", add_special_tokens=False)[:3]
    detokenizer = Detokenizer(tokenizer, ("a\ufffd",))
    assert run(detokenizer, [token_ids]) == ""
    assert detokenizer.stopped


def test_without_a_tokenizer() -> None:
    detokenizer = Detokenizer(None, ("a",))
    assert run(detokenizer, [[1, 2], [3]]) == ""
    assert not detokenizer.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["\ufffd", "🙂", "ab", "\n"])
def test_the_work_is_linear(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False) * 5000
    detokenizer = Detokenizer(tokenizer, ("a" * 1000, "ab" * 20_000))
    started = time.perf_counter()
    assert run(detokenizer, [[i] for i in token_ids]) == whole_text(tokenizer, token_ids)
    # Quadratic work would take minutes; a hundred times what it takes is no flaky bound.
    assert time.perf_counter() - started < 20


def test_a_real_tokenizer() -> None:
    tokenizer = smollm2()
    text = "Grüße aus 東京 👩‍👩‍👧! <|im_end|>\n\tdef f(x):\n        return x ** 2  # 3.14"
    token_ids = tokenizer.encode(text)
    assert run(Detokenizer(tokenizer), [[i] for i in token_ids]) == text.replace("<|im_end|>", "")
