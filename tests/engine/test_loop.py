"""The engine's thread: calls before steps, and those that come one after the other before the same step."""

import time

from pensieve_jax.engine import loop
from pensieve_jax.engine.loop import EngineThread


class Counting:
    """Counts its steps, and always has work."""

    steps = 0

    def step(self):
        self.steps += 1
        time.sleep(0.001)
        return True

    def give_up(self, error):
        raise AssertionError from error


def test_calls_in_a_row_come_before_one_step(monkeypatch):
    engine = Counting()
    thread = EngineThread(engine, steps_alone=True)
    assert thread.call(lambda: 1) == 1
    while not engine.steps:
        time.sleep(0.001)
    monkeypatch.setattr(loop, "LINGER_S", 60.0)
    monkeypatch.setattr(loop, "LONGEST_LINGER_S", 60.0)
    before = [thread.call(lambda: engine.steps) for _ in range(20)]
    assert before == [before[0]] * 20
    monkeypatch.setattr(loop, "LINGER_S", 0.0)
    thread.post(lambda: None)  # ends the wait that is under way
    while engine.steps == before[0]:
        time.sleep(0.001)


def test_callers_can_not_keep_it_from_stepping(monkeypatch):
    monkeypatch.setattr(loop, "LONGEST_LINGER_S", 0.0)
    engine = Counting()
    thread = EngineThread(engine, steps_alone=True)
    thread.call(lambda: None)
    while not engine.steps:
        time.sleep(0.001)
    first = engine.steps
    while engine.steps < first + 5:
        thread.call(lambda: None)
