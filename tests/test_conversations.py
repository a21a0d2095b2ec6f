"""Reading recorded conversations: made-up files, and the real one where it was fetched."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax import conversations
from pensieve_jax.assets import SHAREGPT
from pensieve_jax.conversations import ConversationReader, SourceTurn, UltraChatReader, read_conversations

REAL_FILE = Path(__file__).parent.parent / ".assets" / SHAREGPT.path


def messages(*texts: str, first: str = "human") -> list[dict]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    return [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]


def part(name: str, *texts: str, first: str = "human") -> dict:
    return {"id": name, "conversations": messages(*texts, first=first)}


def read(folder: Path, content: list | str):
    path = folder / "conversations.json"
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    path.write_text(text, encoding="utf-8")
    reader = ConversationReader(path)
    return list(reader), reader.report


def test_turns_of_one_part(tmp_path):
    found, report = read(tmp_path, [part("a_0", "q1", "a1", "q2", "a2")])
    assert [c.id for c in found] == ["a"]
    assert found[0].turns == (
        SourceTurn(user="q1", assistant="a1"),
        SourceTurn(user="q2", assistant="a2"),
    )
    assert (report.objects, report.conversations, report.turns, report.cut_characters) == (1, 1, 2, 0)
    assert not report.dropped


def test_joins_parts_with_and_without_repeated_message_in_any_order(tmp_path):
    parts = [
        part("a_b_4", "q3", "a3"),
        part("a_b_0"),
        part("a_b_1", "a1", "q2", "a2", first="gpt"),
        part("a_b_0", "q1", "a1"),
    ]
    for order in (parts, parts[::-1]):
        found, report = read(tmp_path, order)
        assert [c.id for c in found] == ["a_b"]
        assert [t.user for t in found[0].turns] == ["q1", "q2", "q3"]
        assert [t.assistant for t in found[0].turns] == ["a1", "a2", "a3"]
        assert report.objects == 4


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([part("a_0", "q1", "a1"), part("a_4", "q3", "a3")], "missing part"),
        ([part("a_0", "q1", "a1"), part("a_1", "other", "q2", "a2", first="gpt")], "parts disagree"),
        ([part("a_0")], "no messages"),
        ([part("a_0", "q1", "a1", "q2")], "ends without an answer"),
        ([part("a_0", "a0", first="gpt")], "roles do not alternate"),
        ([{"id": "a_0", "conversations": [{"from": "system", "value": "x"}]}], "roles do not alternate"),
        ([part("a_0", "q1", " ")], "blank message"),
        ([{"id": "a_0"}], "bad object"),
        ([{"id": 3, "conversations": []}], "bad object"),
        ([{"id": "a_0", "conversations": [{"from": "human"}]}], "bad object"),
        ([{"id": "a_0", "conversations": ["text"]}], "bad object"),
        (["text"], "bad object"),
    ],
)
def test_malformed_ones_are_counted_and_the_rest_is_read(tmp_path, parts, reason):
    found, report = read(tmp_path, [*parts, part("good_0", "q", "a")])
    assert [c.id for c in found] == ["good"]
    assert report.dropped == {reason: 1}


def test_part_that_comes_back_later_is_counted(tmp_path):
    found, report = read(tmp_path, [part("a_0", "q", "a"), part("b_0", "q", "a"), part("a_2", "q2", "a2")])
    assert [c.id for c in found] == ["a", "b"]
    assert len(found[0].turns) == 1
    assert report.dropped == {"stray part": 1}


@pytest.mark.parametrize("name", ["plain", "plain_", "plain_x"])
def test_id_without_number_is_a_whole_conversation(tmp_path, name):
    found, _ = read(tmp_path, [part(name, "q", "a")])
    assert [c.id for c in found] == [name]


@pytest.mark.parametrize("text", ["", "[", "[]", "[\n]\n", " [ ] "])
def test_nothing_in_it(tmp_path, text):
    found, report = read(tmp_path, text)
    assert found == []
    assert (report.objects, report.cut_characters) == (0, 0)


@given(cut=st.integers(0, 400), read_characters=st.integers(1, 64))
def test_any_cut_keeps_every_whole_object(cut, read_characters, tmp_path_factory):
    parts = [part(f"c{i}_0", f"question {i} äß", f"answer {i} \\ \n") for i in range(4)]
    whole = json.dumps(parts, ensure_ascii=False)
    text = whole[:cut]
    expected = sum(len(json.dumps(parts[: i + 1], ensure_ascii=False)) - 1 <= cut for i in range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "_READ_CHARACTERS", read_characters)
        found, report = read(tmp_path_factory.mktemp("cut"), text)
    assert [c.id for c in found] == [f"c{i}" for i in range(expected)]
    assert report.objects == expected
    if cut >= len(whole):
        assert report.cut_characters == 0


def test_limit_and_min_turns(tmp_path):
    read(tmp_path, [part("a_0", "q", "a"), part("b_0", "q", "a", "q", "a"), part("c_0", "q", "a", "q", "a")])
    path = tmp_path / "conversations.json"
    chosen, report = read_conversations(path, limit=1, min_turns=2)
    assert [c.id for c in chosen] == ["b"]
    assert report.conversations == 2
    assert len(read_conversations(path)[0]) == 3
    assert read_conversations(path, limit=0)[0] == []


def test_reading_again_starts_a_new_report(tmp_path):
    read(tmp_path, [part("a_0", "q", "a")])
    reader = ConversationReader(tmp_path / "conversations.json")
    assert list(reader) == list(reader)
    assert reader.report.objects == 1


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(ConversationReader(tmp_path / "none.json"))


@pytest.mark.skipif(not REAL_FILE.is_file(), reason="needs `make assets`")
def test_real_file_begins_with_long_conversations():
    chosen, report = read_conversations(REAL_FILE, limit=50, min_turns=5)
    assert len(chosen) == 50
    assert len({c.id for c in chosen}) == 50
    assert all(len(c.turns) >= 5 for c in chosen)
    assert report.cut_characters == 0
    joined = next(c for c in chosen if c.id == "hRPPgZT")
    assert len(joined.turns) == 11


def test_ultrachat_lines(tmp_path):
    lines = [
        json.dumps({"id": "0", "data": ["q1", "a1", "q2", "a2"]}),
        json.dumps(
            {
                "prompt_id": "x",
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            }
        ),
        json.dumps({"id": "2", "data": ["q1", "a1", "q2"]}),
        json.dumps({"id": "3", "data": ["q1", 7]}),
        json.dumps({"id": "4", "data": ["q", " "]}),
        "[1]",
        '{"id": "5", "data": ["q", "cut o',
    ]
    path = tmp_path / "ultrachat.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    reader = UltraChatReader(path)
    first, second = list(reader)
    assert first.turns == (SourceTurn(user="q1", assistant="a1"), SourceTurn(user="q2", assistant="a2"))
    assert second.turns == (SourceTurn(user="q", assistant="a"),)
    assert reader.report.dropped == {"bad object": 3, "ends without an answer": 1, "blank message": 1}
    assert [c.id for c in reader] == ["ultrachat 0", "ultrachat 1"]
