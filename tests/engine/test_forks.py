"""Forks: what they share, what is copied for them, and that nobody's answer changes by it."""

import jax
import pytest

from tests.engine.serving import Chat, evict, ids, small_engine


@pytest.fixture(params=[False, True], ids=["in step", "run ahead"])
def engine(request):
    with small_engine(run_ahead=request.param, device_pages=20) as engine:
        yield engine
        engine.settle()
        engine.check_integrity()


def fork_of(chat, **which):
    forked = chat.conversation.fork(**which)
    return Chat(chat.engine, forked.id, tokens=forked.token_ids.tolist())


def test_a_fork_computes_nothing_again(engine):
    chat = Chat(engine)
    chat.turn(ids(40), 6)
    fork = fork_of(chat)
    assert engine.counters.chunks_copied == 1
    chat.turn(ids(5, seed=1))  # writes on where the copy was read
    receipt = fork.turn(ids(6, seed=2)).receipt
    assert (receipt.tokens_from_device, receipt.tokens_recomputed) == (45, 0)


def test_a_fork_of_an_earlier_turn_while_the_source_runs(engine):
    chat = Chat(engine)
    chat.turn(ids(40), 6)
    given = ids(20, seed=1)
    turn = chat.submit(given, 30)
    for _ in range(3):
        engine.step()
    fork = fork_of(chat)
    assert len(fork.tokens) == 46
    assert fork.turn(ids(3, seed=2), 20).receipt.tokens_recomputed == 0
    chat.check(turn, given)


def test_what_is_not_on_the_device_is_computed_again(engine):
    chat = Chat(engine)
    chat.turn(ids(40), 6)
    evict(engine, 20 * 32)
    fork = fork_of(chat)
    assert engine.counters.chunks_copied == 0
    assert fork.turn([3]).receipt.tokens_recomputed == 13


def test_a_copy_that_fails_costs_the_cache_and_no_conversation(engine, monkeypatch):
    chat = Chat(engine)
    chat.turn(ids(40), 6)

    def fail(source, target):
        raise jax.errors.JaxRuntimeError("out of order")

    monkeypatch.setattr(engine._turns.parts.worker, "copy_page", fail)
    fork = fork_of(chat)
    monkeypatch.undo()
    for each in (chat, fork):
        assert each.turn([4, 5]).receipt.tokens_recomputed == 45
