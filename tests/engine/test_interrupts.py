"""Ctrl-C may come between any two instructions of a caller: the engine goes on, without his turn."""

import asyncio
import random
import signal
import sys
import threading
import time

import pytest

from pensieve_jax.core.types import SamplingParams
from tests.engine.serving import Chat, ids, small_engine

OURS = "/pensieve_jax/"


class InterruptAt:
    """Raises KeyboardInterrupt before one instruction of this project's code, counted in this thread."""

    def __init__(self, number):
        self.left = number

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # some version asks for it before settrace
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


@pytest.fixture(scope="module")
def engine():
    with small_engine(background=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def foreground():
    with small_engine() as engine:
        yield engine


@pytest.mark.parametrize("way", ["send", "stream", "read", "foreground"])
def test_interrupt_between_two_instructions(engine, foreground, way):
    """Every fifth instruction of a caller's whole path; then another caller is served."""
    engine = foreground if way == "foreground" else engine
    chat, other = Chat(engine), Chat(engine)
    chat.turn(ids(20))
    calls = {
        "send": lambda: chat.conversation.send([1, 2], SamplingParams(max_tokens=2)),
        "stream": lambda: list(chat.conversation.send([1, 2], SamplingParams(max_tokens=2), stream=True)),
        "foreground": lambda: chat.conversation.send([1, 2], SamplingParams(max_tokens=2)),
        "read": lambda: (chat.conversation.num_turns, chat.conversation.token_ids, engine.counters),
    }
    for number in range(1, 100_000, 5):
        try:
            with InterruptAt(number):
                calls[way]()
            break
        except KeyboardInterrupt:
            pass
        while way == "stream" and engine._turns.has_turns:
            time.sleep(0.001)  # a turn that its caller dropped before he began to read it runs on
        chat.conversation.rewind(num_turns=1)  # refused while a turn of it runs
        other.turn([3], 1)
        if len(other.tokens) > 250:
            other.conversation.rewind(num_turns=0)
            other.tokens = []
    assert number > 100, "the path has more instructions than that"
    assert engine._turns.has_work is False


def test_interrupts_at_any_time(engine):
    """Also while a caller sleeps until the engine has news."""
    chat, main = Chat(engine), threading.main_thread()
    if threading.current_thread() is not main:
        pytest.skip("signals come to the main thread alone")

    def interrupt(*_):
        raise KeyboardInterrupt

    def later(seconds):
        time.sleep(seconds)
        signal.pthread_kill(main.ident, signal.SIGUSR1)

    def talk_until(function, seconds):
        threading.Thread(target=function, args=(seconds,)).start()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            chat.conversation.send([1, 2], SamplingParams(max_tokens=30))
            chat.conversation.rewind(num_turns=0)

    before = signal.signal(signal.SIGUSR1, interrupt)
    delays = random.Random(0)
    try:
        for _ in range(30):
            with pytest.raises(KeyboardInterrupt):
                talk_until(later, delays.uniform(0, 0.02))
    finally:
        signal.signal(signal.SIGUSR1, before)
    turns = chat.conversation.num_turns
    assert not engine._turns.has_turns, "nobody decodes for a caller who is gone"
    chat.conversation.send([3], SamplingParams(max_tokens=2))
    assert chat.conversation.num_turns == turns + 1


def test_interrupted_turn_is_cancelled(engine, monkeypatch):
    """Nobody holds a turn whose `submit` was interrupted while it waited for the engine."""
    chat = Chat(engine)
    chat.turn(ids(20))

    made = []

    def call(function):
        engine_thread.post(lambda: made.append(function()))
        raise KeyboardInterrupt

    engine_thread = engine._thread
    monkeypatch.setattr(engine_thread, "call", call)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(chat.id, [1, 2], SamplingParams(max_tokens=300))
    monkeypatch.undo()
    chat.assert_rolled_back()
    assert made, "there was a turn to cancel"
    assert not engine._turns.has_work
    chat.turn([3])


def test_event_loop_runs_while_a_step_does(engine, monkeypatch):
    """`asend` and a cancelled task don't wait for the step that is under way."""
    chat, other = Chat(engine), Chat(engine)
    step, running, go_on = engine._turns.step, threading.Event(), threading.Event()

    def slow_step():
        running.set()
        assert go_on.wait(60)
        return step()

    monkeypatch.setattr(engine._turns, "step", slow_step)

    async def main():
        first = asyncio.create_task(chat.conversation.asend([1], SamplingParams(max_tokens=3)))
        await asyncio.to_thread(running.wait, 60)
        second = asyncio.create_task(other.conversation.asend([2], SamplingParams(max_tokens=3)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not first.done() and not second.done()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        return await first

    assert len(asyncio.run(main()).tokens) == 3
    other.assert_rolled_back()


def test_abandoned_engine_ends_its_thread():
    engine = small_engine(background=True)
    Chat(engine).turn(ids(5), 1)
    thread = engine._thread._thread
    del engine
    for _ in range(1000):
        if not thread.is_alive():
            break
        time.sleep(0.01)
    assert not thread.is_alive()
