"""What can't be done is refused with a text that helps, and the engine goes on."""

import json
import math
import re
import sqlite3

import numpy as np
import pytest
from safetensors.numpy import save_file

from host_cache.policies import POLICIES
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.errors import (
    CheckpointError,
    ContextTooLongError,
    ConversationBusyError,
    EngineError,
    InvalidArgumentError,
    LogError,
    RequestTooLargeError,
    UnknownConversationError,
    UnsupportedModelError,
)
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.engine.serving import Chat, config, ids, small_engine, tiny_model
from tests.tiny import VOCAB


@pytest.fixture(scope="module")
def shared_engine():
    with small_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def survivor(shared_engine):
    chat = Chat(shared_engine, "survivor")
    chat.turn([1, 2, 3])
    return chat


@pytest.fixture
def engine(shared_engine, survivor):
    """An engine whose running conversation doesn't notice what the test does."""
    survivor.turn([5, 6])
    yield shared_engine
    assert not shared_engine.step(), "nothing is left to do"
    result = survivor.turn([7, 8, 9])
    assert result.receipt.tokens_recomputed == 0
    shared_engine.check_integrity()
    if len(survivor.tokens) > 200:
        survivor.conversation.rewind(num_turns=1)
        survivor.tokens = survivor.tokens[:7]


def refused(error, text):
    return pytest.raises(error, match=re.escape(text))


# -- input of a turn -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "messages: got an empty text, expected at least one character"),
        ([], "messages: got none, expected at least one"),
        (np.zeros(0, np.int32), "input: got token ids of shape (0,), expected at least one id"),
        (np.zeros((2, 2), np.int32), "input: got token ids of shape (2, 2)"),
        ([3, VOCAB], f"input: got token id {VOCAB}, expected ids from 0 to {VOCAB - 1}"),
        ([3, -1], f"input: got token id -1, expected ids from 0 to {VOCAB - 1}"),
        (np.array([-5]), "input: got token id -5"),
        (np.array([2**63], np.uint64), f"input: got token id {2**63}"),
        ([1, 2**70], f"input: got token id {2**70}, expected ids of the vocabulary"),
        ([True, False], "input: got True among token ids, expected integers"),
        ([1, False], "input: got False among token ids, expected integers"),
        ([1, 2.0], "input: got 2.0 among token ids, expected integers"),
        (np.array([True]), "input: got an array of bool, expected integer token ids"),
        (np.array([1.0]), "input: got an array of float64, expected integer token ids"),
        ([1.5], "messages[0].message: got float, expected a mapping"),
        (7, "messages: got int, expected a text or messages"),
        (None, "messages: got NoneType, expected a text or messages"),
        (b"hello", "messages: got bytes, expected a text or messages"),
        ([{"role": "user"}], "messages[0].content: got none, expected a text"),
        ("hello", "input: got a text, expected token ids: this engine has no tokenizer"),
    ],
    ids=repr,
)
def test_input(engine, given, text):
    before = engine.counters
    conversation = engine.conversation()
    with refused(InvalidArgumentError, text):
        conversation.send(given)
    assert conversation.num_turns == 0
    assert engine.counters == before
    assert not engine.step()


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "error", "text"),
    [
        (
            2048,
            None,
            ContextTooLongError,
            "2048 tokens with the history and 1 to produce, expected at most 2048",
        ),
        (2000, 49, ContextTooLongError, "2000 tokens with the history and 49 to produce"),
        (
            386,
            None,
            RequestTooLargeError,
            "386 tokens with the history and 1 to produce, expected at most 385",
        ),
        (380, 7, RequestTooLargeError, "380 tokens with the history and 7 to produce"),
    ],
)
def test_too_long_is_refused_before_any_work(engine, tokens, max_tokens, error, text):
    before = engine.counters
    conversation = engine.conversation()
    with refused(error, text):
        conversation.send(ids(tokens), SamplingParams(max_tokens=max_tokens))
    assert not engine.step()
    assert engine.counters == before
    assert conversation.num_turns == 0


def test_history_counts(engine):
    chat = Chat(engine)
    chat.turn(ids(300), max_tokens=2)
    before = engine.counters
    with refused(RequestTooLargeError, f"got {302 + 84} tokens with the history"):
        chat.submit(ids(84), max_tokens=1)
    assert engine.counters == before
    chat.turn(ids(81), max_tokens=2)  # 383 with the history, and the last token needs no place
    chat.conversation.delete()


