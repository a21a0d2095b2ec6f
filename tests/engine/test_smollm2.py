"""Greedy text of a real model through the whole engine equals that of transformers."""

import pytest

from tests.engine.smollm2 import (
    NUM_TOKENS,
    assert_second_turns,
    assert_together,
    golden,
    greedy,
    smollm2_engine,
)


@pytest.fixture(scope="module")
def engine():
    with smollm2_engine() as engine:
        yield engine
        engine.settle()
        engine.check_integrity()


def test_ten_prompts_together(engine):
    assert len(golden()) == 10
    assert_together(engine)


def test_ten_prompts_one_by_one(engine):
    for case in golden():
        conversation = engine.conversation()
        result = conversation.send(case["prompt"], greedy())
        assert conversation.token_ids[:-NUM_TOKENS].tolist() == case["prompt_ids"]
        assert list(result.token_ids) == case["output_ids"], case["prompt"]
        assert result.note is None
        expected = engine.tokenizer.decode(case["output_ids"], skip_special_tokens=True)
        assert result.text == expected


def test_second_turns_after_a_stay_in_the_host_tier():
    assert_second_turns()
