"""An engine that looks after itself: damaged host pages, wrong state, damaged logs are found and counted."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from pensieve_jax.core.errors import EngineError, InvalidArgumentError
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.audit import Auditor, CheckCounters
from pensieve_jax.store.log import _pack
from tests.engine.serving import DEVICE_TOKENS, Chat, config, drain, ids, in_host, places, small_engine
from tests.engine.trouble import break_once
from tests.tiny import SPEC


def host_page(engine, chat, index):
    cache = engine._turns.cache
    return cache._ledger.host_page[cache._conversations[chat.id].chunks[index]]


def damage(engine, page, layer=0):
    pool = engine._turns.parts.worker._mover.pool
    pool.layers[layer][0][page].reshape(-1).view(np.uint8)[17] ^= 4


# -- checksums -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    with small_engine(host_pages=24) as engine:
        yield engine


@pytest.mark.parametrize("layer", range(SPEC.num_layers))
@pytest.mark.parametrize("index", [0, 1, 2])
def test_damaged_host_page_is_recomputed(engine, caplog, index, layer):
    """One chunk of three has changed in the host: the others are used, and the answer is right."""
    chat = in_host(engine)
    damage(engine, host_page(engine, chat, index), layer)
    counters, checks = engine.counters, engine.checks
    with caplog.at_level(logging.ERROR):
        receipt = chat.turn([7, 8]).receipt
    size = (32, 32, 10)[index]
    assert places(receipt) == (74 - size, 0, size)
    assert "hold other bytes than came" in caplog.text
    after = engine.checks
    assert after.pages_damaged == checks.pages_damaged + 1
    assert after.pages_verified == checks.pages_verified + 3
    assert engine.counters.failed_swap_ins == counters.failed_swap_ins + 1
    assert engine.counters.chunks_swapped_in == counters.chunks_swapped_in + 2
    engine.delete(chat.id)


def test_all_host_pages_damaged(engine):
    chat = in_host(engine)
    for index in range(3):
        damage(engine, host_page(engine, chat, index))
    assert places(chat.turn([7, 8]).receipt) == (0, 0, 74)


def test_damaged_page_is_found_by_a_warm_up(engine):
    chat = in_host(engine)
    damage(engine, host_page(engine, chat, 1))
    chat.conversation.warm()
    drain(engine)
    assert places(chat.turn([7, 8]).receipt) == (42, 0, 32)


def test_damaged_page_beside_a_running_turn(engine):
    chat, other = in_host(engine), Chat(engine)
    damage(engine, host_page(engine, chat, 1))
    running = other.submit(ids(40, seed=3), max_tokens=8)
    engine.step()
    chat.turn([7, 8])
    other.check(running, ids(40, seed=3))


def test_nothing_is_summed_without_paranoia():
    with small_engine(host_pages=24, paranoid=False) as engine:
        chat = in_host(engine)
        assert places(chat.turn([7, 8]).receipt) == (0, 74, 0)
        assert engine.checks == CheckCounters()


def test_healthy_engine_finds_nothing(engine):
    before = engine.checks
    chat = in_host(engine)
    assert places(chat.turn([7, 8]).receipt) == (0, 74, 0)
    after = engine.checks
    assert after.books_checked > before.books_checked
    assert after.pages_summed > before.pages_summed
    assert after.pages_verified == before.pages_verified + 3
    assert after.pages_damaged == before.pages_damaged


# -- not a number --------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [False, True])
def test_fault_36_nan_ends_its_turn_and_no_token_of_it_is_given_out(run_ahead):
    """A page that was freed too early would look like this. The turn after computes everything anew."""
    with small_engine(run_ahead=run_ahead) as engine:
        chat, other = Chat(engine), Chat(engine)
        chat.turn(ids(70), 5)
        cache = engine._turns.cache
        page = cache._ledger.device_page[cache._conversations[chat.id].chunks[1]]
        engine._turns.parts.worker.poison([page])
        beside = other.submit(ids(40, seed=3), max_tokens=8)
        turn, queued = chat.submit([7, 8], max_tokens=9), chat.submit([9])
        with pytest.raises(EngineError, match="the model's logits are NaN"):
            next(iter(turn))
        chat.assert_rolled_back()
        assert places(chat.check(queued, [9]).receipt) == (0, 0, 74)
        other.check(beside, ids(40, seed=3))
        drain(engine)


# -- turns computed again ------------------------------------------------------------------------


def audits(checks):
    return checks.turns_recomputed, checks.turns_different, checks.turns_unreadable


def test_every_turn_computed_again():
    with small_engine(host_pages=24, recompute_share=1.0) as engine:
        chat = Chat(engine)
        chat.turn(ids(70), 5)
        drain(engine)
        held = 12 - len(engine._turns.cache.free_device_pages())
        assert held == 3, "what was computed again keeps no pages"
        Chat(engine).turn(ids(DEVICE_TOKENS - 20, seed=1), 5)
        assert places(chat.turn([7, 8]).receipt)[1] > 0
        chat.conversation.send([1], SamplingParams(max_tokens=3, temperature=1.0, seed=1))
        chat.conversation.send([1], SamplingParams(max_tokens=3, repetition_penalty=1.5))
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        drain(engine)
        assert audits(engine.checks) == (3, 0, 0), "plain greedy turns of conversations in the log"


def test_wrong_state_on_the_device_is_found(caplog):
    """A page of a conversation's KV is overwritten: its next answer is wrong, and that is noticed."""
    with small_engine(recompute_share=1.0, paranoid=False) as engine:
        chat = Chat(engine)
        chat.turn(ids(70), 5)
        drain(engine)
        runner = engine._turns.parts.worker._runner
        page = engine._turns.cache._ledger.device_page[engine._turns.cache._conversations[chat.id].chunks[0]]
        runner.fill(np.array([page]), 3.0)
        assert audits(engine.checks) == (1, 0, 0)
        with caplog.at_level(logging.ERROR):
            chat.conversation.send([7, 8], SamplingParams(max_tokens=20))
            drain(engine)
        assert audits(engine.checks) == (2, 1, 0)
        assert f"conversation {chat.id!r}: token " in caplog.text