def test_longest_context_of_the_configuration():
    with small_engine(max_context_tokens=100) as engine:
        assert engine.max_context_tokens == 100
        with refused(ContextTooLongError, "expected at most 100 in all"):
            engine.conversation().send(ids(98), SamplingParams(max_tokens=3))
        Chat(engine).turn(ids(98), max_tokens=2)


# -- sampling parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "a number >= 0"),
        ("temperature", math.nan, "a number >= 0"),
        ("temperature", math.inf, "a number >= 0"),
        ("temperature", "hot", "a number >= 0"),
        ("temperature", None, "a number >= 0"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 2.5, "an integer >= 0"),
        ("top_k", None, "an integer >= 0"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 1.01, "a number in (0, 1]"),
        ("top_p", math.nan, "a number in (0, 1]"),
        ("min_p", 1, "a number in [0, 1)"),
        ("min_p", -0.5, "a number in [0, 1)"),
        ("repetition_penalty", 0, "a number > 0"),
        ("repetition_penalty", math.nan, "a number > 0"),
        ("presence_penalty", 2.1, "a number in [-2, 2]"),
        ("frequency_penalty", -2.1, "a number in [-2, 2]"),
        ("seed", -1, "None or an integer in [0, 2**63)"),
        ("seed", 2**63, "None or an integer in [0, 2**63)"),
        ("seed", 1.5, "None or an integer in [0, 2**63)"),
        ("max_tokens", 0, "None or an integer >= 1"),
        ("max_tokens", 2.5, "None or an integer >= 1"),
        ("max_tokens", True, "None or an integer >= 1"),
        ("logprobs", 21, "None or an integer in [0, 20]"),
        ("logprobs", -1, "None or an integer in [0, 20]"),
        ("stop", ("",), "a tuple of texts that are not empty"),
        ("stop", "END", "a tuple of texts that are not empty"),
        ("stop", (3,), "a tuple of texts that are not empty"),
        ("stop_token_ids", 3, "a tuple of integers"),
        ("stop_token_ids", ("3",), "a tuple of integers"),
        ("logit_bias", {3: math.nan}, "token ids with numbers, none of them NaN or plus infinity"),
        ("logit_bias", {3: math.inf}, "token ids with numbers"),
        ("logit_bias", {3: "1"}, "token ids with numbers"),
        ("logit_bias", {"3": 1.0}, "token ids with numbers"),
        ("logit_bias", [3], "token ids with numbers"),
    ],
    ids=repr,
)
def test_sampling_parameters(name, value, expected):
    with refused(InvalidArgumentError, f"{name}: got {value!r}, expected {expected}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": 2**63 - 1},
        {"top_p": 1, "min_p": 0, "repetition_penalty": 1},
        {"logit_bias": {3: -math.inf, 4: 100}, "stop": ["x"], "stop_token_ids": {3}},
        {"max_tokens": np.int32(3), "logprobs": 0},
    ],
)
def test_acceptable_sampling_parameters(given):
    params = SamplingParams(**given)
    assert all(getattr(params, name) is value for name, value in given.items())


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_bias_of_tokens_outside_the_vocabulary(engine, token_id):
    text = f"logit_bias: got token id {token_id}, expected ids from 0 to {VOCAB - 1}"
    with refused(InvalidArgumentError, text):
        engine.conversation().send([1], SamplingParams(logit_bias={3: 1.0, token_id: 2.0}))


def test_forbidden_tokens_are_not_chosen(engine):
    allowed = [7, 11]
    bias = {token: -math.inf for token in range(VOCAB) if token not in allowed}
    result = engine.conversation().send([1, 2], SamplingParams(max_tokens=6, logit_bias=bias))
    assert set(result.token_ids) <= set(allowed)


# -- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["nobody", "", "\ud800", None, 3, ["a"]], ids=repr)
def test_unknown_conversation(engine, unknown):
    calls = [
        lambda: engine.submit(unknown, [1]),
        lambda: engine.fork(unknown),
        lambda: engine.rewind(unknown, num_turns=0),
        lambda: engine.delete(unknown),
        lambda: engine.num_turns(unknown),
        lambda: engine.token_ids(unknown),
    ]
    known = list(engine.conversation_ids())
    for call in calls:
        with refused(UnknownConversationError, f"conversation {unknown!r}: there is none of this id"):
            call()
    assert list(engine.conversation_ids()) == known


