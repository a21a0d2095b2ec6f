"""Prompts and decoding in steps of their own: the same tokens, never a mixed step."""

from dataclasses import replace

import pytest

from pensieve_jax.engine import Engine
from tests.engine.serving import Chat, config, ids, tiny_model


@pytest.mark.parametrize(("separate", "run_ahead"), [(False, False), (True, True)])
def test_steps_of_either_kind(separate, run_ahead):
    settings = config(device_pages=24, run_ahead=run_ahead)
    settings = replace(settings, scheduler=replace(settings.scheduler, separate_phases=separate))
    with Engine(tiny_model(), None, settings) as engine:
        worker, steps = engine._turns.parts.worker, []
        dispatch = worker.dispatch

        def noting(plan):
            steps.append([len(row.token_ids) for row in plan.rows])
            return dispatch(plan)

        worker.dispatch = noting
        chats = [Chat(engine) for _ in range(3)]
        first = chats[0].submit(ids(100), 12)
        for _ in range(4):
            engine.step()
        others = [chat.submit(ids(90 + i, seed=i), 6) for i, chat in enumerate(chats[1:], 1)]
        chats[0].check(first, ids(100))
        for i, (chat, turn) in enumerate(zip(chats[1:], others, strict=True), 1):
            chat.check(turn, ids(90 + i, seed=i))
        chats[0].turn(ids(40, seed=9), 3)
        engine.check_integrity()
    mixed = [rows for rows in steps if 1 in rows and max(rows) > 1]
    assert bool(mixed) != separate
    assert any(rows and set(rows) == {1} for rows in steps)
