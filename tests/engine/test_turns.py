"""The life of a turn: as it comes, how it ends, what it cost, and beside whom it runs."""

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
from flax import nnx

from pensieve_jax.core.errors import UnknownConversationError
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.models import make_model
from tests.engine.serving import (
    DEVICE_TOKENS,
    Chat,
    Clock,
    assert_nothing_leaks,
    config,
    evict,
    first_tokens_only,
    ids,
    places,
    small_engine,
    tiny_model,
)
from tests.engine.small_tokenizers import byte_level
from tests.tiny import assert_greedy, dense_logits


@pytest.fixture(scope="module")
def shared_engine():
    with small_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine):
    """Empty at the start, and again at the end once its conversations are deleted."""
    yield shared_engine
    assert_nothing_leaks(shared_engine)


@pytest.fixture(scope="module")
def crowded():
    """256 tokens for all conversations together; the host holds what has to leave."""
    with small_engine(device_pages=8, host_pages=24) as engine:
        yield engine
        assert_nothing_leaks(engine)


@pytest.fixture(scope="module")
def threaded():
    with small_engine(device_pages=32, background=True) as engine:
        yield engine
        assert_nothing_leaks(engine)


@pytest.fixture(scope="module")
def texts():
    """With a tokenizer, and a model of its vocabulary."""
    tokenizer = byte_level()
    settings = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    model = make_model(settings, dtype=np.dtype(np.float32), rngs=nnx.Rngs(0))
    with small_engine(model=model, tokenizer=tokenizer) as engine:
        yield engine


# -- streaming -----------------------------------------------------------------------------------


def test_deltas_add_up_to_the_result(texts):
    turn = texts.submit(texts.conversation().id, ids(20), SamplingParams(max_tokens=24))
    deltas = list(turn)
    result = turn.result()
    assert [token for delta in deltas for token in delta.tokens] == list(result.tokens)
    assert "".join(delta.text for delta in deltas) == result.text
    assert len(result.text) > 20


def test_deltas_come_one_by_one(engine):
    chat = Chat(engine)
    turn = chat.submit([1, 2, 3], max_tokens=3)
    stream = iter(turn)
    for _ in range(2):
        assert len(next(stream).tokens) == 1
        assert not turn.done
    assert next(stream).tokens and turn.done
    assert next(stream, None) is None
    chat.check(turn, [1, 2, 3])


def test_leaving_the_stream_cancels(engine):
    chat = Chat(engine)
    chat.turn(ids(40))
    for new in (1, 70):
        turn = chat.submit(ids(new), max_tokens=50)
        for _ in turn:
            break
        assert turn.result().finish_reason is FinishReason.CANCELLED
        chat.assert_rolled_back()
        assert not engine.step(), "nobody decodes for a caller who is gone"
        result = chat.turn(ids(new, seed=1))
        assert result.receipt.tokens_recomputed == 0
        assert result.receipt.tokens_from_device > 0


def test_error_in_the_loop_cancels(engine):
    chat = Chat(engine)

    def consume():
        for _ in chat.submit([1, 2], max_tokens=50):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert not engine.step()
    chat.turn([3])


# -- cancelling ----------------------------------------------------------------------------------


def until(engine, ready):
    """Step until something is so."""
    for _ in range(500):
        if ready():
            return
        assert engine.step()
    raise AssertionError("it never came to that")


def never(turn):
    return turn.news == 0 and not turn.done


@pytest.mark.parametrize("moment", ["waiting", "first piece", "second piece", "first token", "decoding"])
def test_cancel(engine, moment):
    chat = Chat(engine)
    chat.turn(ids(45))
    turn = chat.submit(ids(180, seed=1), max_tokens=30)  # three pieces of 64 tokens
    match moment:
        case "waiting":
            pass
        case "first piece" | "second piece":
            for _ in range(1 if moment == "first piece" else 2):
                engine.step()
            assert never(turn) and turn.conversation_id == chat.id
        case "first token":
            until(engine, lambda: turn.news == 1)
        case "decoding":
            until(engine, lambda: turn.news == 20)
    behind = chat.submit([9])
    turn.cancel()
    turn.cancel()
    result = turn.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.token_ids == () and result.text == ""
    assert (result.receipt is None) == (moment == "waiting")
    chat.assert_rolled_back()
    receipt = chat.check(behind, [9]).receipt
    assert (receipt.tokens_from_host, receipt.tokens_recomputed) == (0, 0), "KV of the first turn stays"


