"""The conversation log: what comes back, what survives, and what is said about files that are no log."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pensieve_jax.core.errors import InvalidArgumentError, LogError, UnknownConversationError
from pensieve_jax.core.messages import Message
from pensieve_jax.core.types import FinishReason
from pensieve_jax.store.log import ConversationLog, TurnRecord

VOCAB = 1000


def open_log(path: Path | None, *, vocab_size: int = VOCAB, fingerprint: str = "f1") -> ConversationLog:
    return ConversationLog.open(
        path, vocab_size=vocab_size, model="tiny", fingerprint=fingerprint, clock=lambda: 123.5
    )


def make_turn(number: int) -> TurnRecord:
    """A turn that differs from those of other numbers in every field."""
    return TurnRecord(
        input_ids=np.arange(number, 2 * number + 1, dtype=np.int32),
        output_ids=np.full(number, VOCAB - 1, np.int32),
        finish_reason=FinishReason.STOP if number % 2 else FinishReason.LENGTH,
        messages=(Message(role="user", content=f"Grüße \0 {number}"),) if number % 3 else None,
        output_text=f"answer {number} 🙂",
    )


def assert_turns(log: ConversationLog, conversation_id: str, numbers: list[int]) -> None:
    record = log.load(conversation_id)
    assert len(record.turns) == len(numbers)
    tokens = []
    for turn, number in zip(record.turns, numbers, strict=True):
        expected = make_turn(number)
        assert turn.input_ids.dtype == turn.output_ids.dtype == np.int32
        assert turn.input_ids.tolist() == expected.input_ids.tolist()
        assert turn.output_ids.tolist() == expected.output_ids.tolist()
        assert turn.finish_reason is expected.finish_reason
        assert turn.messages == expected.messages
        assert turn.output_text == expected.output_text
        tokens += [*turn.input_ids.tolist(), *turn.output_ids.tolist()]
    assert record.token_ids.tolist() == tokens
    assert record.token_ids.dtype == np.int32


@pytest.fixture(params=["file", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConversationLog]:
    with open_log(tmp_path / "log.db" if request.param == "file" else None) as opened:
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed log with conversation "a" of turns 1 to 4 and "b" of turn 5."""
    path = tmp_path / "log.db"
    with open_log(path) as log:
        log.create("a")
        log.create("b")
        for number in (1, 2, 3, 4):
            log.append_turn("a", make_turn(number))
        log.append_turn("b", make_turn(5))
    return path


def test_turns_come_back_as_they_were(log: ConversationLog) -> None:
    log.create("a")
    assert log.load("a").created_s == 123.5
    assert log.load("a").token_ids.tolist() == []
    for number in range(5):
        log.append_turn("a", make_turn(number))
    assert_turns(log, "a", [0, 1, 2, 3, 4])


def test_rewind_fork_and_delete(log: ConversationLog) -> None:
    log.create("a")
    for number in range(4):
        log.append_turn("a", make_turn(number))
    log.fork("a", "b", 3)
    log.rewind("a", 1)
    log.append_turn("a", make_turn(8))
    log.append_turn("b", make_turn(9))
    assert_turns(log, "a", [0, 8])
    assert_turns(log, "b", [0, 1, 2, 9])
    log.rewind("a", 2)
    log.fork("a", "empty", 0)
    log.delete("a")
    assert_turns(log, "b", [0, 1, 2, 9])
    assert_turns(log, "empty", [])
    forked = log.load("b")
    assert (forked.parent_id, forked.parent_turns) == ("a", 3)
    log.create("a")
    assert_turns(log, "a", [])
    assert list(log.ids()) == ["b", "empty", "a"]


