"""Workloads: the same settings give the same tokens and times, and every length is what was recorded."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.workloads import (
    SOURCES,
    WorkloadSettings,
    make_workload,
    read_workload_file,
    tokenise,
)
from benchmarks.workloads.__main__ import main
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.simulator.synthetic import SyntheticWorkload

DAY = "2023-11-16"
SMALL = SyntheticWorkload(mean_turns=3, mean_input_tokens=12, mean_output_tokens=8)
SYNTHETIC = WorkloadSettings(
    source="synthetic", conversations=20, requests_per_s=2.0, think_time_s=5.0, vocab_size=96, synthetic=SMALL
)


class Words:
    """A tokenizer of whole words, with a begin token."""

    def __init__(self):
        self.known = {"<begin>": 0}

    def __len__(self):
        return 1000

    def __call__(self, texts, add_special_tokens, verbose):
        begin = [0] if add_special_tokens else []
        ids = [begin + [self.known.setdefault(w, len(self.known)) for w in text.split()] for text in texts]
        return {"input_ids": ids}


def recorded(tmp_path, source):
    """A file with three conversations of 3, 1 and 2 turns."""
    path = tmp_path / source
    chats = [[f"q{i} {k} more", f"a{i} {k}"] * turns for i, turns in enumerate((3, 1, 2)) for k in (0,)]
    if source == "ultrachat":
        path.write_text("\n".join(json.dumps({"id": str(i), "data": c}) for i, c in enumerate(chats)))
    else:
        roles = ("human", "gpt")
        parts = [
            {"id": f"c{i}_0", "conversations": [{"from": roles[k % 2], "value": t} for k, t in enumerate(c)]}
            for i, c in enumerate(chats)
        ]
        path.write_text(json.dumps(parts)[:-1])  # cut off at the end, as the published file is
    return path


def test_same_seed_same_tokens_and_times():
    first, second = make_workload(SYNTHETIC), make_workload(SYNTHETIC)
    assert first.digest == second.digest == "2308991c9bba78e8"
    for a, b in zip(first.conversations, second.conversations, strict=True):
        assert a.shape == b.shape
        assert all(map(np.array_equal, a.inputs, b.inputs))
    for change in ({"seed": 1}, {"requests_per_s": 3.0}, {"think_time_s": 6.0}, {"vocab_size": 97}):
        assert make_workload(replace(SYNTHETIC, **change)).digest != first.digest


def test_tokens_do_not_depend_on_times():
    tokens = tokenise(replace(SYNTHETIC, requests_per_s=1.0, think_time_s=0.0))
    settings = replace(SYNTHETIC, head_start_s=2.0)
    assert make_workload(settings, tokens=tokens).digest == make_workload(settings).digest


def test_arrivals_and_think_times():
    settings = replace(SYNTHETIC, conversations=3000, requests_per_s=4.0)
    shapes = [c.shape for c in make_workload(settings).conversations]
    starts = [shape.turns[0].arrival_s for shape in shapes]
    assert starts == sorted(starts)
    turns = sum(len(shape.turns) for shape in shapes)
    assert turns / starts[-1] == pytest.approx(4.0, rel=0.06)
    gaps = [turn.gap_s for shape in shapes for turn in shape.turns[1:]]
    assert np.mean(gaps) == pytest.approx(5.0, rel=0.05)
    assert np.std(gaps) == pytest.approx(5.0, rel=0.08)  # as an exponential distribution's


@pytest.mark.parametrize("source", ["sharegpt", "ultrachat"])
def test_texts_are_tokenised_turn_by_turn(tmp_path, source):
    settings = WorkloadSettings(source=source, path=recorded(tmp_path, source), conversations=5, seed=3)
    tokenizer = Words()
    workload = make_workload(settings, tokenizer)
    assert len(workload.conversations) == 5  # three, and two of them once more
    assert len({c.id for c in workload.conversations}) == 5
    assert sorted(c.num_turns for c in workload.conversations[:3]) == [1, 2, 3]
    words = {i: w for w, i in tokenizer.known.items()}
    for conversation in workload.conversations:
        assert conversation.inputs[0][0] == 0
        assert all(0 not in tokens for tokens in conversation.inputs[1:])
        name = words[int(conversation.inputs[0][1])].removeprefix("q")
        for given, answer in zip(conversation.inputs, conversation.answers, strict=True):
            assert [words[int(i)] for i in given if i] == [f"q{name}", "0", "more"]
            assert [words[int(i)] for i in answer] == [f"a{name}", "0"]
    assert make_workload(settings, Words()).digest == workload.digest
    assert make_workload(settings).figures()["turns"] == workload.figures()["turns"]


def test_contexts_are_cut():
    settings = replace(SYNTHETIC, max_context_tokens=30, conversations=200)
    workload, whole = make_workload(settings), make_workload(replace(SYNTHETIC, conversations=200))
    assert workload.figures()["longest_context_tokens"] <= 30
    assert workload.num_turns < whole.num_turns
    for conversation in workload.conversations:
        for given, turn in zip(conversation.inputs, conversation.shape.turns, strict=True):
            assert len(given) == turn.input_tokens


def test_common_prefixes_have_the_same_tokens():
    shared = replace(SMALL, prefix_tokens=40, prefixes=2)
    workload = make_workload(replace(SYNTHETIC, synthetic=shared))
    begins = {tuple(c.inputs[0][:40].tolist()) for c in workload.conversations}
    assert len(begins) == 2
    rest = {tuple(c.inputs[0][40:].tolist()) for c in workload.conversations}
    assert len(rest) == len(workload.conversations)


@pytest.mark.parametrize(
    ("source", "text", "tokens"),
    [
        (
            "azure",
            f"TIMESTAMP,ContextTokens,GeneratedTokens\n{DAY} 18:15:46,374,44\n{DAY} 18:15:50.314579,396,9\n",
            [374, 396],
        ),
        ("jsonl", '{"id": "a", "turns": [{"input_tokens": 7, "output_tokens": 2, "arrival_s": 1.5}]}\n', [7]),
    ],
)
def test_traces_keep_their_times(tmp_path, source, text, tokens):
    path = tmp_path / "trace"
    path.write_text(text)
    settings = WorkloadSettings(source=source, path=path, requests_per_s=None, speed=2.0)
    workload = make_workload(settings)
    assert [len(c.inputs[0]) for c in workload.conversations] == tokens
    if source == "azure":
        assert workload.conversations[1].shape.turns[0].arrival_s == pytest.approx(4.314579 / 2)
    else:
        assert workload.conversations[0].shape.turns[0].arrival_s == 0.75


def test_running_start_has_conversations_at_every_stage():
    settings = replace(SYNTHETIC, conversations=600, requests_per_s=4.0)
    whole = {c.id: c for c in make_workload(settings).conversations}
    started = make_workload(replace(settings, head_start_s=100.0, answer_s_per_token=0.1))
    assert 0 < len(started.conversations) < len(whole)
    midway = 0
    for conversation in started.conversations:
        before = whole[conversation.id]
        gone = before.num_turns - conversation.num_turns
        midway += gone > 0
        pieces = [
            tokens
            for pair in zip(before.inputs[:gone], before.answers[:gone], strict=True)
            for tokens in pair
        ]
        first = np.concatenate([*pieces, before.inputs[gone]])
        np.testing.assert_array_equal(conversation.inputs[0], first)
        assert conversation.shape.num_tokens == before.shape.num_tokens
        assert conversation.shape.turns[0].arrival_s >= 0
    assert midway > 10
    starts = [c.shape.turns[0].arrival_s for c in started.conversations]
    assert starts == sorted(starts)
    # Turns come at the full rate from the first second on, not only once conversations have grown.
    early = sum(time < 10 for time in starts)
    assert early / 10 == pytest.approx(4.0, rel=0.5)


def test_file_gives_the_workload_back(tmp_path):
    workload = make_workload(SYNTHETIC)
    workload.write(tmp_path / "w.npz")
    again = read_workload_file(tmp_path / "w.npz")
    assert again.digest == workload.digest
    assert again.settings == json.loads(json.dumps(dict(workload.settings)))
    assert again.conversations[3].shape == workload.conversations[3].shape
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(InvalidArgumentError, match=r"bad.npz is no workload"):
        read_workload_file(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "lmsys"}, "source: got 'lmsys', expected one of " + ", ".join(SOURCES)),
        ({"source": "ultrachat"}, "path: got None, expected the file of ultrachat"),
        ({"requests_per_s": 0.0}, "requests_per_s: got 0.0, expected more than 0"),
        ({"requests_per_s": None}, "requests_per_s: got None, expected a rate"),
        ({"conversations": 0}, "conversations: got 0, expected at least 1"),
        ({"speed": 0.0}, "speed: got 0.0, expected more than 0"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(InvalidArgumentError, match=message):
        replace(SYNTHETIC, **change)


def test_command_prints_the_digest(tmp_path, capsys):
    arguments = ["synthetic", "--conversations", "5", "--rate", "2", "--vocab", "96"]
    main([*arguments, "--out", str(tmp_path / "w.npz")])
    printed = capsys.readouterr().out
    assert f"digest: {read_workload_file(tmp_path / 'w.npz').digest}" in printed
    main(arguments)
    assert printed.endswith(capsys.readouterr().out)
    main([*arguments, "--mean-turns", "1"])
    assert "mean_turns: 1.0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="path: got None"):
        main(["mooncake"])