def test_cancel_when_finished_changes_nothing(engine):
    chat = Chat(engine)
    turn = chat.submit([1, 2])
    result = turn.result()
    turn.cancel()
    assert turn.result() is result
    chat.check(turn, [1, 2])


def test_cancel_while_suspended(crowded):
    first, second = Chat(crowded), Chat(crowded)
    second.turn(ids(33, seed=5), max_tokens=2)
    long = ids(60), ids(60, seed=1)
    turns = [chat.submit(given, max_tokens=110) for chat, given in zip((first, second), long, strict=True)]
    before = crowded.num_suspensions
    until(crowded, lambda: crowded.num_suspensions > before)
    assert not turns[1].done
    turns[1].cancel()
    result = turns[1].result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.receipt.suspensions == 1
    second.assert_rolled_back()
    first.check(turns[0], long[0])
    second.turn([4])


def test_queued_turn_runs_after_a_cancel(threaded, monkeypatch):
    """Also if the thread looks for work between the end of one turn and the start of the next."""
    end = threaded._turns.scheduler.end

    def slow_end(request, now):
        end(request, now)
        time.sleep(0.05)

    monkeypatch.setattr(threaded._turns.scheduler, "end", slow_end)
    for _ in range(3):
        chat = Chat(threaded)
        with first_tokens_only(threaded) as begun:
            first, second = chat.submit([1, 2], max_tokens=200), chat.submit([3])
            assert begun.wait(60)
            first.cancel()
        chat.check(second, [3])


# -- how turns end -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def free_run(texts):
    """An answer that nothing stops."""
    result = texts.conversation().send(ids(20), SamplingParams(max_tokens=24))
    assert result.finish_reason is FinishReason.LENGTH
    return result


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("place", [4, 11])
def test_stop_string(texts, free_run, place, length):
    stop = free_run.text[place : place + length]
    cut = free_run.text.index(stop)
    conversation = texts.conversation()
    turn = texts.submit(conversation.id, ids(20), SamplingParams(max_tokens=24, stop=("~never~", stop)))
    shown = "".join(delta.text for delta in turn)
    result = turn.result()
    assert result.finish_reason is FinishReason.STOP
    assert result.text == shown == free_run.text[:cut]
    assert result.tokens == free_run.tokens[: len(result.tokens)]
    assert len(result.tokens) < len(free_run.tokens)
    assert conversation.token_ids.tolist() == ids(20) + list(result.token_ids)
    assert_continues(texts, conversation)


def assert_continues(engine, conversation):
    """The next turn answers as if the conversation were given in one piece."""
    whole = [*conversation.token_ids.tolist(), 50, 51]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    fresh = engine.conversation().send(whole, params)
    result = conversation.send([50, 51], params)
    assert result.token_ids == fresh.token_ids
    assert result.receipt.tokens_from_device > 0


def test_stop_token(texts, free_run):
    stop = free_run.token_ids[7]
    count = free_run.token_ids.index(stop) + 1
    conversation = texts.conversation()
    result = conversation.send(ids(20), SamplingParams(max_tokens=24, stop_token_ids=(stop,)))
    assert result.finish_reason is FinishReason.STOP
    assert result.tokens == free_run.tokens[:count], "the end token is part of the answer"
    assert_continues(texts, conversation)


def test_end_token_of_the_model(texts):
    end = texts.tokenizer.eos_token_id
    bias = {end: 1000.0}
    conversation = texts.conversation()
    result = conversation.send(ids(20), SamplingParams(max_tokens=5, logit_bias=bias))
    assert (result.finish_reason, result.token_ids, result.text) == (FinishReason.STOP, (end,), "")
    assert_continues(texts, conversation)
    params = SamplingParams(max_tokens=5, logit_bias=bias, ignore_eos=True)
    result = conversation.send(ids(20), params)
    assert (result.finish_reason, result.token_ids) == (FinishReason.LENGTH, (end,) * 5)


def test_text_in_text_out(texts):
    conversation = texts.conversation()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = conversation.send("Hello there", params)
    second = conversation.send("The quick brown fox", params)
    tokens = conversation.token_ids.tolist()
    given = texts.tokenizer("Hello there").input_ids
    assert tokens[: len(given) + 6] == [*given, *first.token_ids]
    assert second.receipt.tokens_from_device == len(given) + 5
    assert texts.conversation().send(tokens[:-6], params).token_ids == second.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 33])
def test_max_tokens(engine, max_tokens):
    result = Chat(engine).turn(ids(31), max_tokens)
    assert len(result.tokens) == max_tokens


