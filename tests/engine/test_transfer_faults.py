"""Copies between the tiers fail, come late and change their order.

Greedy answers stay those of a fresh computation, no counter lies and no page is lost. Some tests are named
after the faults that systems of this kind have had.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_cache.config import TransferFaults
from tests.engine.serving import (
    DEVICE_TOKENS,
    Chat,
    assert_nothing_leaks,
    drain,
    evict,
    ids,
    places,
    small_engine,
)
from tests.engine.test_cached_equals_cold import POOLS, Drivers
from tests.tiny import TinyModel

NONE = TransferFaults(fail=0, delay=0, reorder=0)


def set_faults(engine, **shares):
    mover = engine._turns.parts.worker._mover
    mover._faults = TransferFaults(**{"fail": 0, "delay": 0, "reorder": 0, **shares})
    mover._random = random.Random(mover._faults.seed)
    return mover


# -- whatever happens ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drivers():
    made = Drivers(TinyModel(), transfer_faults=NONE)
    yield made
    made.close()


@settings(max_examples=20, deadline=None)
@given(
    case=st.sampled_from([("smallest", True), ("large-host", False), ("large-host", True)]),
    seed=st.integers(0, 2**32),
    length=st.integers(10, 40),
    fail=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    delay=st.sampled_from([0.0, 0.3, 1.0]),
    reorder=st.sampled_from([0.0, 1.0]),
)
def test_cached_equals_cold_under_faults(drivers, case, seed, length, fail, delay, reorder):
    with drivers.get(*case) as driver:
        play_under_faults(driver, seed, length, fail=fail, delay=delay, reorder=reorder)
    driver.engine.settle()
    driver.engine.check_integrity()
    ledger = driver.engine._turns.cache._ledger
    assert (len(ledger._device.free_pages()), len(ledger._host.free_pages())) == POOLS[case[0]]


def play_under_faults(driver, seed, length, **shares):
    engine = driver.engine
    mover = set_faults(engine, seed=seed, **shares)
    before, met_before = engine.counters, replace(mover.counters)
    driver.play(random.Random(seed), length)
    after, met = engine.counters, mover.counters
    refused = met.failed_loads + met.broken_loads - met_before.failed_loads - met_before.broken_loads
    failed_swap_ins = after.failed_swap_ins - before.failed_swap_ins
    assert failed_swap_ins >= refused, "with one load that breaks off all of its step fail"
    assert refused or not failed_swap_ins
    failed_swap_outs = after.failed_swap_outs - before.failed_swap_outs
    assert failed_swap_outs <= met.failed_stores - met_before.failed_stores, "nobody waits for some"
    if not any(shares.values()):
        assert met == met_before


def test_every_kind_of_fault_was_met():
    """Conversations take turns on a device that holds two of five."""
    with small_engine(host_pages=40, run_ahead=True, transfer_faults=TransferFaults(seed=5)) as engine:
        chats = [Chat(engine) for _ in range(5)]
        for number in range(14):
            for chat in chats:
                if number % 3 == 1:
                    chat.conversation.warm()
                    engine.step()
                chat.turn(ids(30, seed=number), 3)
                if len(chat.tokens) > 230:
                    chat.conversation.rewind(num_turns=3)
                    chat.tokens = chat.tokens[:99]
                engine.check_integrity()
        engine.settle()
        counters, met = engine.counters, engine._turns.parts.worker.fault_counters
        assert all(getattr(met, name) > 0 for name in type(met).__slots__), met
        assert counters.failed_swap_ins >= met.failed_loads
        assert counters.chunks_swapped_in > 20
        assert counters.chunks_warmed > 5
        assert 0 < counters.failed_swap_outs <= met.failed_stores, "one that nobody waits for isn't missed"
        assert engine.checks.faults_injected == met.total
        assert engine.checks.pages_damaged == 0, "what has failed is never tried"


# -- one by one ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_engine():
    with small_engine(host_pages=24, transfer_faults=NONE) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    set_faults(shared_engine)
    drain(shared_engine)
    assert_nothing_leaks(shared_engine)
    assert len(shared_engine._turns.cache._ledger._host.free_pages()) == 24


def test_fault_12_failed_load_is_never_taken_as_loaded(engine):
    """And fault 37: what was recomputed is no hit."""
    recomputed = Counter()
    for seed in range(6):
        chat = Chat(engine)
        chat.turn(ids(150, seed=seed), 5)
        evict(engine, DEVICE_TOKENS)
        before = engine.counters
        set_faults(engine, seed=seed, fail=0.5)
        receipt = chat.turn([7, 8]).receipt
        set_faults(engine)
        after = engine.counters
        assert sum(places(receipt)) == 154
        failed = after.failed_swap_ins - before.failed_swap_ins
        loaded = after.chunks_swapped_in - before.chunks_swapped_in
        assert failed + loaded == 5
        assert receipt.tokens_recomputed >= 32 * (failed - 1)
        assert after.tokens_recomputed - before.tokens_recomputed == receipt.tokens_recomputed
        recomputed[failed] += 1
        engine.delete(chat.id)
    assert len(recomputed) > 1, "sometimes more, sometimes fewer"


def test_fault_10_failed_store_is_not_kept_as_if_valid(engine):
    chat = Chat(engine)
    chat.turn(ids(150), 5)
    before = engine.counters
    mover = set_faults(engine, seed=2, fail=0.5)
    stores_before = mover.counters.failed_stores
    evict(engine, DEVICE_TOKENS)
    set_faults(engine)
    failed = engine.counters.failed_swap_outs - before.failed_swap_outs
    assert 0 < failed == mover.counters.failed_stores - stores_before
    receipt = chat.turn([7, 8]).receipt
    assert receipt.tokens_from_host > 0 and receipt.tokens_recomputed > 0
    assert sum(places(receipt)) == 154


def test_fault_1_and_5_late_store_is_not_loaded_before_it_has_ended(engine):
    chat, other = Chat(engine), Chat(engine)
    chat.turn(ids(150), 5)
    mover = set_faults(engine, delay=1.0)
    late = mover.counters.late_stores
    other.turn(ids(DEVICE_TOKENS - 8, seed=1), 2)
    assert mover.counters.late_stores > late
    assert places(chat.turn([7, 8]).receipt) == (0, 154, 0)
    other.turn([1])


def test_fault_7_and_9_pages_of_late_copies_are_not_used_again(engine):
    """Conversations are deleted, released and cancelled while their copies are late; the late bytes come
    all the same, and must hit nobody."""
    for seed in range(5):
        set_faults(engine, seed=seed, delay=1.0, reorder=1.0)
        gone, kept = Chat(engine), Chat(engine)
        gone.turn(ids(150, seed=seed), 5)
        kept.turn(ids(150, seed=seed + 50), 5)
        cancelled = Chat(engine).submit(ids(200, seed=2), max_tokens=4)
        engine.step()
        cancelled.cancel()
        if seed % 2:
            gone.conversation.delete()
        else:
            gone.conversation.release()
        for number in range(3):
            third = Chat(engine)
            third.turn(ids(170, seed=number), 3)
            kept.turn([number])
            third.turn([5])
            third.conversation.delete()
        engine.check_integrity()


def test_suspended_turns_come_back_under_faults():
    """Fault 30: neither output nor order is lost."""
    faults = TransferFaults(seed=4, fail=0.3)
    with small_engine(device_pages=8, host_pages=16, transfer_faults=faults) as engine:
        chats = Chat(engine), Chat(engine)
        given = ids(60), ids(60, seed=1)
        turns = [chat.submit(tokens, max_tokens=110) for chat, tokens in zip(chats, given, strict=True)]
        for chat, *pair in zip(chats, turns, given, strict=True):
            chat.check(*pair)
        assert engine.num_suspensions > 0


def test_chosen_by_configuration():
    with small_engine(host_pages=0, transfer_faults=TransferFaults()) as engine:
        Chat(engine).turn(ids(40))
        assert engine.checks.faults_injected == 0, "there is nothing to copy to"
