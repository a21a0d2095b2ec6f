"""SmolLM2 in an engine, and the texts that transformers gives for the same prompts."""

import json
from functools import cache
from pathlib import Path

import pytest

from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.assets import smollm2_path

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-greedy.json"
NUM_TOKENS = 64


@cache
def golden():
    """Prompts with their token ids and the 64 that follow, computed in float32."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def smollm2_engine(*, device_pages=64, host_pages=64, execution="auto"):
    """With room for the ten prompts and their answers at once."""
    path = smollm2_path()
    if path is None:
        pytest.skip("SmolLM2 was not fetched")
    settings = EngineConfig(
        tiers=TierConfig(device_pages=device_pages, host_pages=host_pages),
        scheduler=SchedulerConfig(step_tokens=512, max_rows=16),
        max_context_tokens=1024,
        execution=execution,
        background=False,
    )
    return Engine.from_checkpoint(path, settings, dtype="float32")


def greedy(max_tokens=NUM_TOKENS):
    """As the golden texts were made: to the full length, whatever comes."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def assert_together(engine):
    """All prompts in one batch."""
    results = engine.generate([case["prompt_ids"] for case in golden()], greedy())
    for case, result in zip(golden(), results, strict=True):
        assert list(result.token_ids) == case["output_ids"], case["prompt"]


def assert_second_turns(execution="auto", cut=30):
    """First turns of `cut` tokens, and the rest of the answers as second turns, in a device pool that holds
    half of the conversations: each of them comes back from the host."""
    with smollm2_engine(device_pages=20, execution=execution) as engine:
        conversations = [engine.conversation() for _ in golden()]

        def turns(inputs, max_tokens):
            pairs = zip(conversations, inputs, strict=True)
            submitted = [engine.submit(chat.id, given, greedy(max_tokens)) for chat, given in pairs]
            return [turn.result() for turn in submitted]

        first = turns([case["prompt_ids"] for case in golden()], cut)
        for case, result in zip(golden(), first, strict=True):
            assert list(result.token_ids) == case["output_ids"][:cut], case["prompt"]
        second = turns([case["output_ids"][cut : cut + 1] for case in golden()], NUM_TOKENS - cut - 1)
        for case, result in zip(golden(), second, strict=True):
            assert list(result.token_ids) == case["output_ids"][cut + 1 :], case["prompt"]
            assert result.receipt.tokens_from_host > 0
            assert result.receipt.tokens_recomputed == 0
        assert engine.counters.chunks_swapped_in >= len(golden())
        engine.settle()
        engine.check_integrity()