def test_without_max_tokens_until_the_pool_is_full(engine):
    chat = Chat(engine)
    result = chat.check(chat.submit(ids(370), None), ids(370))
    assert len(result.tokens) == DEVICE_TOKENS + 1 - 370, "the last token needs no place"


# -- log probabilities ---------------------------------------------------------------------------


def test_logprobs(engine):
    given = ids(40)
    requests = [SamplingParams(max_tokens=3, logprobs=wanted) for wanted in (None, 0, 3)]
    without, chosen, top = engine.generate([given] * 3, requests)
    assert {token.logprob for token in without.tokens} == {None}
    assert {token.top_logprobs for token in (*without.tokens, *chosen.tokens)} == {()}
    logits = dense_logits(tiny_model(), [*given, *top.token_ids])[len(given) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, plain, token in zip(expected, chosen.tokens, top.tokens, strict=True):
        assert plain.logprob == pytest.approx(row[token.token_id], abs=1e-4)
        assert token.logprob == pytest.approx(row[token.token_id], abs=1e-4)
        assert token.top_logprobs[0] == (token.token_id, token.logprob)
        assert [p for _, p in token.top_logprobs] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-4)


# -- receipts ------------------------------------------------------------------------------------


def counted(engine, call):
    """What the counters say that a call did."""
    before = asdict(engine.counters)
    result = call()
    return result, {name: value - before[name] for name, value in asdict(engine.counters).items()}


def assert_same_account(receipt, counters):
    for name in ("tokens_new", "tokens_from_device", "tokens_from_host", "tokens_recomputed"):
        assert getattr(receipt, name) == counters[name], name


def test_receipt_of_a_first_turn(engine):
    chat = Chat(engine)
    result, counters = counted(engine, lambda: chat.turn(ids(50), 5))
    assert places(result.receipt) == (0, 0, 0)
    assert (result.receipt.tokens_new, result.receipt.tokens_output) == (50, 5)
    assert_same_account(result.receipt, counters)


def test_receipt_of_a_device_hit(engine):
    chat = Chat(engine)
    chat.turn(ids(50), 5)
    result, counters = counted(engine, lambda: chat.turn([7, 8], 5))
    assert places(result.receipt) == (54, 0, 0), "the last token was never computed"
    assert result.receipt.tokens_new == 3
    assert_same_account(result.receipt, counters)


def test_receipt_of_a_host_hit(engine):
    chat = Chat(engine)
    chat.turn(ids(50), 5)
    evict(engine, DEVICE_TOKENS)
    result, counters = counted(engine, lambda: chat.turn([7, 8], 5))
    assert places(result.receipt) == (0, 54, 0)
    assert_same_account(result.receipt, counters)
    assert counters["chunks_swapped_in"] == 2
    result, counters = counted(engine, lambda: chat.turn([9], 5))
    assert places(result.receipt) == (61, 0, 0), "it is on the device now"


def test_receipt_of_recomputation():
    with small_engine(host_pages=0) as engine:
        chat = Chat(engine)
        chat.turn(ids(50), 5)
        evict(engine, DEVICE_TOKENS)
        result, counters = counted(engine, lambda: chat.turn([7, 8], 5))
        assert places(result.receipt) == (0, 0, 54)
        assert result.receipt.tokens_new == 3
        assert_same_account(result.receipt, counters)
        chat.turn([1], 150)
        evict(engine, 7 * 32)  # two of seven chunks have to go, the leading ones
        result, counters = counted(engine, lambda: chat.turn([7, 8], 5))
        assert places(result.receipt) == (len(chat.tokens) - 8 - 64, 0, 64)
        assert counters["long_gaps"] == 1
        assert_same_account(result.receipt, counters)


def test_receipt_of_time():
    clock = Clock()
    with Engine(tiny_model(), config=config(), clock=clock) as engine:
        turn = engine.submit(engine.conversation().id, ids(100), SamplingParams(max_tokens=4))
        clock.now = 102.0
        engine.step()  # 64 of 100 tokens
        clock.now = 105.0
        while engine.step():
            clock.now += 0.5
        receipt = turn.result().receipt
    assert receipt.queue_s == 2.0
    assert receipt.time_to_first_token_s == 5.0
    assert receipt.time_per_output_token_s == 0.5


# -- beside whom ---------------------------------------------------------------------------------


