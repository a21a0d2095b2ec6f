"""The open-loop driver: who comes when, what is measured from when, and that nothing is left between runs."""

import math

import numpy as np
import pytest

from benchmarks.serving.clock import RunClock
from benchmarks.serving.driver import serve
from benchmarks.serving.run import RunSettings, run_once
from benchmarks.serving.systems.base import ServingError
from benchmarks.workloads import TokenConversation, Workload
from pensieve_jax.simulator.workload import SimConversation, SimTurn
from tests.benchmarks.fake_systems import OneAtATime, StepClock


def conversation(name, start_s, *turns, gap_s=10.0):
    """Turns are (input tokens, output tokens)."""
    shape = SimConversation(
        id=name,
        turns=tuple(
            SimTurn(
                input_tokens=new, output_tokens=out, **({"gap_s": gap_s} if i else {"arrival_s": start_s})
            )
            for i, (new, out) in enumerate(turns)
        ),
    )
    inputs = tuple(np.full(new, ord(name) + 100 * i, np.int32) for i, (new, _) in enumerate(turns))
    answers = tuple(np.zeros(out, np.int32) for _, out in turns)
    return TokenConversation(shape=shape, inputs=inputs, answers=answers)


def workload(*conversations):
    return Workload(conversations=conversations, settings={})


def test_times_count_from_when_a_turn_was_due():
    clock = StepClock()
    system = OneAtATime(clock)
    run = serve(system, workload(conversation("a", 2.0, (20, 3)), conversation("b", 2.5, (20, 2))), clock)
    a, b = run.records
    # a: 2.0 -> first token 3.0 -> end 4.0. b was due at 2.5, handed over at 3.0, begun at 4.0, ended at 5.5.
    assert (a.arrived_s, a.first_token_s, a.end_s) == (2.0, 3.0, 4.0)
    assert (b.arrived_s, b.first_token_s, b.end_s) == (2.5, 5.0, 5.5)
    assert run.latest_s == 0.5
    assert run.skipped_s == 2.0
    assert system.settled == 1
    assert run.arrivals_s == (2.0, 2.5)


def test_next_turn_comes_its_think_time_after_the_answer_and_history_is_what_was_answered():
    clock = StepClock()
    system = OneAtATime(clock)
    run = serve(system, workload(conversation("a", 0.0, (4, 2), (3, 1), (2, 1), gap_s=7.0)), clock)
    assert [record.arrived_s for record in run.records] == [0.0, 8.5, 16.5]
    last = system.seen[-1][1]
    parts = [[97] * 4, [7] * 2, [197] * 3, [7], [297] * 2]
    assert last.prompt().tolist() == [token for part in parts for token in part]
    assert last.turn == 2
    assert [record.normalized_latency_s for record in run.records] == [0.75, 1.0, 1.0]


def test_turns_after_the_stop_do_not_come_and_unfinished_ones_are_given_up():
    clock = StepClock()
    system = OneAtATime(clock)
    given = workload(
        conversation("a", 0.0, (4, 2), (4, 2), gap_s=100.0),
        conversation("b", 3.0, (4, 400)),
        conversation("c", 5.5, (4, 2)),
    )
    run = serve(system, given, clock, stop_s=5.0, drain_s=4.0)
    assert [record.conversation_id for record in run.records] == ["a"]
    assert run.unfinished == 1
    assert 9.0 < run.end_s < 10.0
    assert system.resets == 2
    assert not system.waiting


def test_refused_turns_end_their_conversation():
    clock = StepClock()
    system = OneAtATime(clock, largest=12)
    run = serve(system, workload(conversation("a", 0.0, (4, 2), (8, 2), (1, 1))), clock)
    assert run.refused == 1
    assert len(run.records) == 1


def test_what_is_left_of_an_earlier_run_is_noticed():
    clock = StepClock()
    given = workload(conversation("a", 0.0, (20, 2)))
    with pytest.raises(ServingError, match="5 tokens of the first turn of 'a' were cached"):
        serve(OneAtATime(clock, leaks=True), given, clock)
    # Conversations that begin alike may share what one of them has computed.
    alike = [conversation("a", 0.0, (20, 2)), conversation("a", 1.0, (20, 2))]
    alike[1] = TokenConversation(
        shape=SimConversation(id="b", turns=alike[1].shape.turns),
        inputs=alike[1].inputs,
        answers=alike[1].answers,
    )
    assert len(serve(OneAtATime(clock, leaks=True), workload(*alike), clock).records) == 2


def test_a_wrong_length_is_an_error():
    clock = StepClock()
    system = OneAtATime(clock)

    def poll(timeout_s):
        events = OneAtATime.poll(system, timeout_s)
        return [event if not hasattr(event, "output") else _short(event) for event in events]

    def _short(event):
        return type(event)(
            conversation_id="a", time_s=event.time_s, output=event.output[:1], counts=event.counts
        )

    system.poll = poll
    with pytest.raises(ServingError, match="a turn ended with 1 tokens, expected 2"):
        serve(system, workload(conversation("a", 0.0, (4, 2))), clock)


def test_figures_leave_the_warm_up_out():
    clock = StepClock()
    system = OneAtATime(clock, keeps=True)
    given = workload(
        conversation("a", 0.0, (20, 4)),
        *(conversation(chr(98 + i), 10.0 + 10 * i, (20, 4), (20, 2), gap_s=4.0) for i in range(3)),
    )
    settings = RunSettings(stop_s=40.0, warm_up_s=5.0, latency_limit_s=0.7)
    figures = run_once(system, given, clock, settings)
    assert figures["requests"] == 6
    assert figures["ttft_s_mean"] == 1.0
    assert figures["tpot_s_p99"] == 0.5
    assert figures["normalized_latency_s_mean"] == pytest.approx((3 * 2.5 / 4 + 3 * 1.5 / 2) / 6)
    assert figures["served_requests_per_s"] == pytest.approx(6 / 33)
    assert figures["output_tokens_per_s"] == pytest.approx(18 / 33)
    assert figures["goodput_requests_per_s"] == pytest.approx(3 / 33)  # 0.625 s a token, not 0.75
    assert figures["offered_requests_per_s"] == pytest.approx(6 / 33)
    assert figures["hit_rate"] == 1.0
    assert figures["hit_rate_device"] == 1.0
    assert figures["new_tokens"] == 120
    assert figures["polls"] == 4 + 3 * 6
    assert figures["memory_bytes"] == 12
    assert figures["unfinished"] == 0


def test_clock_skips_or_sleeps():
    skipping, real = RunClock(skip_idle=True), RunClock()
    skipping.pass_until(1000.0)
    assert 1000.0 <= skipping() < 1001.0
    assert math.isclose(skipping.skipped_s, 1000.0, abs_tol=1.0)
    real.pass_until(0.02)
    assert real() >= 0.02
    assert real.skipped_s == 0
    skipping.pass_until(5.0)  # it has passed already
    assert skipping() < 1001.0
