"""What callers say about their conversations: warm, release, priority, time to live."""

import asyncio
import math
import time

import pytest

from pensieve_jax.core.errors import (
    ConversationBusyError,
    EngineError,
    InvalidArgumentError,
    UnknownConversationError,
)
from pensieve_jax.engine import Engine
from tests.engine.serving import (
    DEVICE_TOKENS,
    Chat,
    Clock,
    assert_nothing_leaks,
    config,
    drain,
    ids,
    in_host,
    places,
    small_engine,
    tiny_model,
)
from tests.engine.trouble import break_once, nth, trouble


@pytest.fixture(scope="module")
def shared_engine():
    with small_engine(host_pages=24) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    drain(shared_engine)
    assert_nothing_leaks(shared_engine)


# -- warm ----------------------------------------------------------------------------------------


def test_warmed_conversation_is_found_on_the_device(engine):
    """A step without rows loads it, although nothing runs (fault 10: it counts as loaded only then)."""
    chat = in_host(engine)
    before = engine.counters
    assert chat.conversation.warm() == 3
    assert engine.step()
    assert not engine.step()
    after = engine.counters
    assert after.chunks_warmed - before.chunks_warmed == 3
    assert after.chunks_swapped_in - before.chunks_swapped_in == 3
    assert after.tokens_from_host == before.tokens_from_host, "no turn has used it yet"
    assert chat.conversation.warm() == 0
    assert places(chat.turn([7, 8]).receipt) == (74, 0, 0)
    assert engine.counters.chunks_swapped_in == after.chunks_swapped_in


def test_warm_in_the_engines_thread():
    with small_engine(background=True) as engine:
        chat = in_host(engine)
        assert chat.conversation.warm() == 3
        deadline = time.monotonic() + 60
        while engine.counters.chunks_swapped_in < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert places(chat.turn([7, 8]).receipt) == (74, 0, 0)


def test_turn_that_comes_before_the_warm_up_has_run(engine):
    chat = in_host(engine)
    chat.conversation.warm()
    before = engine.counters.chunks_swapped_in
    assert places(chat.turn([7, 8]).receipt) == (0, 74, 0)
    assert engine.counters.chunks_swapped_in - before == 3, "once"


def test_warm_beside_running_turns(engine):
    chat, other = in_host(engine), Chat(engine)
    running = other.submit(ids(40, seed=3), max_tokens=8)
    engine.step()
    chat.conversation.warm()
    engine.step()
    assert not running.done
    assert engine.counters.chunks_warmed > 0
    assert places(chat.turn([7, 8]).receipt) == (74, 0, 0)
    other.check(running, ids(40, seed=3))


def test_warm_takes_idle_pages_and_never_those_of_running_turns(engine):
    chat, idle, large = in_host(engine, 100), Chat(engine), Chat(engine)
    idle.turn(ids(40, seed=2))
    running = large.submit(ids(DEVICE_TOKENS - 60, seed=1), max_tokens=30)
    while not running.news:
        engine.step()
    before = engine.counters
    chat.conversation.warm()
    engine.step()
    assert engine.counters.chunks_warmed - before.chunks_warmed <= 1
    large.check(running, ids(DEVICE_TOKENS - 60, seed=1))
    assert large.conversation.num_turns == 1
    assert running.result().receipt.suspensions == 0
    chat.turn([5])
    idle.turn([6])


def test_warm_outlasts_what_is_idle_for_longer():
    """What was loaded isn't the first to leave again."""
    clock = Clock()
    with Engine(tiny_model(), config=config(host_pages=24), clock=clock) as engine:
        chat, other = in_host(engine), Chat(engine)
        other.turn(ids(100, seed=1))
        clock.now += 100
        chat.conversation.warm()
        engine.step()
        clock.now += 1
        Chat(engine).turn(ids(DEVICE_TOKENS - 5 * 32, seed=2), 1)
        assert places(chat.turn([7]).receipt)[0] == 74


def test_warm_of_what_was_released_forked_rewound_or_deleted(engine):
    """The pages of a warm-up that hasn't run or has no one left are not lost (faults 20 to 24)."""
    chats = [in_host(engine) for _ in range(3)]
    for chat in chats:
        chat.conversation.warm()
    chats[0].conversation.release()
    chats[1].conversation.rewind(num_turns=0)
    fork = chats[2].conversation.fork()
    chats[2].conversation.delete()
    engine.step()
    engine.check_integrity()
    assert places(chats[0].turn([1]).receipt) == (0, 0, 74)
    chats[1].tokens = []
    assert places(chats[1].turn([1]).receipt) == (0, 0, 0)
    assert fork.num_turns == 1