def assert_in_turns(tokens, turns):
    """The tokens of a conversation are its turns one after the other, each greedy after all before."""
    at = 0
    left = [[*given, *output] for given, output in turns]
    while left:
        found = next(turn for turn in left if tokens[at : at + len(turn)] == turn)
        left.remove(found)
        given = next(g for g, output in turns if [*g, *output] == found)
        assert_greedy(tiny_model(), tokens[:at] + list(given), found[len(given) :])
        at += len(found)
    assert at == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_one_conversation_from_many_threads(threaded, stream):
    conversation = threaded.conversation()
    given = [ids(20 + 9 * n, seed=n) for n in range(6)]

    def send(tokens):
        if not stream:
            return conversation.send(tokens, SamplingParams(max_tokens=5)).token_ids
        turn = conversation.send(tokens, SamplingParams(max_tokens=5), stream=True)
        return tuple(token.token_id for delta in turn for token in delta.tokens)

    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(send, given))
    assert conversation.num_turns == 6
    assert_in_turns(conversation.token_ids.tolist(), list(zip(given, outputs, strict=True)))


def test_many_conversations_from_many_threads(threaded):
    barrier = threading.Barrier(8)

    def talk(number):
        barrier.wait()
        chat = Chat(threaded)
        for turn in range(3):
            chat.turn(ids(10 + 13 * turn, seed=number), max_tokens=4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))


def test_seed_fixes_the_choices(engine):
    def params(seed):
        return SamplingParams(max_tokens=12, temperature=1.0, top_k=40, seed=seed)

    given = ids(40)
    alone = engine.conversation().send(given, params(5)).token_ids
    others = [SamplingParams(max_tokens=12), params(6), SamplingParams(max_tokens=7, temperature=0.5)]
    results = engine.generate(
        [ids(33, seed=1), given, given, ids(50, seed=2)], [others[0], *map(params, (5, 6)), others[2]]
    )
    assert results[1].token_ids == alone
    assert results[2].token_ids != alone
    assert_greedy(tiny_model(), ids(33, seed=1), results[0].token_ids)


