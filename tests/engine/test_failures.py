"""What happens when a step or a copy fails or comes late: no wrong answer, and no end of the service."""

import asyncio
import random

import jax
import pytest

from host_cache.errors import IntegrityError
from pensieve_jax.core.errors import EngineError
from pensieve_jax.core.types import FinishReason, SamplingParams
from tests.engine.serving import (
    DEVICE_TOKENS,
    Chat,
    assert_nothing_leaks,
    evict,
    ids,
    small_engine,
    tiny_model,
)
from tests.engine.test_cached_equals_cold import Driver
from tests.engine.trouble import break_once, nth, trouble
from tests.tiny import SPEC


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "run ahead"])
def shared_engine(request):
    with small_engine(run_ahead=request.param) as engine:
        trouble(engine)
        yield engine


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    mover = shared_engine._turns.parts.worker._mover
    mover.fails_in = mover.fails_out = mover.late = lambda: False
    assert_nothing_leaks(shared_engine)


@pytest.fixture
def mover(engine):
    return engine._turns.parts.worker._mover


# -- a step fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["before", "after", "pool lost"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_step_fails(engine, monkeypatch, step, way):
    bystander = Chat(engine)
    bystander.turn(ids(40, seed=9))
    chats = [Chat(engine) for _ in range(6)]  # four run, two wait
    given = [ids(20 + 7 * n, seed=n) for n in range(6)]
    chats[0].turn(ids(10))
    turns = [chat.submit(tokens, max_tokens=30) for chat, tokens in zip(chats, given, strict=True)]
    queued = chats[0].submit([8])
    for _ in range(step):
        engine.step()
    break_once(monkeypatch, engine._turns.parts.worker._runner, way)
    assert engine.step()
    failed = [turn.done for turn in turns]
    assert failed[0] and not any(failed[4:])
    assert (step == 0) or sum(failed) == 4
    for chat, turn, tokens, has_failed in zip(chats, turns, given, failed, strict=True):
        if has_failed:
            with pytest.raises(
                EngineError, match=r"a step failed, .* RuntimeError: the device broke off in a"
            ):
                turn.result()
            chat.assert_rolled_back()
        else:
            chat.check(turn, tokens)
    chats[0].check(queued, [8])
    for chat in (*chats, bystander):
        chat.turn([5])


def test_suspended_turn_survives_a_failed_step(monkeypatch):
    with small_engine(device_pages=8, host_pages=16) as engine:
        chats = Chat(engine), Chat(engine)
        given = ids(60), ids(60, seed=1)
        turns = [chat.submit(tokens, max_tokens=110) for chat, tokens in zip(chats, given, strict=True)]
        while engine.num_suspensions == 0:
            engine.step()
        break_once(monkeypatch, engine._turns.parts.worker._runner, "pool lost")
        engine.step()
        with pytest.raises(EngineError, match="a step failed"):
            turns[0].result()
        result = chats[1].check(turns[1], given[1])
        assert result.receipt.suspensions == 1
        assert result.receipt.tokens_restored > 60, "what had been computed is computed again"
        chats[0].turn([3])


def test_failed_step_in_the_engines_thread(monkeypatch):
    with small_engine(background=True) as engine:
        chat = Chat(engine)
        chat.turn(ids(40))
        for wait in (lambda turn: turn.result(), list, lambda turn: asyncio.run(_awaited(turn))):
            break_once(monkeypatch, engine._turns.parts.worker._runner, "pool lost")
            with pytest.raises(EngineError, match="a step failed"):
                wait(chat.submit([1, 2]))
            chat.assert_rolled_back()
            chat.turn([3])


async def _awaited(turn):
    return await turn


def test_failure_that_nothing_recovers_from(monkeypatch):
    """Nobody waits for ever for an engine that can't go on."""
    with small_engine(background=True) as engine:
        chat = Chat(engine)
        chat.turn(ids(40))

        def schedule(now):
            raise IntegrityError("the books are wrong in a test")

        monkeypatch.setattr(engine._turns.scheduler, "schedule", schedule)
        turns = engine._thread.call(lambda: [engine.submit(chat.id, [n]) for n in (1, 2)])  # before a step
        with pytest.raises(EngineError, match="the engine failed: IntegrityError: the books are wrong"):
            asyncio.run(_awaited(turns[0]))
        for call in (turns[1].result, lambda: chat.submit([3])):
            with pytest.raises(EngineError, match="the engine failed: IntegrityError"):
                call()
        chat.assert_rolled_back()