def test_failed_warm_up_is_recomputed_and_no_hit():
    """Fault 12, without a turn that waits for the copy."""
    with small_engine(host_pages=24) as engine:
        mover = trouble(engine)
        chat = in_host(engine)
        mover.fails_in = nth(2)
        chat.conversation.warm()
        assert engine.step()
        engine.check_integrity()
        counters = engine.counters
        assert (counters.failed_swap_ins, counters.chunks_swapped_in) == (3, 0)
        assert places(chat.turn([7, 8]).receipt) == (0, 0, 74)


def test_warm_without_state_or_beside_its_own_turn(engine):
    fresh = Chat(engine)
    assert fresh.conversation.warm() == 0
    turn = fresh.submit([1, 2], max_tokens=3)
    assert fresh.conversation.warm() == 0
    fresh.check(turn, [1, 2])


# -- release -------------------------------------------------------------------------------------


def test_release_frees_the_pages_and_keeps_the_conversation(engine):
    chat = Chat(engine)
    chat.turn(ids(70), 5)
    free = len(engine._turns.cache.free_device_pages())
    chat.conversation.release()
    assert len(engine._turns.cache.free_device_pages()) == free + 3
    assert places(chat.turn([7, 8]).receipt) == (0, 0, 74)
    turn = chat.submit([1], max_tokens=3)
    with pytest.raises(ConversationBusyError, match="unfinished turn"):
        chat.conversation.release()
    chat.check(turn, [1])


# -- priority and time to live -------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1])
def test_priority_decides_who_stays(engine, kept):
    chats = [Chat(engine), Chat(engine)]
    for chat in chats:
        chat.turn(ids(70), 5)
    chats[kept].conversation.priority = 1e6
    engine.conversation(chats[1 - kept].id, priority=1e-6)
    Chat(engine).turn(ids(DEVICE_TOKENS - 5 * 32, seed=2), 1)
    assert places(chats[kept].turn([1]).receipt)[0] == 74
    assert places(chats[1 - kept].turn([1]).receipt)[0] < 74


def test_time_to_live():
    clock = Clock()
    with Engine(tiny_model(), config=config(), clock=clock) as engine:
        short = engine.conversation("short", time_to_live_s=30)
        chats = Chat(engine, "short"), Chat(engine, "long")
        for chat in chats:
            chat.turn(ids(70), 5)
        clock.now += 29
        assert places(chats[0].turn([1]).receipt) == (74, 0, 0)
        clock.now += 31
        chats[1].turn([1])
        assert engine.counters.conversations_expired == 1
        assert places(chats[0].turn([1]).receipt) == (0, 0, 79)
        short.time_to_live_s = None
        clock.now += 1000
        assert places(chats[0].turn([1]).receipt) == (84, 0, 0)


def test_hints_outlast_a_failed_step_and_go_to_forks(engine, monkeypatch):
    chat = Chat(engine)
    chat.turn(ids(70), 5)
    conversation = chat.conversation
    conversation.priority, conversation.time_to_live_s = 5, 1e9
    break_once(monkeypatch, engine._turns.parts.worker._runner, "before")
    with pytest.raises(EngineError):
        chat.submit([1]).result()
    for known in (conversation, conversation.fork(), engine.conversation(chat.id)):
        assert (known.priority, known.time_to_live_s) == (5, 1e9)
        cached = engine._turns.cache._conversations[known.id]
        assert (cached.priority, cached.time_to_live_s) == (5, 1e9)
    conversation.delete()
    assert (engine.conversation(chat.id).priority, engine.conversation(chat.id).time_to_live_s) == (1, None)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "2", True, None])
def test_bad_priority(engine, value):
    conversation = engine.conversation()
    conversation.priority = 3
    with pytest.raises(InvalidArgumentError, match=r"priority: got .*, expected a number above 0"):
        conversation.priority = value
    assert conversation.priority == 3
    if value is not None:
        with pytest.raises(InvalidArgumentError, match="priority: got"):
            engine.conversation("never begun", priority=value)
        assert "never begun" not in list(engine.conversation_ids())


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "2", True])
def test_bad_time_to_live(engine, value):
    with pytest.raises(InvalidArgumentError, match=r"time_to_live_s: got .*, expected None or a number >= 0"):
        engine.conversation().time_to_live_s = value


def test_hints_for_nobody(engine):
    conversation = engine.conversation()
    conversation.delete()
    for call in (
        conversation.warm,
        conversation.release,
        lambda: conversation.priority,
        lambda: engine.set_hints(conversation.id, priority=2),
    ):
        with pytest.raises(UnknownConversationError):
            call()
    with small_engine() as closed:
        conversation = closed.conversation()
    for call in (conversation.warm, conversation.release):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_hints_in_asyncio(engine):
    chat = in_host(engine)

    async def main():
        assert await chat.conversation.awarm() == 3
        engine.step()
        result = await chat.conversation.asend([7])
        await chat.conversation.arelease()
        conversation = await engine.arun(lambda: engine.conversation(priority=4.0))
        assert conversation.priority == 4.0
        return result

    assert places(asyncio.run(main()).receipt) == (74, 0, 0)
