"""KV in 8 bits: answers are those of a computation with rounded keys and values, wherever they come from."""

import random

import jax
import ml_dtypes
import numpy as np
import pytest

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import EngineError, InvalidArgumentError
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.audit import Auditor
from tests.engine.serving import DEVICE_TOKENS, drain, evict, ids, places, small_engine
from tests.engine.test_cached_equals_cold import Driver
from tests.tiny import SPEC, TinyModel, dense_logits

FP8 = "fp8_e4m3"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_drawn_operations_under_pressure(run_ahead):
    driver = Driver(TinyModel(), "tight-host", run_ahead=run_ahead, kv_dtype=FP8)
    driver.play(random.Random(7), 150)
    counters = driver.engine.counters
    assert counters.tokens_from_device > 0
    assert counters.tokens_from_host > 0
    assert counters.gaps > 0
    assert counters.chunks_swapped_in > 0
    assert counters.chunks_dropped > 0
    assert min(driver.cancels, driver.forks, driver.rewinds) > 0
    driver.engine.close()


def logprobs(result):
    return [(token.token_id, token.logprob, token.top_logprobs) for token in result.tokens]


def send(engine, chat, given):
    return engine.submit(chat.id, given, SamplingParams(max_tokens=6, logprobs=5)).result()


def history(engine, chat):
    """Two turns that end within a page."""
    send(engine, chat, ids(70))
    send(engine, chat, ids(9, seed=1))
    return engine.token_ids(chat.id).tolist()


def test_cached_equals_cold_bit_for_bit():
    """The scale of a page is its first token's, whichever batch brings the others: from the device, from the
    host, recomputed over a gap, or all at once, a turn has the same bits."""
    seen = {}
    with small_engine(host_pages=24, batch_invariant=True, kv_dtype=FP8) as engine:
        for way in ("device", "host", "gap", "cold"):
            chat = engine.conversation()
            tokens = history(engine, chat)
            if way == "host":
                evict(engine, DEVICE_TOKENS)
            elif way == "gap":
                cache = engine._turns.cache
                evict(engine, DEVICE_TOKENS)
                pool = engine._turns.parts.worker._mover.pool
                page = cache._ledger.host_page[cache._conversations[chat.id].chunks[0]]
                pool.layers[0][0][page].reshape(-1)[17] ^= 4  # damaged pages are recomputed
            elif way == "cold":
                engine.delete(chat.id)
                chat = engine.conversation()
                given = [*tokens, *ids(5, seed=2)]
                seen[way] = None, logprobs(send(engine, chat, given))
                continue
            result = send(engine, chat, ids(5, seed=2))
            seen[way] = places(result.receipt), logprobs(result)
            engine.delete(chat.id)
        assert seen["device"][0] == (90, 0, 0)
        assert seen["host"][0] == (0, 90, 0)
        assert seen["gap"][0] == (58, 0, 32)
        for way, (_, got) in seen.items():
            assert got == seen["device"][1], way


def test_a_page_and_its_scales_come_back_from_the_host():
    with small_engine(host_pages=24, kv_dtype=FP8) as engine:
        chat = engine.conversation()
        history(engine, chat)
        cache, runner = engine._turns.cache, engine._turns.parts.worker.runner

        def pages():
            chunks = cache._conversations[chat.id].chunks[:2]
            device = np.array([cache._ledger.device_page[chunk] for chunk in chunks], np.int32)
            return np.asarray(runner.gather(device))

        before = pages()
        evict(engine, DEVICE_TOKENS)
        assert places(send(engine, chat, [1]).receipt)[1] > 0
        for layer, (old, new) in enumerate(zip(before, pages(), strict=True)):
            assert old.dtype == np.uint8
            assert old.shape == (2, 2, SPEC.num_kv_heads, 33, SPEC.head_dim)
            assert (old[..., -1, 0] >= 123).all(), "scales"
            np.testing.assert_array_equal(old, new, err_msg=f"layer {layer}")


def test_a_page_that_was_freed_too_early_shows():
    with small_engine(kv_dtype=FP8) as engine:
        chat = engine.conversation()
        history(engine, chat)
        cache = engine._turns.cache
        page = cache._ledger.device_page[cache._conversations[chat.id].chunks[1]]
        engine._turns.parts.worker.poison([page])
        with pytest.raises(EngineError, match="the model's logits are NaN"):
            send(engine, chat, [7, 8])


def test_turns_computed_again_agree():
    with small_engine(host_pages=24, kv_dtype=FP8, recompute_share=1.0) as engine:
        chat = engine.conversation()
        history(engine, chat)
        evict(engine, DEVICE_TOKENS)
        send(engine, chat, [1, 2])
        drain(engine)
        assert engine.checks.turns_recomputed >= 3
        assert engine.checks.turns_different == 0


def test_what_counts_as_a_tie():
    bfloat16 = Auditor(1.0, 0, np.dtype(ml_dtypes.bfloat16), FP8).tolerance
    assert bfloat16 == 16 * (2**-7 * 2**-3) ** 0.5
    assert 1e-3 < Auditor(1.0, 0, np.dtype(np.float32), FP8).tolerance < 3e-3


def test_rounding_is_small_and_there():
    """Log probabilities of what follows random tokens, with and without."""
    tokens = ids(200)
    exact, rounded = (
        np.asarray(jax.nn.log_softmax(dense_logits(TinyModel(), tokens, kind))) for kind in (None, FP8)
    )
    difference = np.abs(exact - rounded).mean()
    assert 1e-3 < difference < 0.3


@pytest.mark.parametrize("wrong", ["fp8", "float8_e4m3fn", "", 8])
def test_bad_kv_dtype(wrong):
    with pytest.raises(InvalidArgumentError, match=r"kv_dtype: got .*, expected None or 'fp8_e4m3'"):
        EngineConfig(tiers=TierConfig(kv_dtype=wrong))