@pytest.mark.parametrize("checksum", ["old", "new"])
def test_damaged_log_is_found(caplog, checksum):
    with small_engine(recompute_share=1.0) as engine:
        chat = Chat(engine)
        chat.turn(ids(70), 5)
        drain(engine)
        other = ids(70)
        other[3] ^= 1
        blob, _, crc = _pack(np.array(other))
        connection = engine._conversations._log._connection
        connection.execute("UPDATE turns SET input_ids = ?", (blob,))
        if checksum == "new":
            connection.execute("UPDATE turns SET input_crc32 = ?", (crc,))
        with caplog.at_level(logging.ERROR):
            chat.turn([7, 8])
            drain(engine)
        assert audits(engine.checks) == (1, 0, 1)
        assert ("is damaged" if checksum == "old" else "its tokens differ") in caplog.text


def test_share_and_seed_of_the_sample():
    def drawn(share, seed):
        auditor = Auditor(share, seed, np.dtype(np.float32))
        return [auditor.draws(SamplingParams()) for _ in range(200)]

    assert drawn(0.25, 1) == drawn(0.25, 1) != drawn(0.25, 2)
    assert 20 < sum(drawn(0.25, 1)) < 80
    assert not any(drawn(0.0, 1)) and all(drawn(1.0, 1))


def test_recomputation_survives_failed_steps_and_the_end(monkeypatch):
    with small_engine(recompute_share=1.0, max_rows=1) as engine:
        chat = Chat(engine)
        chat.turn(ids(70), 5)
        waiting = chat.submit([1], 8)
        engine.step()  # the recomputation runs, the turn waits
        break_once(monkeypatch, engine._turns.parts.worker._runner, "before")
        engine.step()
        chat.check(waiting, [1])
        drain(engine)
        assert audits(engine.checks) == (1, 0, 0), "the first one came to nothing"
        chat.turn([2])
        assert engine._turns.has_turns
    assert not engine._turns.has_turns


def test_near_ties_are_no_faults():
    assert Auditor(1.0, 0, np.dtype(jax.numpy.bfloat16)).tolerance == 0.125
    assert Auditor(1.0, 0, np.dtype(np.float32)).tolerance == 1e-3


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_bad_recompute_share(share):
    with pytest.raises(InvalidArgumentError, match="recompute_share: got"):
        replace(config(), recompute_share=share)


def test_closed_engine_still_tells_its_checks():
    with small_engine() as closed:
        Chat(closed).turn([1])
    assert closed.checks.books_checked > 0
