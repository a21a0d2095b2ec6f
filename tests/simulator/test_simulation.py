"""The driver: equal to single steps, deterministic, and its figures add up."""

from dataclasses import replace

import pytest
from worlds import A100, small_config, small_workload

from pensieve_jax.simulator import SimConversation, SimTurn, Simulation, StepTimeModel, summarize


def run(conversations, config, **others):
    simulation = Simulation(conversations, config, **others)
    result = simulation.run()
    simulation.cache.check_integrity()
    return result


def one_turn(input_tokens=10, output_tokens=20, arrival_s=0.0, name="a"):
    turn = SimTurn(input_tokens=input_tokens, output_tokens=output_tokens, arrival_s=arrival_s)
    return SimConversation(id=name, turns=(turn,))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["retention-value", "lru", "share-aware", "whole-conversation-lru"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host_pages": 20},
        {"host_pages": 0},
        {"keep_state": False, "host_pages": 0},
        {"device": A100},
        {"device_pages": 200, "max_rows": 4, "step_tokens": 16},
        {"page_tokens": 1, "device_pages": 500, "host_pages": 1000},
        {"hold_swap_outs": False},
        {"swap_out_below": 0.0},
        {"load_s_per_page": 1e-4},
        {"swap_out_below": 0.0, "device": A100},
        {"running_reserve": 0.0, "device_pages": 50, "max_rows": 16},
    ],
)
def test_many_steps_at_once_equal_single_steps(seed, policy, settings):
    prefixes = {"prefix_tokens": 40, "prefixes": 2} if policy == "share-aware" else {}
    conversations = small_workload(seed=seed, rate=(2.0, 20.0, 200.0)[seed], **prefixes)
    config = small_config(policy=policy, max_context_tokens=400, **settings)
    single = run(conversations, replace(config, fast_decode=False))
    fast = run(conversations, config)
    assert single.fast_steps == 0
    assert fast.fast_steps > 0
    assert replace(fast, fast_steps=0) == single


def test_fast_steps_are_most_of_them_under_pressure():
    # past the knee requests wait for pages nearly always
    conversations = small_workload(seed=1, conversations=60, rate=500.0)
    result = run(conversations, small_config(device=A100, page_tokens=32, device_pages=40, max_rows=64))
    assert result.fast_steps > 0.5 * result.steps
    assert max(record.first_step_s - record.arrived_s for record in result.records) > 0


def test_suspensions_are_counted_and_many_steps_at_once_take_them():
    conversations = [one_turn(output_tokens=60, name=name) for name in "abc"]
    config = small_config(device_pages=14, host_pages=30, running_reserve=0.0)
    result = run(conversations, config)
    suspensions = {record.conversation_id: record.suspensions for record in result.records}
    assert suspensions["a"] == 0
    assert suspensions["c"] >= 1
    assert replace(result, fast_steps=0) == run(conversations, replace(config, fast_decode=False))


def test_equal_arguments_give_equal_results():
    config = small_config()
    assert run(small_workload(seed=3), config) == run(small_workload(seed=3), config)
    assert run(small_workload(seed=3), config) != run(small_workload(seed=4), config)


def test_every_turn_ends_once_with_its_tokens():
    conversations = small_workload(seed=5)
    result = run(conversations, small_config(max_context_tokens=100_000, device_pages=400))
    seen = {(record.conversation_id, record.turn): record for record in result.records}
    assert len(seen) == len(result.records) == sum(len(c.turns) for c in conversations)
    for conversation in conversations:
        context = 0
        for index, turn in enumerate(conversation.turns):
            record = seen[conversation.id, index]
            assert record.output_tokens == turn.output_tokens
            cached = record.tokens_from_device + record.tokens_from_host + record.tokens_recomputed
            assert cached == max(0, context - 1)
            assert record.tokens_new == turn.input_tokens + (index > 0)
            assert record.arrived_s <= record.first_step_s < record.first_token_s <= record.end_s
            context += turn.input_tokens + turn.output_tokens


