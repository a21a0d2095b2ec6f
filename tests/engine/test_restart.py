"""The log outlives the process and the weights; key/value state outlives neither."""

import itertools
import json
import logging
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve_jax.core.errors import ConversationBusyError, InvalidArgumentError, LogError
from pensieve_jax.engine import Engine
from tests.engine.serving import DEVICE_TOKENS, Chat, config, evict, ids, small_engine, tiny_model
from tests.tiny import SPEC, VOCAB, TinyModel, assert_greedy

ROOT = Path(__file__).parents[2]


def assert_all_recomputed(result, history):
    receipt = result.receipt
    assert (receipt.tokens_from_device, receipt.tokens_from_host) == (0, 0)
    assert receipt.tokens_recomputed == history - 1  # the last token of a turn is never computed in it


def test_restart(tmp_path):
    path = tmp_path / "logs" / "conversations.sqlite"
    with small_engine(log_path=path) as engine:
        chat = Chat(engine, "chat")
        chat.turn(ids(40))
        chat.turn(ids(5, seed=1))
        fork = chat.conversation.fork("fork", num_turns=1)
        rewound = chat.conversation.fork("rewound")
        rewound.rewind(num_turns=1)
        engine.conversation("empty")
        expected = {name: engine.token_ids(name).tolist() for name in ("chat", fork.id, rewound.id, "empty")}
        engine.submit("chat", [1, 2, 3])
        engine.step()
    with small_engine(log_path=path) as engine:
        assert list(engine.conversation_ids()) == list(expected)
        assert (engine.num_turns("chat"), engine.num_turns("fork")) == (2, 1)
        for name, tokens in expected.items():
            result = Chat(engine, name, tokens=tokens).turn([7, 8, 9])
            assert_all_recomputed(result, max(1, len(tokens)))
        counters = engine.counters
        assert (counters.tokens_from_device, counters.tokens_from_host) == (0, 0)
        assert counters.tokens_recomputed == sum(max(0, len(tokens) - 1) for tokens in expected.values())


def test_changed_weights_after_a_restart(tmp_path, caplog):
    path = tmp_path / "conversations.sqlite"
    with Engine(tiny_model(0), config=config(log_path=path), fingerprint="old") as engine:
        chat = Chat(engine, "chat")
        chat.turn(ids(40))
    with (
        caplog.at_level(logging.WARNING),
        Engine(tiny_model(1), config=config(log_path=path), fingerprint="new") as engine,
    ):
        assert "the weights have changed" in caplog.text
        result = Chat(engine, "chat", model=tiny_model(1), tokens=chat.tokens).turn([7, 8, 9])
        assert_all_recomputed(result, len(chat.tokens))


def test_model_of_another_vocabulary(tmp_path):
    path = tmp_path / "conversations.sqlite"
    with small_engine(log_path=path) as engine:
        chat = Chat(engine, "chat")
        chat.turn([1, 2, 3])
    other = TinyModel()
    other.spec = replace(SPEC, vocab_size=VOCAB + 1)
    with pytest.raises(LogError, match=rf"a vocabulary of {VOCAB} .*, but this model has {VOCAB + 1}"):
        small_engine(model=other, log_path=path)
    with small_engine(log_path=path) as engine:
        Chat(engine, "chat", tokens=chat.tokens).turn([4])


def test_two_engines_do_not_share_a_log(tmp_path):
    path = tmp_path / "conversations.sqlite"
    with small_engine(log_path=path) as engine:
        with pytest.raises(LogError, match="Another process has it open"):
            small_engine(log_path=path)
        Chat(engine).turn([1, 2, 3])


# -- killed --------------------------------------------------------------------------------------

TALK = """
import itertools, json, sys
from pathlib import Path
from pensieve_jax.core.types import SamplingParams
from tests.engine.serving import ids, small_engine

path, moment = sys.argv[1:]
engine = small_engine(log_path=Path(path))
conversation = engine.conversation("chat")
for turn in itertools.count():
    given = ids(3 + 11 * (turn % 3), seed=turn)
    if moment == "during" and turn == 3:
        for delta in conversation.send(given, SamplingParams(max_tokens=100), stream=True):
            print(json.dumps("inside"), flush=True)
            if len(delta.tokens) and sys.stdin.readline() == "":
                break
    result = conversation.send(given, SamplingParams(max_tokens=2))
    print(json.dumps([given, result.token_ids]), flush=True)
    if moment == "between" and turn == 2:
        sys.stdin.readline()
    if conversation.num_turns % 20 == 0:
        conversation.rewind(num_turns=0)
        print(json.dumps("rewound"), flush=True)
"""


@pytest.fixture
def talk(tmp_path):
    """Starts a process that serves turns, and reports each one that has ended."""
    processes = []

    def start(moment):
        command = [sys.executable, "-c", TALK, str(tmp_path / "conversations.sqlite"), moment]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait() == -signal.SIGKILL
    return [json.loads(line) for line in rest.splitlines() if line.endswith(("]", '"'))]


def assert_goes_on(path, turns):
    """A new process has exactly these turns, and the next one equals that of a fresh computation."""
    tokens = [token for given, output in turns for token in (*given, *output)]
    with small_engine(log_path=path, device_pages=16) as engine:  # room for one turn more
        assert engine.num_turns("chat") == len(turns)
        assert engine.token_ids("chat").tolist() == tokens
        result = Chat(engine, "chat", tokens=tokens).turn([7, 8, 9])
        assert_all_recomputed(result, max(1, len(tokens)))