# -- copies fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("call", range(1, SPEC.num_layers + 1))
def test_swap_in_fails(engine, mover, call, beside):
    """What couldn't be loaded is computed, and nobody calls it a hit (faults 12 and 37)."""
    chat, running, newcomer = Chat(engine), Chat(engine), Chat(engine)
    chat.turn(ids(70), 5)
    evict(engine, DEVICE_TOKENS)
    others = []
    if beside:
        others.append((running, running.submit(ids(40, seed=3), max_tokens=20), ids(40, seed=3)))
        engine.step()
        engine.step()
    before = engine.counters
    mover.fails_in = nth(call)
    turn = chat.submit([7, 8], max_tokens=5)
    if beside:
        others.append((newcomer, newcomer.submit([1], max_tokens=3), [1]))
    receipt = chat.check(turn, [7, 8]).receipt
    assert (receipt.tokens_from_device, receipt.tokens_from_host, receipt.tokens_recomputed) == (0, 0, 74)
    assert receipt.suspensions == 0
    after = engine.counters
    assert after.failed_swap_ins - before.failed_swap_ins == 3
    assert after.chunks_swapped_in == before.chunks_swapped_in
    assert after.tokens_from_host == before.tokens_from_host
    for other, *pair in others:
        other.check(*pair)
    result = chat.turn([9])
    assert result.receipt.tokens_from_device == 81


def test_swap_in_of_a_suspended_turn_fails():
    with small_engine(device_pages=8, host_pages=16) as engine:
        mover = trouble(engine)
        chats = Chat(engine), Chat(engine)
        given = ids(60), ids(60, seed=1)
        turns = [chat.submit(tokens, max_tokens=110) for chat, tokens in zip(chats, given, strict=True)]
        mover.fails_in = nth(1)
        for chat, *pair in zip(chats, turns, given, strict=True):
            chat.check(*pair)
        assert turns[1].result().receipt.suspensions == 1
        assert engine.counters.failed_swap_ins > 0
        for chat in chats:
            chat.turn([4])


def test_swap_out_fails(engine, mover):
    """The chunks are in no tier then; the next turn computes them."""
    chat = Chat(engine)
    chat.turn(ids(70), 5)
    before = engine.counters
    mover.fails_out = lambda: True
    evict(engine, DEVICE_TOKENS)
    mover.fails_out = lambda: False
    after = engine.counters
    assert after.failed_swap_outs - before.failed_swap_outs >= 3
    assert after.chunks_swapped_out == before.chunks_swapped_out
    engine.check_integrity()
    receipt = chat.turn([7, 8]).receipt
    assert (receipt.tokens_from_device, receipt.tokens_from_host, receipt.tokens_recomputed) == (0, 0, 74)
    evict(engine, DEVICE_TOKENS)
    assert chat.turn([9]).receipt.tokens_from_host == 80, "the host pages were not lost"


def test_failed_copy_ahead_of_time_costs_nothing(engine, mover):
    """A chunk whose copy failed is still on the device."""
    chat = Chat(engine)
    mover.fails_out = lambda: True
    chat.turn(ids(330), 5)
    Chat(engine).turn([1])  # less than a quarter is free: a copy ahead of time
    engine.settle()
    assert engine.counters.failed_swap_outs > 0
    receipt = chat.turn([7, 8]).receipt
    assert receipt.tokens_from_device == 334


# -- copies come late ----------------------------------------------------------------------------


def test_admission_waits_for_late_copies(engine, mover):
    """What is still on its way to the host is not loaded before it is there (faults 1, 5 and 6)."""
    chat, other = Chat(engine), Chat(engine)
    chat.turn(ids(70), 5)
    mover.late = lambda: True
    large = other.submit(ids(DEVICE_TOKENS - 8, seed=1), max_tokens=2)
    other.check(large, ids(DEVICE_TOKENS - 8, seed=1))
    turn = chat.submit([7, 8])
    for _ in range(5):
        assert engine.step()
        assert not turn.news
    small = Chat(engine)
    behind = small.submit([3])
    engine.step()
    assert not behind.news, "first come, first served"
    mover.late = lambda: False
    result = chat.check(turn, [7, 8])
    assert result.receipt.tokens_from_host == 74
    small.check(behind, [3])


def test_cancelled_while_its_copies_are_late(engine, mover):
    chat, other = Chat(engine), Chat(engine)
    chat.turn(ids(70), 5)
    mover.late = lambda: True
    other.turn(ids(DEVICE_TOKENS - 8, seed=1), max_tokens=2)
    turn = chat.submit([7, 8])
    engine.step()
    turn.cancel()
    assert turn.result().finish_reason is FinishReason.CANCELLED
    chat.conversation.rewind(num_turns=0)
    chat.tokens = []
    result = chat.submit(ids(5))
    engine.step()
    mover.late = lambda: False
    chat.check(result, ids(5))
    engine.settle()
    engine.check_integrity()