def test_seed_fixes_the_choices_in_a_cached_turn(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    chat = Chat(engine)
    chat.turn(ids(40))
    cached = chat.conversation.send([1, 2], params)
    assert cached.receipt.tokens_from_device > 0
    assert engine.conversation().send([*chat.tokens, 1, 2], params).token_ids == cached.token_ids


def test_turns_without_a_seed_differ(engine):
    params = SamplingParams(max_tokens=12, temperature=1.0)
    first, second = engine.generate([ids(40)] * 2, params)
    assert first.token_ids != second.token_ids


def test_generate(engine):
    inputs = [ids(3 + 17 * n, seed=n) for n in range(10)]
    known = list(engine.conversation_ids())
    params = [SamplingParams(max_tokens=1 + n % 4) for n in range(10)]
    results = engine.generate(inputs, params)
    for given, wanted, result in zip(inputs, params, results, strict=True):
        assert len(result.tokens) == wanted.max_tokens
        assert_greedy(tiny_model(), given, result.token_ids)
        with pytest.raises(UnknownConversationError):
            engine.token_ids(result.conversation_id)
    assert list(engine.conversation_ids()) == known
    assert engine.generate([]) == []


# -- asyncio -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["with a thread", "without"])
def test_await_and_async_for(kind, threaded, engine):
    engine = threaded if kind == "with a thread" else engine
    first, second = Chat(engine), Chat(engine)

    async def main():
        result = await first.conversation.asend([1, 2, 3], SamplingParams(max_tokens=4))
        turn = second.submit([4, 5], max_tokens=5)
        deltas = [delta async for delta in turn]
        return result, [token for delta in deltas for token in delta.tokens], await turn

    result, streamed, whole = asyncio.run(main())
    assert_greedy(tiny_model(), [1, 2, 3], result.token_ids)
    assert tuple(streamed) == whole.tokens
    assert_greedy(tiny_model(), [4, 5], whole.token_ids)


def test_error_of_an_awaited_turn(threaded):
    async def main():
        chat = Chat(threaded)
        first = chat.submit([1, 2], 60)
        with pytest.raises(ValueError, match="messages: got none"):
            await chat.submit([])  # waits for the first, or is refused at once if that has ended already
        with pytest.raises(ValueError, match="messages: got none"):
            await chat.conversation.asend([])
        chat.check(first, [1, 2])

    asyncio.run(main())


def test_cancelled_task_cancels_the_turn(threaded):
    chat = Chat(threaded)
    chat.turn(ids(10))

    async def main():
        with first_tokens_only(threaded) as begun:
            sending = asyncio.create_task(chat.conversation.asend([1, 2], SamplingParams(max_tokens=800)))
            assert await asyncio.to_thread(begun.wait, 60)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            chat.assert_rolled_back()
            assert threaded._turns.scheduler.has_work is False
        return await chat.conversation.asend([3], SamplingParams(max_tokens=3))

    result = asyncio.run(main())
    assert_greedy(tiny_model(), [*chat.tokens, 3], result.token_ids)
    assert chat.conversation.num_turns == 2


def test_leaving_an_async_stream_cancels(threaded):
    chat = Chat(threaded)

    async def main():
        with first_tokens_only(threaded):
            turn = chat.submit([1, 2], max_tokens=800)
            async for _ in turn:
                break
            return await turn

    assert asyncio.run(main()).finish_reason is FinishReason.CANCELLED
    chat.turn([3])


def test_fifty_turns_at_once(threaded):
    async def main():
        chats = [threaded.conversation() for _ in range(50)]
        given = [ids(5 + n % 11, seed=n) for n in range(50)]
        sends = [
            chat.asend(tokens, SamplingParams(max_tokens=3))
            for chat, tokens in zip(chats, given, strict=True)
        ]
        return given, await asyncio.gather(*sends)

    given, results = asyncio.run(main())
    for tokens, result in zip(given, results, strict=True):
        assert_greedy(tiny_model(), tokens, result.token_ids)


# -- order, and want of pages --------------------------------------------------------------------


def finish_order(engine, turns):
    order = []
    for _ in range(2000):
        if len(order) == len(turns):
            return order
        assert engine.step(), "everybody waits for somebody"
        order += [n for n, turn in enumerate(turns) if turn.done and n not in order]
    raise AssertionError(f"only {order} of {len(turns)} finished")


def test_suspension_order(crowded):
    """Three turns grow until two of them have to leave: the latest first; they return as they arrived."""
    chats = [Chat(crowded) for _ in range(3)]
    given = [ids(60, seed=n) for n in range(3)]
    turns = [chat.submit(tokens, max_tokens=100) for chat, tokens in zip(chats, given, strict=True)]
    assert finish_order(crowded, turns) == [0, 1, 2]
    receipts = [chat.check(*pair).receipt for chat, *pair in zip(chats, turns, given, strict=True)]
    assert receipts[0].suspensions == 0, "the first to arrive is never suspended"
    assert receipts[1].suspensions == 1
    assert receipts[2].suspensions >= 1
    assert receipts[2].tokens_restored > 0
    assert places(receipts[2]) == (0, 0, 0), "what a suspension costs is not part of the first account"


def test_large_requests_do_not_block_each_other(crowded):
    """Each needs the whole pool in the end, and all begin with half of what they need (fault 27)."""
    chats = [Chat(crowded) for _ in range(4)]
    given = [ids(100 + n, seed=n) for n in range(4)]
    turns = [chat.submit(tokens, max_tokens=150) for chat, tokens in zip(chats, given, strict=True)]
    assert finish_order(crowded, turns) == [0, 1, 2, 3]
    for chat, *pair in zip(chats, turns, given, strict=True):
        chat.check(*pair)


def test_first_come_first_served(crowded):
    """A small turn doesn't overtake a large one that waits for pages."""
    chats = [Chat(crowded) for _ in range(3)]
    given = [ids(180), ids(200, seed=1), ids(3, seed=2)]
    turns = [chat.submit(tokens, max_tokens=8) for chat, tokens in zip(chats, given, strict=True)]
    until(crowded, lambda: turns[0].news > 4)
    assert never(turns[1]) and never(turns[2])
    until(crowded, lambda: turns[1].news > 0)
    assert turns[0].done and not turns[2].done
    for chat, *pair in zip(chats, turns, given, strict=True):
        chat.check(*pair)


def test_decoding_goes_on_beside_a_long_prompt(engine):
    """A prompt that takes several steps doesn't hold up who is decoding."""
    fast, slow = Chat(engine), Chat(engine)
    decoding = fast.submit([1, 2], max_tokens=30)
    until(engine, lambda: decoding.news == 1)
    prompt = ids(200)
    prefill = slow.submit(prompt, max_tokens=2)
    until(engine, lambda: prefill.news > 0)
    steps = math.ceil(200 / (64 - 1))
    assert decoding.news == 1 + steps
    slow.check(prefill, prompt)
    fast.check(decoding, [1, 2])


def test_host_memory_is_reported_as_it_comes():
    calls = []
    with Engine(
        tiny_model(),
        config=config(host_pages=9),
        host_progress=lambda done, total: calls.append((done, total)),
    ):
        pass
    layers = len(tiny_model().layers)
    assert calls == [(calls[-1][1] * (n + 1) // layers, calls[-1][1]) for n in range(layers)]
