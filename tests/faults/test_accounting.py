"""Every page is counted once and comes back. The numbers are those of docs/design/faults.md."""

import numpy as np
import pytest

from host_cache.errors import IntegrityError
from pensieve_jax.core.types import FinishReason
from tests.engine.serving import Chat, evict, ids, small_engine
from tests.host_cache.test_manager import Cache
from tests.host_cache.test_policies_and_hints import PROMPT, cache, turn


@pytest.fixture(scope="module")
def engine():
    with small_engine() as engine:
        yield engine


def test_20_a_host_page_is_freed_once():
    cache = Cache(4, host_pages=2)
    cache.turn("a", 8)
    cache.turn("b", 16)
    ledger = cache.manager._ledger
    chunks = list(cache.manager._conversations["a"].chunks)
    pages = [ledger.host_page[chunk] for chunk in chunks]
    cache.manager.forget("a")
    cache.check()
    for page in pages:
        with pytest.raises(IntegrityError):
            ledger._host.release(page)


def test_21_a_duplicate_that_goes_leaves_the_other_page_table_whole():
    """Two turns compute the same tokens at once, so both have pages of their own for them."""
    books = cache(device_pages=8)
    tokens = np.array([*PROMPT, 1], np.int32)
    plans = {}
    for name in ("a", "b"):
        books.manager.open(name, 1.0)
        plans[name] = books.manager.admit(
            name, num_tokens=13, history_tokens=0, now=2.0, reserve_pages=0, token_ids=tokens
        )
        assert plans[name].missing == ((0, 13),)
    pages = [set(books.manager.page_ids(name, 13).tolist()) for name in plans]
    assert pages[0].isdisjoint(pages[1])
    for name, plan in plans.items():
        books.compute(name, plan)
        books.manager.finish(name, 3.0, tokens)
    books.manager.forget("a")
    books.check()
    mine = books.manager._conversations["b"].chunks
    turn(books, "c", [*PROMPT, 9])
    theirs = books.manager._conversations["c"].chunks
    assert set(theirs) <= set(mine) or set(theirs).isdisjoint(mine)
    books.manager.forget("c")
    turn(books, "d", range(50, 66))  # takes what is free
    assert turn(books, "b", [*tokens, 2]).tokens_from_device == 13
    assert set(books.manager._conversations["d"].chunks).isdisjoint(mine)
    books.check()


def test_22_shared_pages_are_counted_once():
    books = cache(device_pages=8)
    turn(books, "a", [*PROMPT, 1])
    tokens = np.array([*PROMPT, 2], np.int32)
    for number in range(4):  # 3 pages for all of them and one for each
        name = f"b{number}"
        books.manager.open(name, 9.0)
        plan = books.manager.admit(
            name, num_tokens=13, history_tokens=0, now=9.0, reserve_pages=0, token_ids=tokens
        )
        assert plan is not None
        books.check()
        assert books.manager.num_available == 8 - 3 - (number + 1)


@pytest.mark.parametrize("end", ["finish", "suspend"])
def test_23_pins_go_with_those_who_set_them(end):
    books = cache(device_pages=8, host_pages=4)
    tokens = np.array([*PROMPT, 1], np.int32)
    turn(books, "a", tokens)
    for name in ("b", "c"):
        books.manager.open(name, 9.0)
        plan = books.manager.admit(
            name, num_tokens=13, history_tokens=0, now=9.0, reserve_pages=0, token_ids=tokens
        )
        assert plan is not None
    assert books.manager.num_available == 3
    for name in ("b", "c"):
        getattr(books.manager, end)(name, 10.0)
        books.check()
    assert books.manager.num_available == 8, "everything can be evicted again"


@pytest.mark.parametrize("steps", range(6))
def test_24_a_cancel_leaks_no_page_and_shortens_no_conversation(engine, steps):
    chat = Chat(engine)
    chat.turn(ids(100), 5)
    turn_ = chat.submit(ids(150, seed=1), max_tokens=20)
    for _ in range(steps):
        engine.step()
    turn_.cancel()
    assert turn_.result().finish_reason is FinishReason.CANCELLED
    chat.assert_rolled_back()
    receipt = chat.turn(ids(60, seed=2)).receipt  # reaches where the cancelled one has written
    # The last token of the first turn has been computed if the cancelled one had a step.
    assert (receipt.tokens_from_device, receipt.tokens_recomputed) == (104 + (steps > 0), 0)
    chat.conversation.delete()
    engine.settle()
    assert len(engine._turns.cache.free_device_pages()) == engine.cache_config.device_pages


def test_26_the_next_turn_right_after_a_hang_up_has_the_whole_context(engine):
    chat = Chat(engine)
    chat.turn(ids(60), 5)
    stream = iter(chat.submit(ids(20, seed=1), max_tokens=30))
    next(stream)
    stream.close()  # the client hangs up
    receipt = chat.turn([4, 5]).receipt
    assert (receipt.tokens_from_device, receipt.tokens_recomputed) == (65, 0)
    chat.conversation.delete()


def test_38_finished_turns_and_deleted_conversations_leave_nothing_behind(engine):
    def remembered():
        turns = engine._turns
        return len(turns._active), len(turns.cache._conversations), turns.cache.num_chunks

    before = remembered()
    for number in range(30):
        chat = Chat(engine)
        chat.turn(ids(20 + number), 2)
        if number % 3 == 0:
            evict(engine, 200)
        chat.conversation.delete()
    engine.settle()
    assert remembered() == before == (0, 0, 0)
