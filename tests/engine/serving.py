"""Small engines, and conversations whose answers are checked against a fresh computation."""

from functools import cache

import numpy as np

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.tiny import VOCAB, TinyModel, assert_greedy

PAGE_TOKENS = 32


@cache
def tiny_model(seed=0):
    return TinyModel(seed)


def config(*, device_pages=12, host_pages=12, step_tokens=64, max_rows=4, swap_out_below=0.25, **rest):
    rest = {"background": False, "paranoid": True, **rest}
    return EngineConfig(
        tiers=TierConfig(
            device_pages=device_pages,
            host_pages=host_pages,
            swap_out_below=swap_out_below,
            share_prefixes=False,  # so that a turn's counts depend on its own conversation alone
        ),
        scheduler=SchedulerConfig(step_tokens=step_tokens, max_rows=max_rows),
        **rest,
    )


def small_engine(*, model=None, tokenizer=None, **settings):
    return Engine(model or tiny_model(), tokenizer, config(**settings))


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(VOCAB, size=count).tolist()


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
