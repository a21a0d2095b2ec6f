"""Whose KV it is: content, tenant, weights, and what a chunk holds. The numbers are those of
docs/design/faults.md."""

import numpy as np
import pytest

from host_cache.prefix_index import KEY_BYTES, Keys, PrefixIndex
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.engine.serving import DEVICE_TOKENS, Chat, evict, ids, tiny_model
from tests.host_cache.test_policies_and_hints import PROMPT, cache, turn
from tests.tiny import assert_greedy

FOUR = SamplingParams(max_tokens=4)


@pytest.fixture
def engine():
    config = EngineConfig(
        tiers=TierConfig(device_pages=12, host_pages=12, share_prefixes=True),
        scheduler=SchedulerConfig(step_tokens=64, max_rows=4),
        background=False,
        paranoid=True,
    )
    with Engine(tiny_model(), config=config) as engine:
        yield engine
        engine.settle()
        engine.check_integrity()


def keys_of(tokens, *, tenant="", identity=b"model float32"):
    keys = Keys()
    index = PrefixIndex(identity=identity, page_tokens=4, most_chunks=9)
    index.extend(keys, np.array(tokens, np.int32), tenant)
    return [keys[index] for index in range(len(keys))]


def test_13_a_key_has_128_bits_and_depends_on_every_token_up_to_its_chunk():
    tokens = list(range(16))
    assert KEY_BYTES * 8 >= 128
    whole = keys_of(tokens)
    assert len(set(whole)) == 4
    for place in range(16):
        changed = keys_of([*tokens[:place], 99, *tokens[place + 1 :]])
        same = [a == b for a, b in zip(whole, changed, strict=True)]
        assert same == [index < place // 4 for index in range(4)]
    shifted = keys_of([7, 7, 7, 7, *tokens])
    assert not set(whole) & set(shifted), "equal tokens at another place are another chunk"


def test_14_key_spaces_of_tenants_and_models_do_not_meet():
    tokens = list(range(8))
    spaces = [("", b"a float32"), ("x", b"a float32"), ("", b"a bfloat16"), ("", b"b float32"), ("y", b"x")]
    keys = [key for tenant, model in spaces for key in keys_of(tokens, tenant=tenant, identity=model)]
    assert len(set(keys)) == 2 * len(spaces)


def test_16_a_full_hit_by_content_still_computes_the_last_token(engine):
    books = cache()
    turn(books, "a", PROMPT)
    assert turn(books, "b", PROMPT).missing == ((8, 12),)
    for length, shared in ((64, 32), (65, 64)):
        given, before = ids(length, seed=length), engine.counters.tokens_shared
        first, second = (engine.conversation().send(given, FOUR).token_ids for _ in range(2))
        assert first == second
        assert_greedy(tiny_model(), given, second)
        assert engine.counters.tokens_shared - before == shared


def test_17_a_chunk_never_holds_tokens_of_two_conversations(engine):
    """A fork in the middle of a chunk: both go on differently in it, by turns, through both tiers."""
    chat = Chat(engine)
    chat.turn(ids(40), 5)
    forked = engine.fork(chat.id, num_turns=1)
    fork = Chat(engine, forked.id, tokens=chat.tokens)
    for number in range(3):
        chat.turn([1 + number], 4)
        fork.turn([50 + number, 60], 4)
        if number == 1:
            evict(engine, DEVICE_TOKENS)
    assert chat.tokens[:45] == fork.tokens[:45]
    assert chat.tokens[45:] != fork.tokens[45:]


def test_18_an_answer_is_found_again_by_its_content(engine):
    answer = Chat(engine).turn(ids(40), 30).token_ids
    repeated, before = [*ids(40), *answer, 5], engine.counters.tokens_shared
    result = engine.conversation().send(repeated, FOUR)
    assert_greedy(tiny_model(), repeated, result.token_ids)
    assert engine.counters.tokens_shared - before == 64, "two chunks; most of the second is answer"