@pytest.mark.parametrize("bad", ["", "\ud800", 3, ["a"]], ids=repr)
def test_ids_that_no_conversation_can_have(engine, bad):
    with refused(InvalidArgumentError, f"conversation_id: got {bad!r}, expected a text"):
        engine.conversation(bad)
    with refused(InvalidArgumentError, f"new_id: got {bad!r}, expected a text"):
        engine.fork("survivor", bad)


def test_fork_and_rewind_outside_the_turns(engine):
    chat = Chat(engine)
    chat.turn([1, 2])
    for bad in (-1, 2, 0.5):
        with refused(InvalidArgumentError, f"num_turns: got {bad}, expected"):
            chat.conversation.fork(num_turns=bad)
        with refused(InvalidArgumentError, f"num_turns: got {bad}, expected"):
            chat.conversation.rewind(num_turns=bad)
    with refused(InvalidArgumentError, f"got {chat.id!r}, expected one that is not in use"):
        engine.fork("survivor", chat.id)
    chat.turn([3])


def test_busy_conversation_is_refused():
    with small_engine(on_busy="refuse") as engine:
        chat = Chat(engine)
        turn = chat.submit([1, 2, 3])
        engine.step()
        with refused(ConversationBusyError, f"conversation {chat.id!r} has an unfinished turn"):
            chat.submit([4])
        chat.check(turn, [1, 2, 3])
        chat.turn([4])


def test_busy_conversation_stays_as_it_is(engine):
    chat = Chat(engine)
    turn = chat.submit([1, 2, 3])
    for call in (chat.conversation.delete, lambda: chat.conversation.rewind(num_turns=0)):
        with refused(ConversationBusyError, f"conversation {chat.id!r} has an unfinished turn"):
            call()
    chat.check(turn, [1, 2, 3])


def test_second_turn_waits(engine):
    chat = Chat(engine)
    given = ([1, 2, 3], [4], [5, 6])
    turns = [chat.submit(tokens) for tokens in given]
    for turn, tokens in zip(turns, given, strict=True):
        chat.check(turn, tokens)


def test_error_of_a_waiting_turn_comes_out_of_the_turn(engine):
    chat = Chat(engine)
    first = chat.submit([1, 2, 3])
    bad, long, good = chat.submit([VOCAB]), chat.submit(ids(400)), chat.submit([4])
    assert not bad.done
    chat.check(first, [1, 2, 3])
    with refused(InvalidArgumentError, f"input: got token id {VOCAB}"):
        bad.result()
    with refused(RequestTooLargeError, "got 407 tokens with the history"):
        long.result()
    chat.check(good, [4])


def test_waiting_turn_is_cancelled(engine):
    chat = Chat(engine)
    first, second, third = chat.submit([1, 2, 3]), chat.submit([4]), chat.submit([5])
    second.cancel()
    result = second.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.receipt is None
    chat.check(first, [1, 2, 3])
    chat.check(third, [5])


# -- checkpoints and logs ------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def checkpoint(folder, settings=LLAMA, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors or {"model.norm.weight": np.ones(16, np.float32)}, folder / "model.safetensors")
    return folder


def test_no_such_checkpoint(tmp_path, engine):
    with refused(CheckpointError, str(tmp_path / "nothing")):
        Engine.from_checkpoint(tmp_path / "nothing")