def test_unknown_conversations_and_bad_arguments_change_nothing(log: ConversationLog) -> None:
    log.create("a")
    log.append_turn("a", make_turn(1))
    for call in (
        lambda: log.load("x"),
        lambda: log.append_turn("x", make_turn(1)),
        lambda: log.rewind("x", 0),
        lambda: log.fork("x", "y", 0),
        lambda: log.delete("x"),
    ):
        with pytest.raises(UnknownConversationError, match="conversation 'x'"):
            call()
    for call in (
        lambda: log.create("a"),
        lambda: log.fork("a", "a", 1),
        lambda: log.fork("a", "y", 2),
        lambda: log.rewind("a", 2),
        lambda: log.rewind("a", -1),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^(id|num_turns): got "):
            call()
    assert list(log.ids()) == ["a"]
    assert_turns(log, "a", [1])


def test_ids_come_in_pages_while_the_log_is_used(
    log: ConversationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve_jax.store.log._IDS_PER_PAGE", 2)
    names = [f"c{number}" for number in range(7)]
    for name in names:
        log.create(name)
    seen = []
    for name in log.ids():
        seen.append(name)
        if name == "c2":
            log.delete("c3")
            log.delete("c6")
    assert seen == ["c0", "c1", "c2", "c3", "c4", "c5"]


def test_threads_append_without_loss(log: ConversationLog) -> None:
    def work(name: str) -> None:
        log.create(name)
        for number in range(10):
            log.append_turn(name, make_turn(number))
            log.load(name)

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert_turns(log, f"t{number}", list(range(10)))


def test_a_closed_log_says_so(path: Path) -> None:
    log = open_log(path)
    log.close()
    log.close()
    with pytest.raises(LogError, match="closed"):
        log.load("a")


def test_reopened(path: Path) -> None:
    with open_log(path) as log:
        assert_turns(log, "a", [1, 2, 3, 4])
        assert_turns(log, "b", [5])


def test_other_weights_are_recorded_and_noted(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_log(path, fingerprint="f2") as log:
        assert_turns(log, "a", [1, 2, 3, 4])
    assert "f1" in caplog.text
    assert "f2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_log(path, fingerprint="f2"):
        assert caplog.text == ""


def test_killed_between_turns_loses_no_finished_turn(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    program = textwrap.dedent(
        """
        import sys, pathlib, numpy as np
        from pensieve_jax.core.types import FinishReason
        from pensieve_jax.store.log import ConversationLog, TurnRecord
        path = pathlib.Path(sys.argv[1])
        log = ConversationLog.open(path, vocab_size=1000, model="tiny", fingerprint="f1")
        log.create("a")
        for number in range(1_000_000):
            ids = np.full(50, number % 1000, np.int32)
            log.append_turn("a", TurnRecord(
                input_ids=ids, output_ids=ids, finish_reason=FinishReason.STOP, messages=None, output_text="",
            ))
            print(number, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        while int(process.stdout.readline()) < 20:
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.stdout.close()
        process.wait()
    # The last line may have been cut in the middle of its number.
    finished = max([20, *(int(line) for line in rest.split("\n")[:-1])])
    with open_log(path) as log:
        turns = log.load("a").turns
        assert len(turns) in (finished + 1, finished + 2)
        for number, turn in enumerate(turns):
            assert turn.input_ids.tolist() == turn.output_ids.tolist() == [number % 1000] * 50
        log.append_turn("a", make_turn(1))


def assert_refused(path: Path, said: str, **changes: int) -> None:
    """Opening fails with words that name the file, and the file stays as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LogError, match=said) as caught:
        open_log(path, **changes)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("size", [10, 600, 10_000])
def test_a_file_of_something_else(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log.db"
    path.write_bytes(np.random.default_rng(1).bytes(size))
    assert_refused(path, "not a conversation log")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE birds (name TEXT)")
    connection.commit()
    connection.close()
    assert_refused(path, "not a conversation log")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    path.touch()
    assert_refused(path, "empty")


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_file(path: Path, kept: float) -> None:
    os.truncate(path, int(path.stat().st_size * kept))
    assert_refused(path, "damaged")


def test_another_vocabulary_or_version(path: Path) -> None:
    assert_refused(path, "vocabulary of 1000.* this model has 7", vocab_size=7)
    change(path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    assert_refused(path, "schema version 99")


def test_tenants_are_kept_and_forks_have_their_sources(log: ConversationLog) -> None:
    log.create("a", tenant="ann")
    log.create("b")
    log.fork("a", "c", 0)
    assert [log.load(name).tenant for name in "abc"] == ["ann", "", "ann"]


def test_a_log_of_the_first_version_is_upgraded(path: Path) -> None:
    change(path, "ALTER TABLE conversations DROP COLUMN tenant")
    change(path, "UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    for _ in range(2):
        with open_log(path) as log:
            assert_turns(log, "a", [1, 2, 3, 4])
            assert log.load("b").tenant == ""
    with open_log(path) as log:
        log.create("new", tenant="ann")
        assert log.load("new").tenant == "ann"


def test_a_log_in_use(path: Path) -> None:
    with open_log(path) as log:
        assert_refused(path, "Another process has it open")
        log.append_turn("a", make_turn(7))
    with open_log(path) as log:
        assert_turns(log, "a", [1, 2, 3, 4, 7])


def test_paths_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path / "file" / "log.db", "Check the path")
    assert_refused(tmp_path, "Check that the path is a file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(path: Path) -> None:
    path.parent.chmod(0o500)
    path.chmod(0o400)
    try:
        assert_refused(path, "permissions")
        assert_refused(path.with_name("new.db"), "its folder can be written")
    finally:
        path.parent.chmod(0o700)


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with open_log(tmp_path / "x" / "y" / "log.db") as log:
        log.create("a")


def change(path: Path, statement: str) -> None:
    """Changes a closed log behind its back."""
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE turns SET input_ids = zeroblob(length(input_ids)) WHERE conversation = 1 AND turn = 2",
        "UPDATE turns SET output_ids = substr(output_ids, 5) WHERE conversation = 1 AND turn = 2",
        "UPDATE turns SET output_crc32 = 'x' WHERE conversation = 1 AND turn = 2",
        "UPDATE turns SET messages = '[{}' WHERE conversation = 1 AND turn = 2",
        "UPDATE turns SET messages = '[{}]' WHERE conversation = 1 AND turn = 2",
        "UPDATE turns SET finish_reason = 'bored' WHERE conversation = 1 AND turn = 2",
        "DELETE FROM turns WHERE conversation = 1 AND turn = 2",
    ],
)
def test_damage_to_one_conversation_leaves_the_others_usable(path: Path, damage: str) -> None:
    change(path, damage)
    with open_log(path) as log:
        with pytest.raises(LogError, match="turn 2 of conversation 'a' is damaged") as caught:
            log.load("a")
        assert str(path) in str(caught.value)
        log.append_turn("b", make_turn(6))
        assert_turns(log, "b", [5, 6])
        log.rewind("a", 2)
        assert_turns(log, "a", [1, 2])
        log.append_turn("a", make_turn(9))
        assert_turns(log, "a", [1, 2, 9])


def test_a_failed_append_changes_nothing(path: Path) -> None:
    with open_log(path) as log:
        log._connection.execute("PRAGMA max_page_count = 1")
        huge = np.zeros(1_000_000, np.int32)
        turn = make_turn(7)
        with pytest.raises(LogError, match="disk is full"):
            log.append_turn(
                "a",
                TurnRecord(
                    input_ids=huge,
                    output_ids=huge,
                    finish_reason=turn.finish_reason,
                    messages=None,
                    output_text="",
                ),
            )
        log._connection.execute("PRAGMA max_page_count = 1000000")
        assert_turns(log, "a", [1, 2, 3, 4])
        log.append_turn("a", turn)
        assert_turns(log, "a", [1, 2, 3, 4, 7])
