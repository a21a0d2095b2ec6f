"""Readers, the common form and arrival times."""

import json
from pathlib import Path

import pytest

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator import (
    PrefixSegment,
    SimConversation,
    SimTurn,
    cut_to_context,
    read_jsonl,
    read_workload,
    sample_conversations,
    with_poisson_arrivals,
    with_time_scale,
    write_jsonl,
)
from pensieve_jax.simulator.mooncake import link_requests
from pensieve_jax.simulator.readers import READERS, estimate_tokens, read_sharegpt
from pensieve_jax.simulator.synthetic import SyntheticWorkload

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


def conversation(*turns, name="a", **others):
    return SimConversation(
        id=name, turns=tuple(SimTurn(input_tokens=i, output_tokens=o) for i, o in turns), **others
    )


def request(time_ms, input_length, output_length, *blocks):
    return {
        "timestamp": time_ms,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(blocks),
    }


# -- our own form


def test_what_is_written_is_read_again(tmp_path):
    conversations = [
        conversation((10, 20), (3, 4)),
        SimConversation(
            id="b",
            turns=(
                SimTurn(input_tokens=1100, output_tokens=5, arrival_s=0.5),
                SimTurn(input_tokens=7, output_tokens=5, gap_s=12.25),
            ),
            prefix=(PrefixSegment(id="system", tokens=1000),),
        ),
    ]
    write_jsonl(tmp_path / "w.jsonl", conversations)
    assert read_jsonl(tmp_path / "w.jsonl") == conversations
    assert read_workload(tmp_path / "w.jsonl", "jsonl") == conversations


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: "),
        ("[]", "got \\[\\], expected an object"),
        ('{"id": "a"}', "'turns' is missing"),
        ('{"id": "a", "turns": []}', "turns: got none"),
        ('{"id": "a", "turns": [{"input_tokens": 0, "output_tokens": 1}]}', "input_tokens: got 0"),
        ('{"id": "a", "turns": [{"input_tokens": 1}]}', "'output_tokens' is missing"),
        ('{"id": "a", "turns": [{"input_tokens": 1, "output_tokens": 1, "gap_s": -1}]}', "gap_s: got -1"),
        ('{"id": "a", "turns": [{"input_tokens": 1, "output_tokens": 1, "gap": 1}]}', "gap: got this key"),
        ('{"id": "a", "turns": [], "prefix": [{"id": 1}]}', "turns: got none"),
    ],
)
def test_bad_lines_say_where_and_why(tmp_path, line, reason):
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": "ok", "turns": [{"input_tokens": 1, "output_tokens": 1}]}\n' + line + "\n")
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        read_jsonl(path)
    assert "w.jsonl, line 2" in str(caught.value)


def test_unknown_formats_wrong_files_and_empty_ones_are_refused(tmp_path):
    path = tmp_path / "w"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    with pytest.raises(InvalidArgumentError, match="format: got 'tsv', expected one of jsonl, sharegpt"):
        read_workload(path, "tsv")
    for name in ("mooncake", "ragpulse", "azure"):
        with pytest.raises(InvalidArgumentError, match=f"w is not of the format {name}"):
            read_workload(path, name)
    path.write_text("")
    for name in READERS:
        with pytest.raises(InvalidArgumentError, match="got no conversation"):
            read_workload(path, name)


def test_conversations_are_cut_to_the_context():
    whole = conversation((10, 10), (10, 10), (10, 10))
    assert cut_to_context(whole, 60) is whole
    assert cut_to_context(whole, 59) == conversation((10, 10), (10, 10))
    assert cut_to_context(whole, 19) == conversation((9, 10))
    assert cut_to_context(whole, 10) is None


# -- other forms


def test_mooncake_requests_become_conversations():
    rows = [
        request(0, 1200, 100, 1, 2, 3),  # blocks 1 and 2 are full
        request(1000, 1100, 50, 1, 4, 5),  # another conversation behind the same first block
        request(5000, 2000, 10, 1, 2, 6, 7),  # continues the first
        request(6000, 1250, 10, 1, 2, 8),  # no room for the first one's answer: its own
        request(9000, 700, 30, 9, 10),
    ]
    first, second, third, fourth = link_requests(rows)
    assert first.turns == (
        SimTurn(input_tokens=1200, output_tokens=100, arrival_s=0.0),
        SimTurn(input_tokens=700, output_tokens=10, arrival_s=5.0),
    )
    assert [segment.id for segment in first.prefix] == ["block 1", "block 2"]
    assert [segment.id for segment in second.prefix] == ["block 1"]
    assert [segment.tokens for segment in third.prefix] == [512, 512]
    assert fourth.prefix == ()


def test_short_requests_with_a_common_prompt_are_not_joined():
    rows = [request(i * 1000, 600 + i, 5, 0, i + 1) for i in range(3)]
    rows.append(request(9000, 1700, 5, 0, 20, 21, 22))
    assert [len(c.turns) for c in link_requests(rows)] == [1, 1, 1, 1]


def test_azure_rows_are_single_turns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_workload(path, "azure")
    assert first.turns == (SimTurn(input_tokens=374, output_tokens=44, arrival_s=0.0),)
    assert second.turns[0].arrival_s == pytest.approx(4.314579)