def test_next_turn_comes_after_the_answer_and_the_gap():
    turns = (
        SimTurn(input_tokens=5, output_tokens=5, arrival_s=2.0),
        SimTurn(input_tokens=5, output_tokens=5, gap_s=3.0),
        SimTurn(input_tokens=5, output_tokens=5, gap_s=1.0, arrival_s=100.0),
    )
    records = run([SimConversation(id="a", turns=turns)], small_config()).records
    assert records[0].arrived_s == 2.0
    assert records[1].arrived_s == records[0].end_s + 3.0
    assert records[2].arrived_s == 100.0


def test_one_request_takes_the_time_of_its_steps():
    config = small_config()
    times = StepTimeModel(config.model, config.device)
    record = run([one_turn(output_tokens=3)], config).records[0]
    work = [(10, 55, 10), (1, 11, 11), (1, 12, 12)]
    expected = sum(times.compute_s(times_work) for times_work in map(_work, work))
    assert record.end_s == pytest.approx(expected, rel=1e-12)
    assert record.normalized_latency_s == pytest.approx(expected / 3)


def _work(values):
    from pensieve_jax.simulator import StepWork

    return StepWork(*values)


def test_stateless_recomputes_all_history_and_kept_state_none():
    conversations = small_workload(seed=7, rate=2.0)
    kept = summarize(run(conversations, small_config(device_pages=2000)))
    stateless = summarize(run(conversations, small_config(device_pages=2000, host_pages=0, keep_state=False)))
    assert kept["hit_rate"] == 1.0
    assert stateless["hit_rate"] == 0.0
    assert kept["new_tokens"] == stateless["new_tokens"]


def test_turns_that_fit_no_device_are_refused_and_end_their_conversation():
    turns = (SimTurn(input_tokens=5, output_tokens=5), SimTurn(input_tokens=5000, output_tokens=5))
    conversations = [SimConversation(id="a", turns=turns), one_turn(name="b")]
    result = run(conversations, small_config())
    assert result.refused == 1
    assert len(result.records) == 2


def test_stopping_leaves_turns_out():
    conversations = small_workload(seed=2)
    whole = run(conversations, small_config())
    half = run(conversations, small_config(), stop_s=whole.end_s / 2)
    assert 0 < len(half.records) < len(whole.records)
    assert half.records == whole.records[: len(half.records)]
    single = run(conversations, small_config(fast_decode=False), stop_s=whole.end_s / 2)
    assert replace(half, fast_steps=0) == single


def test_progress_reaches_its_end():
    calls = []
    conversations = small_workload(seed=2, conversations=100)
    run(conversations, small_config(), progress=lambda done, total: calls.append((done, total)))
    turns = sum(len(c.turns) for c in conversations)
    assert calls[-1] == (turns, turns)
    assert calls[0] == (100, turns)


def test_a_common_prefix_is_computed_once():
    conversations = small_workload(seed=8, rate=2.0, prefix_tokens=80)
    shared = summarize(run(conversations, small_config(device_pages=2000)))
    own = summarize(run(conversations, small_config(device_pages=2000, share_prefixes=False)))
    starts = len(conversations) - 1
    assert own["new_tokens"] - shared["new_tokens"] >= 0.9 * 80 * starts


def test_nothing_to_do_ends_at_once():
    result = run([], small_config())
    assert (result.records, result.end_s, result.steps) == ((), 0.0, 0)


def test_warm_up_and_end_bound_the_figures():
    conversations = small_workload(seed=6)
    result = run(conversations, small_config())
    whole = summarize(result)
    middle = summarize(result, warm_up_s=result.end_s / 4, until_s=result.end_s / 2)
    assert 0 < middle["requests"] < whole["requests"] == len(result.records)
    assert whole["served_requests_per_s"] == pytest.approx(len(result.records) / result.end_s)
    assert whole["normalized_latency_s_p50"] <= whole["normalized_latency_s_p99"]
