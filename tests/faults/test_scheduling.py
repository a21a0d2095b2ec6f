"""Nobody waits for ever, nobody is lost. The numbers are those of docs/design/faults.md."""

import pytest

from pensieve_jax.core.errors import RequestTooLargeError
from tests.engine.serving import Chat, ids, small_engine
from tests.host_cache.test_manager import Cache


@pytest.fixture(scope="module")
def crowded():
    """256 tokens for all conversations together."""
    with small_engine(device_pages=8, host_pages=24) as engine:
        yield engine


def test_28_what_never_fits_is_refused_at_once_and_nobody_waits_behind_it(crowded):
    chat, other = Chat(crowded), Chat(crowded)
    with pytest.raises(RequestTooLargeError):
        chat.submit(ids(300), max_tokens=1)
    other.turn([1, 2])
    chat.turn([3])


def test_29_nothing_to_evict_is_an_answer_and_not_a_loop():
    """All pages are in use: the next to leave is asked for a bounded number of times."""
    cache = Cache(6, host_pages=2, swap_out_below=1.0)
    assert cache.admit("a", 24) is not None
    asked = []
    for order in cache.manager._orders:
        peek = order.peek
        order.peek = lambda now, peek=peek: asked.append(now) or peek(now)
    cache.manager.open("b", 1.0)
    assert cache.admit("b", 4) is None
    assert not cache.manager.grow("a", 25, 5.0)
    cache.manager.plan_ahead(6.0)
    assert len(asked) <= 3
    cache.check()


def test_30_a_suspended_turn_keeps_its_output_and_its_place(crowded):
    chats = [Chat(crowded) for _ in range(3)]
    given = [ids(60, seed=n) for n in range(3)]
    turns = [chat.submit(tokens, max_tokens=90) for chat, tokens in zip(chats, given, strict=True)]
    produced, ended, scheduler = [0] * 3, [], crowded._turns.scheduler
    while len(ended) < 3:
        assert crowded.step(), "everybody waits for somebody"
        running, waiting = scheduler._running, [request.id for request in scheduler._waiting._requests]
        assert not waiting or max(running, default=-1) < min(waiting), "nobody runs before who came first"
        for index, turn in enumerate(turns):
            assert turn.news >= produced[index], "a token that was given out is taken back"
            produced[index] = turn.news
            if turn.done and index not in ended:
                ended.append(index)
    assert ended == [0, 1, 2]
    receipts = [chat.check(*pair).receipt for chat, *pair in zip(chats, turns, given, strict=True)]
    assert sum(receipt.suspensions for receipt in receipts) > 0


def test_31_a_turn_evicts_what_is_short_and_not_what_it_needs():
    cache = Cache(8, host_pages=8)
    cache.turn("a", 16)  # 4 pages
    cache.turn("b", 8)  # 2
    cache.admit("c", 12)  # needs 3, 2 are free
    assert len(cache.end_swap_outs()) == 1
    cache.manager.grow("c", 16, 9.0)
    assert len(cache.end_swap_outs()) == 1