@pytest.mark.parametrize("moment", ["between", "during"])
def test_killed(talk, tmp_path, moment):
    process = talk(moment)
    turns = [json.loads(process.stdout.readline()) for _ in range(3)]
    if moment == "during":
        assert json.loads(process.stdout.readline()) == "inside"
    assert kill(process) == []
    assert_goes_on(tmp_path / "conversations.sqlite", turns)


def test_killed_at_any_moment(talk, tmp_path):
    """What was reported is there; of the rest at most the one turn that had ended and not been reported."""
    path = tmp_path / "conversations.sqlite"
    turns = []
    for number in range(3):
        process = talk("never")
        reports = [json.loads(process.stdout.readline()) for _ in range(1 + number)]
        time.sleep(random.Random(number).random() / 5)
        reports += kill(process)
        for report in reports:
            turns = [] if report == "rewound" else [*turns, report]
        with small_engine(log_path=path) as engine:
            known = engine.token_ids("chat").tolist()
            count = engine.num_turns("chat")
        expected = list(itertools.chain.from_iterable([*given, *output] for given, output in turns))
        if count == 0:  # rewound, and killed before it was reported
            assert len(turns) in (0, 20) and known == []
            turns = []
        else:
            assert known[: len(expected)] == expected
            assert count in (len(turns), len(turns) + 1)
            unreported = known[len(expected) :]
            if unreported:
                turns.append([unreported[:-2], unreported[-2:]])
                assert_greedy(tiny_model(), expected + unreported[:-2], unreported[-2:])
    assert_goes_on(path, turns)


# -- other weights while it runs -----------------------------------------------------------------


@pytest.fixture
def engine():
    with small_engine() as engine:
        yield engine
        engine.check_integrity()


def test_set_weights_while_a_warm_up_waits(engine):
    chat = Chat(engine)
    chat.turn(ids(70))
    evict(engine, DEVICE_TOKENS)
    assert chat.conversation.warm() > 0
    engine.set_weights(tiny_model(1))
    chat.model = tiny_model(1)
    assert_all_recomputed(chat.turn([5]), len(chat.tokens) - 5)


def test_set_weights_drops_all_key_value_state(engine):
    on_host, on_device = Chat(engine), Chat(engine)
    on_host.turn(ids(70))
    evict(engine, DEVICE_TOKENS)
    on_device.turn(ids(40, seed=1))
    fork = on_device.conversation.fork()
    engine.set_weights(tiny_model(1))
    for chat in (on_host, on_device):
        chat.model = tiny_model(1)
        result = chat.turn(ids(20, seed=2), 8)
        assert_all_recomputed(result, len(chat.tokens) - 28)
        with pytest.raises(AssertionError, match="below the best logit"):
            assert_greedy(tiny_model(0), chat.tokens[:-8], result.token_ids)
    tokens = fork.token_ids.tolist()
    result = Chat(engine, fork.id, model=tiny_model(1), tokens=tokens).turn([5])
    assert_all_recomputed(result, len(tokens))


def test_set_weights_waits_for_nobody(engine):
    chat = Chat(engine)
    chat.turn(ids(40))
    turn = chat.submit([1, 2])
    with pytest.raises(ConversationBusyError, match="set_weights: turns are unfinished"):
        engine.set_weights(tiny_model(1))
    result = chat.check(turn, [1, 2])
    assert result.receipt.tokens_from_device == 43


def test_drop_state_leaves_the_conversations(engine):
    on_host, on_device = Chat(engine), Chat(engine)
    on_host.turn(ids(70))
    evict(engine, DEVICE_TOKENS)
    on_device.turn(ids(40, seed=1))
    turn = on_device.submit([1, 2])
    with pytest.raises(ConversationBusyError, match="drop_state: turns are unfinished"):
        engine.drop_state()
    on_device.check(turn, [1, 2])
    engine.drop_state()
    for chat in (on_host, on_device):
        result = chat.turn(ids(20, seed=2))
        assert_all_recomputed(result, len(chat.tokens) - 24)


def test_set_weights_of_other_dimensions(engine):
    chat = Chat(engine)
    chat.turn(ids(40))
    other = TinyModel(1)
    other.spec = replace(SPEC, num_heads=2)
    with pytest.raises(InvalidArgumentError, match=r"model: got .*num_heads=2.*, expected the dimensions"):
        engine.set_weights(other)
    result = chat.turn([1, 2])
    assert result.receipt.tokens_from_device == 43, "nothing was dropped"


def test_set_weights_while_chunks_are_on_their_way(engine):
    """Copies to the host that have not ended when the weights change bring nothing back later."""
    chats = [Chat(engine) for _ in range(3)]
    for number, chat in enumerate(chats):
        chat.turn(ids(100, seed=number))  # less than a quarter is free: copies ahead of time
    assert engine.counters.chunks_swapped_out > 0
    engine.set_weights(tiny_model(1))
    for chat in chats:
        chat.model = tiny_model(1)
        assert_all_recomputed(chat.turn([1, 2]), len(chat.tokens) - 6)
