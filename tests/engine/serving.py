"""Small engines, and conversations whose answers are checked against a fresh computation."""

import threading
import time
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.tiny import VOCAB, TinyModel, assert_greedy

PAGE_TOKENS = 32
DEVICE_PAGES = 12
DEVICE_TOKENS = DEVICE_PAGES * PAGE_TOKENS


@cache
def tiny_model(seed=0):
    return TinyModel(seed)


def config(
    *,
    device_pages=DEVICE_PAGES,
    host_pages=12,
    step_tokens=64,
    max_rows=4,
    swap_out_below=0.25,
    kv_dtype=None,
    **rest,
):
    rest = {"background": False, "paranoid": True, "compilation_cache": None, **rest}
    return EngineConfig(
        tiers=TierConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            swap_out_below=swap_out_below,
            kv_dtype=kv_dtype,
            share_prefixes=False,  # so that a turn's counts depend on its own conversation alone
        ),
        scheduler=SchedulerConfig(step_tokens=step_tokens, max_rows=max_rows),
        **rest,
    )


def small_engine(*, model=None, tokenizer=None, **settings):
    return Engine(model or tiny_model(), tokenizer, config(**settings))


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=count).tolist()


class Clock:
    """The time as a test sets it."""

    now = 100.0

    def __call__(self):
        return self.now


class Chat:
    """A conversation, and what its tokens must be."""

    def __init__(self, engine, conversation_id=None, *, model=None, tokens=()):
        self.engine = engine
        self.model = model or tiny_model()
        self.conversation = engine.conversation(conversation_id)
        self.id = self.conversation.id
        self.tokens = list(tokens)

    def submit(self, given, max_tokens=4, **params):
        return self.engine.submit(self.id, given, SamplingParams(max_tokens=max_tokens, **params))

    def check(self, turn, given):
        """Take the result of a greedy turn; it is the one that a fresh computation gives."""
        result = turn.result()
        assert result.finish_reason is FinishReason.LENGTH
        assert_greedy(self.model, self.tokens + list(given), result.token_ids)
        receipt, history = result.receipt, len(self.tokens)
        self.tokens += [*given, *result.token_ids]
        assert self.engine.token_ids(self.id).tolist() == self.tokens
        cached = receipt.tokens_from_device + receipt.tokens_from_host + receipt.tokens_recomputed
        assert receipt.tokens_new + cached == history + len(given)
        # The last token of the turn before was produced, but never computed (unless a rewind ended there).
        assert 0 <= receipt.tokens_new - len(given) <= (history > 0)
        assert receipt.tokens_output == len(result.tokens)
        return result

    def turn(self, given, max_tokens=4, **params):
        return self.check(self.submit(given, max_tokens, **params), given)

    def assert_rolled_back(self):
        assert self.engine.token_ids(self.id).tolist() == self.tokens


def evict(engine, tokens):
    """Fill the device with other conversations until whatever else was there has left."""
    turn = engine.submit(engine.conversation().id, ids(tokens, seed=99), SamplingParams(max_tokens=1))
    turn.result()
    engine.delete(turn.conversation_id)
    engine.settle()


def in_host(engine, count=70):
    """A conversation that only the host tier has."""
    chat = Chat(engine)
    chat.turn(ids(count), 5)
    evict(engine, DEVICE_TOKENS)
    return chat


def places(receipt):
    """Where the tokens that were there before came from: device, host, recomputed."""
    return receipt.tokens_from_device, receipt.tokens_from_host, receipt.tokens_recomputed


def drain(engine):
    """Run what is there to its end."""
    while engine.step():
        pass
    engine.settle()
    engine.check_integrity()


@contextmanager
def first_tokens_only(engine):
    """The thread of an engine answers calls, but takes no step while a turn has its first token.

    Yields an event: one has it.
    """
    turns, begun = engine._turns, threading.Event()
    step = turns.step

    def wait_or_step():
        if not any(active.turn.news for active in turns._active.values()):
            return step()
        begun.set()
        time.sleep(0.001)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "step", wait_or_step)
        yield begun


def assert_nothing_leaks(engine):
    """Nothing runs; without its conversations the device is empty."""
    assert not engine.step()
    for conversation_id in list(engine.conversation_ids()):
        engine.delete(conversation_id)
    engine.settle()
    engine.check_integrity()
    assert len(engine._turns.cache.free_device_pages()) == engine.cache_config.device_pages