def test_ragpulse_sessions_lose_what_the_server_has(tmp_path):
    def row(time, length, passages, history):
        blocks = {
            "sys_prompt": [1, 2, 3],
            "passages_ids": passages,
            "history": history,
            "web_search": [],
            "user_input": [9],
        }
        values = {"timestamp": str(time), "input_length": length, "output_length": 50}
        return json.dumps(values | {"hash_ids": blocks, "session_id": "s"})

    path = tmp_path / "r.jsonl"
    path.write_text("\n\n".join([row(7, 2000, [4, 5], []), row(30, 3000, [6], [8])]))
    (session,) = read_workload(path, "ragpulse")
    assert [turn.input_tokens for turn in session.turns] == [2000, 3000 - 554 - 3 * 191]
    assert [turn.arrival_s for turn in session.turns] == [7.0, 30.0]
    assert [segment.id for segment in session.prefix] == ["block 1", "block 2", "block 3"]


def test_sharegpt_messages_are_counted(tmp_path):
    messages = [{"from": "human", "value": "abcd " * 20}, {"from": "gpt", "value": "x"}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"id": "c_0", "conversations": messages}]))
    assert read_sharegpt(path) == [conversation((24, 1), name="c")]
    assert read_sharegpt(path, lambda text: len(text.split())) == [conversation((20, 1), name="c")]
    assert estimate_tokens("日本語") == 7


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the recorded traces are not here")
@pytest.mark.parametrize(
    ("format_name", "file", "turns"),
    [
        ("mooncake", "mooncake/conversation_trace.jsonl", 12_031),
        ("mooncake", "mooncake/synthetic_trace.jsonl", 3_993),
        ("ragpulse", "ragpulse/0_trace.jsonl", 7_106),
        ("azure", "azure/AzureLLMInferenceTrace_conv.csv", 19_366),
    ],
)
def test_recorded_traces_are_read_whole(format_name, file, turns):
    conversations = read_workload(SHARED_DATA / file, format_name)
    assert sum(len(c.turns) for c in conversations) == turns
    assert len({c.id for c in conversations}) == len(conversations)
    for c in conversations:
        times = [turn.arrival_s for turn in c.turns]
        assert times == sorted(times)


# -- times and drawing


def test_poisson_arrivals_keep_rate_and_think_time():
    made = [conversation((5, 5), (5, 5), (5, 5), name=str(i)) for i in range(4000)]
    timed = with_poisson_arrivals(made, requests_per_s=6.0, think_time_s=60.0, seed=3)
    starts = [c.turns[0].arrival_s for c in timed]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(4000 * 3 / 6.0, rel=0.05)
    gaps = [turn.gap_s for c in timed for turn in c.turns[1:]]
    assert sum(gaps) / len(gaps) == pytest.approx(60.0, rel=0.05)
    assert all(c.turns[0].gap_s is None for c in timed)
    assert timed == with_poisson_arrivals(made, requests_per_s=6.0, think_time_s=60.0, seed=3)
    faster = with_poisson_arrivals(made, requests_per_s=12.0, think_time_s=60.0, seed=3)
    assert [c.turns[1:] for c in faster] == [c.turns[1:] for c in timed]
    assert faster[7].turns[0].arrival_s == pytest.approx(timed[7].turns[0].arrival_s / 2)
    assert with_poisson_arrivals([], requests_per_s=1.0, think_time_s=1.0, seed=0) == []


def test_recorded_times_can_run_faster():
    turns = (
        SimTurn(input_tokens=1, output_tokens=1, arrival_s=10.0),
        SimTurn(input_tokens=1, output_tokens=1, gap_s=4.0),
    )
    (faster,) = with_time_scale([SimConversation(id="a", turns=turns)], 2.0)
    assert (faster.turns[0].arrival_s, faster.turns[1].gap_s) == (5.0, 2.0)
    assert faster.turns[0].gap_s is None


def test_drawing_takes_all_before_any_again():
    made = [conversation((1, 1), name=str(i)) for i in range(10)]
    drawn = sample_conversations(made, 25, seed=1)
    names = [c.id for c in drawn]
    assert sorted(names[:10], key=int) == [str(i) for i in range(10)]
    assert len(set(names)) == 25
    assert sample_conversations(made, 25, seed=1) == drawn != sample_conversations(made, 25, seed=2)
    assert sample_conversations(made, 7, seed=1) == drawn[:7]


def test_synthetic_conversations_have_the_means_asked_for():
    made = SyntheticWorkload(conversations=4000, prefix_tokens=1000, prefixes=3).draw(0)
    turns = [turn for c in made for turn in c.turns]
    assert len(turns) / len(made) == pytest.approx(5.56, rel=0.05)
    assert sum(turn.output_tokens for turn in turns) / len(turns) == pytest.approx(300, rel=0.05)
    assert min(c.turns[0].input_tokens for c in made) > 1000
    assert len({c.prefix[0].id for c in made}) == 3
    constant = SyntheticWorkload(conversations=3, sigma=0.0).draw(0)
    assert {turn.output_tokens for c in constant for turn in c.turns} == {300}
    with pytest.raises(InvalidArgumentError, match=r"mean_turns: got 0\.5, expected at least 1"):
        SyntheticWorkload(mean_turns=0.5)