def test_truncated_safetensors(tmp_path, engine):
    folder = checkpoint(tmp_path / "model", tensors={"model.norm.weight": np.ones(4000, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with refused(CheckpointError, "model.safetensors"):
        Engine.from_checkpoint(folder)


def test_checkpoint_without_its_tensors(tmp_path, engine):
    with refused(CheckpointError, "model.embed_tokens.weight"):
        Engine.from_checkpoint(checkpoint(tmp_path / "model"))


def test_unsupported_architecture(tmp_path, engine):
    folder = checkpoint(tmp_path / "model", LLAMA | {"model_type": "mamba"})
    with refused(UnsupportedModelError, "model_type='mamba' is not supported, expected one of ['llama'"):
        Engine.from_checkpoint(folder)


def test_file_that_is_no_log(tmp_path, engine):
    path = tmp_path / "conversations.sqlite"
    path.write_bytes(b"not a log " * 1000)
    with refused(LogError, str(path)):
        small_engine(log_path=path)
    assert path.read_bytes() == b"not a log " * 1000


def test_damaged_conversation_can_be_rewound_or_deleted(tmp_path, engine):
    path = tmp_path / "conversations.sqlite"
    tokens = {}
    with small_engine(log_path=path) as first:
        for name in ("whole", "rewound", "deleted"):
            chat = Chat(first, name)
            chat.turn([1, 2, 3])
            tokens[name] = list(chat.tokens)
            chat.turn([4])
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE turns SET output_ids = zeroblob(16) WHERE turn = 1 AND conversation != "
            "(SELECT number FROM conversations WHERE id = 'whole')"
        )
    connection.close()
    with small_engine(log_path=path) as second:
        for name in ("rewound", "deleted"):
            with refused(LogError, f"turn 1 of conversation {name!r} is damaged"):
                second.conversation(name)
            with refused(LogError, f"turn 1 of conversation {name!r} is damaged"):
                second.submit(name, [1])
        second.rewind("rewound", num_turns=1)
        second.delete("deleted")
        assert list(second.conversation_ids()) == ["whole", "rewound"]
        Chat(second, "rewound", tokens=tokens["rewound"]).turn([9])
        Chat(second, "whole", tokens=second.token_ids("whole").tolist()).turn([9])


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "name", "value", "expected"),
    [
        (EngineConfig, "on_busy", "queue", "'wait' or 'refuse'"),
        (EngineConfig, "execution", "fast", "'auto' or 'layered' or 'resident'"),
        (EngineConfig, "max_context_tokens", 1, "None or an integer >= 2"),
        (EngineConfig, "max_context_tokens", 10.5, "None or an integer >= 2"),
        (TierConfig, "device_pages", 0, "None or an integer >= 1"),
        (TierConfig, "device_pages", 1.5, "None or an integer >= 1"),
        (TierConfig, "host_pages", -1, "None or an integer >= 0"),
        (TierConfig, "page_tokens", 0, "an integer >= 1"),
        (TierConfig, "policy", "random", f"one of {', '.join(POLICIES)}, or module:attribute"),
        (TierConfig, "swap_out_below", 1.5, "a share in [0, 1]"),
        (TierConfig, "running_reserve", 1, "a share in [0, 1)"),
        (SchedulerConfig, "max_rows", 0, "an integer of at least 1"),
        (SchedulerConfig, "step_tokens", 63, "an integer of at least max_rows, 64"),
    ],
)
def test_configuration(part, name, value, expected):
    with refused(InvalidArgumentError, f"{name}: got {value!r}, expected {expected}"):
        part(**{name: value})


def test_host_tier_larger_than_the_memory():
    with refused(InvalidArgumentError, "host_pages: host tier: 1000000000 pages need"):
        Engine(tiny_model(), config=config(host_pages=10**9))


@pytest.mark.parametrize("num_shards", [0, 1000])
def test_number_of_devices(num_shards):
    with refused(InvalidArgumentError, f"num_shards={num_shards}: expected 1 to"):
        Engine(tiny_model(), config=config(), num_shards=num_shards)


# -- the whole -----------------------------------------------------------------------------------


def test_closed_engine():
    engine = small_engine()
    conversation = engine.conversation()
    running, queued = engine.submit(conversation.id, [1]), engine.submit(conversation.id, [2])
    engine.close()
    engine.close()
    assert running.result().finish_reason is FinishReason.CANCELLED
    assert queued.result().finish_reason is FinishReason.CANCELLED
    for call in (lambda: conversation.send([1]), lambda: engine.generate([[1]])):
        with refused(EngineError, "the engine is closed"):
            call()
    for call in (engine.conversation, conversation.delete, conversation.fork):
        with pytest.raises(LogError):
            call()
    assert not engine.step()


def test_batch_with_one_bad_input_is_not_answered(engine):
    before = engine.counters
    known = list(engine.conversation_ids())
    with refused(InvalidArgumentError, f"input: got token id {VOCAB}"):
        engine.generate([[1, 2], [VOCAB], [3]])
    assert not engine.step()
    assert engine.counters == before
    assert list(engine.conversation_ids()) == known


@pytest.mark.parametrize(
    ("inputs", "params", "text"),
    [
        ([[1], [2]], [None], "params: got 1, expected one per input, 2"),
        ("hello", None, "inputs: got str, expected a list of inputs"),
        (3, None, "inputs: got int, expected a list of inputs"),
        ([1, 2], None, "messages: got int, expected a text or messages"),
    ],
)
def test_batch_of_a_wrong_form(engine, inputs, params, text):
    with refused(InvalidArgumentError, text):
        engine.generate(inputs, params)