def test_deleted_while_its_copies_are_late(engine, mover):
    """The host pages are used again only when the late copies into them have ended (fault 7)."""
    for round_ in range(4):
        chat, other = Chat(engine), Chat(engine)
        chat.turn(ids(150, seed=round_), 5)
        mover.late = lambda: True
        other.turn(ids(DEVICE_TOKENS - 8, seed=1), max_tokens=2)
        chat.conversation.delete()
        third = Chat(engine)
        third.turn(ids(60, seed=2), 3)
        mover.late = lambda: False
        engine.settle()
        other.turn([4])
        third.turn([5])
        for done in (other, third):
            done.conversation.delete()


def test_random_trouble():
    """Random operations while copies fail and come late in both directions."""
    driver = Driver(tiny_model(), "tight-host", run_ahead=True)
    mover, drawn = trouble(driver.engine), random.Random(12)  # how often it is asked depends on time
    mover.fails_in = lambda: drawn.random() < 0.25
    mover.fails_out = lambda: drawn.random() < 0.15
    mover.late = lambda: drawn.random() < 0.4
    driver.play(random.Random(19), 600)
    counters = driver.engine.counters
    assert counters.chunks_swapped_in > 0
    assert counters.failed_swap_ins > 0
    assert counters.failed_swap_outs > 0
    driver.engine.close()


def test_failing_log_rolls_the_turn_back(engine, monkeypatch):
    """A turn that can't be made durable is not given out as finished."""
    chat = Chat(engine)
    chat.turn(ids(40))

    def append_turn(*_):
        raise EngineError("the disk is full in a test")

    monkeypatch.setattr(engine._conversations._log, "append_turn", append_turn)
    with pytest.raises(EngineError, match="the disk is full"):
        chat.conversation.send([1, 2], SamplingParams(max_tokens=3))
    chat.assert_rolled_back()
    monkeypatch.undo()
    assert chat.turn([3]).receipt.tokens_from_device >= 43


def test_text_that_cannot_be_made_ends_its_turn_alone(engine, monkeypatch):
    chat, other = Chat(engine), Chat(engine)
    chat.turn(ids(40))
    beside = other.submit(ids(30, seed=1), max_tokens=6)
    turn = chat.submit([1, 2], max_tokens=6)
    answer = engine._turns._active[max(engine._turns._active)].answer

    def push(token, *, finished):
        raise UnicodeError("no such character in a test")

    monkeypatch.setattr(answer, "push", push)
    with pytest.raises(
        EngineError, match=r"text of token \d+ can't be made: UnicodeError: no such character"
    ):
        turn.result()
    chat.assert_rolled_back()
    other.check(beside, ids(30, seed=1))
    assert chat.turn([3]).receipt.tokens_from_device >= 43


def test_counters_go_on_after_a_failed_step(engine, monkeypatch):
    chat = Chat(engine)
    chat.turn(ids(40))
    evict(engine, DEVICE_TOKENS)
    chat.turn([1])
    before = engine.counters
    break_once(monkeypatch, engine._turns.parts.worker._runner, "before")
    with pytest.raises(EngineError, match="a step failed"):
        chat.submit([2]).result()
    assert engine.counters == before
    assert before.chunks_swapped_in > 0
    chat.turn([3])
    after = engine.counters
    assert after.tokens_recomputed == before.tokens_recomputed + len(chat.tokens) - 6


# -- the device is lost --------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_lost_device(monkeypatch, tmp_path, background, run_ahead):
    """Turns end with an error that says so, nobody waits for ever, and the log has all that had finished."""
    given = {"background": background, "run_ahead": run_ahead, "log_path": tmp_path / "log"}
    with small_engine(**given) as engine:
        chat, other = Chat(engine, "kept"), Chat(engine)
        chat.turn(ids(40))
        runner = engine._turns.parts.worker._runner

        def lost(*_):
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost in a test")

        monkeypatch.setattr(runner, "run_layered", lost)
        monkeypatch.setattr(runner, "reset_pool", lost)
        said = "the device can't be used any more: .*INTERNAL: the device is lost in a test"
        turns = [chat.submit([1, 2])]
        if not background:
            turns.append(other.submit([3]))
            with pytest.raises(EngineError, match=said):
                engine.step()
        for turn in turns:
            with pytest.raises(EngineError, match=said):
                turn.result()
        with pytest.raises(EngineError, match=said):
            chat.submit([4])
        chat.assert_rolled_back()
        tokens = chat.tokens
    with small_engine(**given) as engine:
        chat = Chat(engine, "kept", tokens=tokens)
        chat.turn([5])
