"""The error of 8-bit keys and values: what is measured is what such pages change."""

import numpy as np
import pytest

from benchmarks.kernels.kv_error import (
    AttentionShape,
    Predictor,
    attention_error,
    model_error,
    random_inputs,
    windows,
)
from pensieve_jax.conversations import SourceConversation, SourceTurn
from tests.tiny import VOCAB, TinyModel, dense_logits

DECODE = AttentionShape(rows=3, q_len=1, kv_len=70, heads=4, kv_heads=2, head_dim=64)
PREFILL = AttentionShape(rows=2, q_len=40, kv_len=70, heads=4, kv_heads=2, head_dim=128)


@pytest.mark.parametrize("shape", [DECODE, PREFILL])
def test_attention_error_is_that_of_three_bits(shape):
    assert 0.01 < attention_error(shape, *random_inputs(shape, seed=1)) < 0.08


@pytest.mark.parametrize("shape", [DECODE, PREFILL])
def test_numbers_that_eight_bits_hold_have_no_error(shape):
    q, k, v = random_inputs(shape, seed=2)
    assert attention_error(shape, q, np.sign(k), 4 * np.sign(v)) == 0


def test_a_value_beyond_the_headroom_is_an_error():
    q, k, v = random_inputs(DECODE, seed=3)
    k, v = np.zeros_like(k), np.sign(v)
    v[40] = 1024  # the page's scale is 1/4: it saturates at 112
    assert attention_error(DECODE, q, k, v) > 0.5


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_predictions_are_those_of_the_dense_model(kv_dtype):
    model, token_ids = TinyModel(), np.random.default_rng(4).integers(VOCAB, size=96, dtype=np.int32)
    predicted = Predictor(model, tokens=96, kv_dtype=kv_dtype)(token_ids)
    logits = dense_logits(model, token_ids, kv_dtype)[:-1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(predicted.log_probs, log_probs[np.arange(95), token_ids[1:]], atol=0.01)
    assert (predicted.likeliest == logits.argmax(-1)).mean() > 0.95


def test_model_error_over_two_windows():
    model, random = TinyModel(), np.random.default_rng(5)
    given = [random.integers(VOCAB, size=64, dtype=np.int32) for _ in range(2)]
    error = model_error(model, given)
    assert error.predicted == 2 * 63
    plain, eight_bit = (
        np.concatenate([Predictor(model, tokens=64, kv_dtype=kept)(window).log_probs for window in given])
        for kept in (None, "fp8_e4m3")
    )
    assert error.perplexity_plain == pytest.approx(np.exp(-plain.mean()))
    assert error.perplexity == pytest.approx(np.exp(-eight_bit.mean()))
    assert error.log_prob_change == pytest.approx(np.abs(eight_bit - plain).mean())
    assert 0 < error.log_prob_change < 0.5
    assert 0.7 < error.same_likeliest <= 1


def test_windows_are_the_beginnings_of_conversations_that_fill_them():
    chats = [
        SourceConversation(id=text, turns=(SourceTurn(user=text, assistant=""),))
        for text in ("abcde", "ab", "wxyz")
    ]
    found = windows(chats, lambda chat: [ord(letter) for letter in chat.turns[0].user], tokens=4)
    assert ["".join(map(chr, window)) for window in found] == ["abcd", "wxyz"]
