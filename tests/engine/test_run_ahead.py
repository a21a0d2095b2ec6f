"""Steps that are handed over before the tokens of the step before are known: same answers, same receipts."""

import pytest

from pensieve_jax.core.errors import EngineError
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.worker.worker import PendingStep, Worker
from tests.engine.serving import Chat, config, ids, small_engine

SETTINGS = pytest.mark.parametrize("run_ahead", [False, True])


@pytest.fixture
def events(monkeypatch):
    """What the engine has done, in order: a step of so many rows was handed over, or a result was read."""
    seen = []
    dispatch, result = Worker.dispatch, PendingStep.result

    def seen_dispatch(self, plan):
        seen.append(f"step of {len(plan.rows)}")
        return dispatch(self, plan)

    def seen_result(self):
        seen.append("result")
        return result(self)

    monkeypatch.setattr(Worker, "dispatch", seen_dispatch)
    monkeypatch.setattr(PendingStep, "result", seen_result)
    return seen


def test_a_step_is_handed_over_before_the_one_before_is_read(events):
    with small_engine(run_ahead=True) as engine:
        chat = Chat(engine)
        chat.turn(ids(40), max_tokens=4)
        assert events == ["step of 1", *["step of 1", "result"] * 3, "result"], (
            "and none is wasted at the end"
        )
        assert not engine.step()


def test_in_step_each_is_read_before_the_next(events):
    with small_engine(run_ahead=False) as engine:
        Chat(engine).turn(ids(40), max_tokens=4)
    assert events == ["step of 1", "result"] * 4


def test_default_is_in_step_on_a_cpu(events):
    with small_engine() as engine:
        Chat(engine).turn(ids(4), max_tokens=2)
    assert events == ["step of 1", "result"] * 2


def test_a_stop_seen_late_costs_one_token_of_one_row(events):
    """The others go on meanwhile, and what is given out, logged and kept is the same."""
    accounts = []
    for run_ahead in (False, True):
        with small_engine(run_ahead=run_ahead) as engine:
            free = Chat(engine).turn(ids(40), max_tokens=12).token_ids
            stop = free[7]
            at = free.index(stop) + 1
            del events[:]
            chat, beside = Chat(engine), Chat(engine)
            other = beside.submit(ids(30, seed=2), max_tokens=20)
            result = chat.submit(ids(40), max_tokens=12, stop_token_ids=(stop,)).result()
            assert result.finish_reason is FinishReason.STOP
            assert result.token_ids == free[:at]
            beside.check(other, ids(30, seed=2))
            # The prompts are 70 tokens, and a step takes 64.
            assert events.count("step of 2") == 1 + at + run_ahead
            chat.tokens = [*ids(40), *result.token_ids]
            accounts.append(chat.turn([5, 6]).receipt)
    fields = ("tokens_new", "tokens_from_device", "tokens_from_host", "tokens_recomputed", "tokens_output")
    assert [getattr(accounts[0], name) for name in fields] == [getattr(accounts[1], name) for name in fields]


def test_draws_and_penalties_are_those_of_single_steps():
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=5, repetition_penalty=1.5)
    given = [ids(20 + 9 * n, seed=n) for n in range(5)]
    answers = []
    for run_ahead in (False, True):
        with small_engine(run_ahead=run_ahead, device_pages=30) as engine:
            answers.append([[t.token_id for t in r.tokens] for r in engine.generate(given, params)])
    assert answers[0] == answers[1]


def test_pages_of_a_cancelled_turn_are_used_at_once(events):
    """While a step that still reads them is under way; freed pages are filled with NaN behind it."""
    with small_engine(run_ahead=True, device_pages=6, host_pages=0) as engine:
        for moment in range(1, 6):
            first, second = Chat(engine), Chat(engine)
            turn = first.submit(ids(100, seed=moment), max_tokens=40)
            for _ in range(moment):
                engine.step()
            assert events[-1].startswith("step") or events[-2].startswith("step"), "one is under way"
            turn.cancel()
            second.turn(ids(150, seed=moment + 50), max_tokens=20)
            first.assert_rolled_back()
            first.turn(ids(100, seed=moment), max_tokens=3)
            for chat in (first, second):
                chat.conversation.delete()


def test_suspension_waits_for_the_step_under_way():
    """Whoever is put back into the queue knows all of his tokens."""
    with small_engine(run_ahead=True, device_pages=8, host_pages=16) as engine:
        chats = [Chat(engine) for _ in range(3)]
        given = [ids(50 + n, seed=n) for n in range(3)]
        turns = [chat.submit(g, max_tokens=100) for chat, g in zip(chats, given, strict=True)]
        for chat, *pair in zip(chats, turns, given, strict=True):
            chat.check(*pair)
        assert engine.num_suspensions > 0


@SETTINGS
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_step_that_breaks_off_after_it_was_handed_over(monkeypatch, run_ahead, nth):
    with small_engine(run_ahead=run_ahead) as engine:
        bystander = Chat(engine)
        bystander.turn(ids(40, seed=9))
        chats = [Chat(engine) for _ in range(6)]  # four run, two wait
        given = [ids(20 + 7 * n, seed=n) for n in range(6)]
        turns = [chat.submit(g, max_tokens=30) for chat, g in zip(chats, given, strict=True)]
        result, calls = PendingStep.result, iter(range(1, 1000))

        def break_off(self):
            if next(calls) == nth:
                raise RuntimeError("the device broke off in a test")
            return result(self)

        monkeypatch.setattr(PendingStep, "result", break_off)
        failed, said = 0, ""
        for chat, turn, tokens in zip(chats, turns, given, strict=True):
            try:
                chat.check(turn, tokens)
            except EngineError as error:
                said = str(error)
                chat.assert_rolled_back()
                failed += 1
        assert 1 <= failed <= 4
        assert "a step failed" in said and "the device broke off in a test" in said
        for chat in (*chats, bystander):
            chat.turn([5])


def test_setting_reaches_the_engine():
    assert config(run_ahead=True).run_ahead is True
    assert config().run_ahead is None
