"""A tenant's KV is shared with no other's, whatever happens to conversations, cache and engine."""

from dataclasses import replace

import pytest

from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from tests.engine.serving import PAGE_TOKENS, Chat, config, ids, tiny_model

PROMPT = ids(3 * PAGE_TOKENS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.sqlite"


def sharing_engine(path):
    settings = config(log_path=path, device_pages=40)
    return Engine(tiny_model(), config=replace(settings, tiers=replace(settings.tiers, share_prefixes=True)))


def tokens_found(engine, conversation, given):
    """Send `given` as the next turn; the tokens of it and of the history that the device had."""
    return conversation.send(given, SamplingParams(max_tokens=2)).receipt.tokens_from_device


def test_prefixes_are_shared_within_a_tenant_alone(path):
    with sharing_engine(path) as engine:
        found = [
            tokens_found(engine, engine.conversation(tenant=tenant), [*PROMPT, 1])
            for tenant in ("ann", "bob", "ann", None, "", "bob")
        ]
        assert found == [0, 0, len(PROMPT), 0, len(PROMPT), len(PROMPT)]


def test_a_tenant_outlasts_the_engine_and_goes_to_forks(path):
    with sharing_engine(path) as engine:
        Chat(engine, engine.conversation("a", tenant="ann").id).turn(PROMPT)
        engine.conversation("a").fork("b")
    with sharing_engine(path) as engine:
        # Whatever makes the cache know the conversations first: a rewind, a fork, a turn.
        engine.conversation("b").rewind(num_turns=0)
        fork = engine.conversation("a").fork(num_turns=0)
        assert tokens_found(engine, fork, [*PROMPT, 1]) == 0
        assert tokens_found(engine, engine.conversation(tenant="bob"), [*PROMPT, 2]) == 0
        assert tokens_found(engine, engine.conversation(), [*PROMPT, 3]) == 0
        assert tokens_found(engine, engine.conversation("b"), [*PROMPT, 4]) == len(PROMPT)
        assert tokens_found(engine, engine.conversation(tenant="ann"), [*PROMPT, 5]) == len(PROMPT)


def test_hints_change_nothing_of_it(path):
    with sharing_engine(path) as engine:
        said = {"priority": 2.0, "time_to_live_s": 99.0}
        ann, bob, other = (engine.conversation(name, tenant=name, **said) for name in ("a", "b", "c"))
        assert tokens_found(engine, ann, [*PROMPT, 1]) == 0
        assert tokens_found(engine, bob, [*PROMPT, 1]) == 0
        engine.drop_state()
        engine._turns._restart_cache()
        other.priority = 3.0
        assert tokens_found(engine, other, [*PROMPT, 1]) == 0
        assert tokens_found(engine, bob, [2]) == 0
        assert engine._turns.cache._conversations["b"].priority == 2.0


def test_a_conversation_keeps_its_tenant(path):
    with sharing_engine(path) as engine:
        engine.conversation("a", tenant="ann")
        engine.conversation("none")
        assert engine.conversation("a").id == engine.conversation("a", tenant="ann").id
        with pytest.raises(InvalidArgumentError, match="tenant: got 'bob', expected that of 'a' or None"):
            engine.conversation("a", tenant="bob")
        with pytest.raises(InvalidArgumentError, match="tenant: got 'ann', expected that of 'none'"):
            engine.conversation("none", tenant="ann")


@pytest.mark.parametrize("tenant", [3, b"ann", "\ud800"])
def test_bad_tenants_begin_no_conversation(path, tenant):
    with sharing_engine(path) as engine:
        with pytest.raises(InvalidArgumentError, match="tenant: got"):
            engine.conversation("a", tenant=tenant)
        assert list(engine.conversation_ids()) == []
