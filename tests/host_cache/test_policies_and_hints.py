"""Shared prefixes, hints, load or recompute, and what each policy lets go first."""

import dataclasses

import numpy as np
import pytest

from host_cache.cost_model import RecomputeCost
from host_cache.manager import CacheManager
from host_cache.policies import POLICIES, ThinkTime, make_policy, value
from tests.host_cache.test_manager import Cache

COST = RecomputeCost(context_tokens=(0, 1000), attention_s=(0.0, 1.0), other_s=0.1, source="made up")
PROMPT = np.arange(100, 112, dtype=np.int32)


def cache(policy="retention-value", **config):
    return Cache(
        config.pop("device_pages", 16), config.pop("host_pages", 0), make_policy(policy, COST), **config
    )


def turn(books, name, tokens, **kwargs):
    """A whole turn of given tokens."""
    tokens = np.asarray(tokens, np.int32)
    books.now += 1
    books.manager.open(name, books.now, tenant=kwargs.pop("tenant", ""))
    plan = books.manager.admit(
        name, num_tokens=len(tokens), history_tokens=0, now=books.now, reserve_pages=0, token_ids=tokens
    )
    assert plan is not None
    books.compute(name, plan)
    books.now += 1
    books.manager.finish(name, books.now, tokens)
    books.end_swap_outs()
    return plan


def test_a_common_beginning_is_computed_once():
    books = cache()
    turn(books, "a", [*PROMPT, 1, 2])
    plan = turn(books, "b", [*PROMPT, 7, 8, 9])
    assert plan.tokens_shared == plan.tokens_from_device == 12
    assert plan.missing == ((12, 15),)
    assert books.manager.counters.tokens_shared == 12
    assert books.manager.num_available == 16
    books.manager.forget("a")
    books.check()
    assert turn(books, "c", [*PROMPT, 1]).tokens_shared == 12


def test_answers_are_found_too():
    """What a turn has produced is part of the key: a copy of the conversation finds all of it."""
    books = cache()
    tokens = [*range(16)]
    plan = books.admit("a", 6)
    books.compute("a", plan)
    assert books.manager.grow("a", 16, 5.0)
    books.manager.computed("a", 6, 16)
    books.manager.finish("a", 6.0, np.array(tokens, np.int32))
    assert turn(books, "b", [*tokens, 99]).tokens_shared == 16


@pytest.mark.parametrize("change", ["first token", "tenant", "off"])
def test_nothing_else_is_shared(change):
    books = cache(share_prefixes=change != "off")
    turn(books, "a", [*PROMPT, 1, 2])
    tokens = [5, *PROMPT[1:], 7] if change == "first token" else [*PROMPT, 7]
    plan = turn(books, "b", tokens, tenant="other" if change == "tenant" else "")
    assert plan.tokens_shared == plan.tokens_from_device == 0


def test_a_chunk_that_was_cut_is_not_found_any_more():
    books = cache()
    turn(books, "a", [*PROMPT, 1])
    books.manager.truncate("a", 6)
    turn(books, "a", [*PROMPT[:6], 50, 51, 52, 53, 54, 55, 56])
    plan = turn(books, "b", [*PROMPT, 1])
    assert plan.tokens_shared == 4


def test_a_refused_admission_leaves_no_trace():
    books = cache(device_pages=6)
    turn(books, "a", [*PROMPT, 1])
    running = books.admit("c", 20)
    assert running is not None
    books.manager.open("b", 1.0)
    tokens = np.array([*PROMPT, *range(8)], np.int32)
    for _ in range(2):
        plan = books.manager.admit(
            "b", num_tokens=20, history_tokens=0, now=9.0, reserve_pages=0, token_ids=tokens
        )
        assert plan is None
        books.check()


def test_warm_up_takes_pages_that_are_free_or_idle():
    books = cache(device_pages=8, host_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))  # takes all pages: a is in the host
    assert books.manager.warm("a") == 4
    assert books.manager.has_hints
    copies = books.manager.take_swap_ins(books.now)
    assert len(copies) == 4
    assert not books.manager.has_hints
    assert {c.device_page for c in books.manager.take_swap_outs()} == {c.device_page for c in copies}
    books.check()
    assert books.manager.warm("b") == 0, "its swap-outs have not ended"
    books.manager.swap_ins_ended(copies, ok=True)
    plan = turn(books, "a", range(18))
    assert (plan.tokens_from_device, plan.tokens_from_host) == (16, 0)
    assert books.manager.counters.chunks_warmed == 4


@pytest.mark.parametrize(("reserve", "loaded"), [(0.0, 2), (0.125, 1), (0.25, 0)])
def test_warm_up_takes_no_page_of_a_running_turn_nor_of_its_reserve(reserve, loaded):
    books = cache(device_pages=8, host_pages=8, running_reserve=reserve)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))
    books.manager.forget("b")
    assert books.admit("c", 24) is not None
    books.manager.warm("a")
    copies = books.manager.take_swap_ins(books.now)
    assert len(copies) == loaded
    books.check()
    books.manager.swap_ins_ended(copies, ok=True)
    books.check()


def test_warm_up_does_not_make_room_with_its_own_chunks():
    """Half of it is on the device and worth least of all that is there."""
    books = cache(device_pages=8, host_pages=8)
    turn(books, "a", range(32))
    books.now += 1000
    turn(books, "b", range(50, 66))  # the first half of a leaves
    books.manager.warm("a")
    copies = books.manager.take_swap_ins(books.now)
    assert len(copies) == 4
    books.manager.swap_ins_ended(copies, ok=True)
    books.end_swap_outs()
    assert turn(books, "a", range(32)).tokens_from_device == 31


def test_a_failed_warm_up_is_a_gap():
    books = cache(device_pages=8, host_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))
    books.manager.forget("b")
    books.manager.warm("a")
    books.manager.swap_ins_ended(books.manager.take_swap_ins(books.now), ok=False)
    books.check()
    assert turn(books, "a", range(18)).missing == ((0, 18),)


@pytest.mark.parametrize("what", ["release", "forget", "truncate", "time to live"])
def test_chunks_may_go_while_they_are_loaded(what):
    """Their pages are free when the copies have ended, and nobody has them before."""
    books = cache(device_pages=8, host_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))
    books.manager.forget("b")
    books.manager.warm("a")
    copies = books.manager.take_swap_ins(books.now)
    if what == "truncate":
        books.manager.truncate("a", 0)
    elif what == "time to live":
        books.manager.set_time_to_live("a", 0.0)
        books.manager.drop_expired(books.now)
    else:
        getattr(books.manager, what)("a")
    books.check()
    assert books.manager.num_chunks == 0
    assert books.manager.num_available == 4
    assert set(books.manager.free_device_pages()).isdisjoint(copy.device_page for copy in copies)
    books.manager.swap_ins_ended(copies, ok=True)
    books.check()
    assert books.manager.num_available == 8


def test_a_warm_up_that_waits_for_a_step_keeps_no_page_from_others():
    books = cache(device_pages=8, host_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))
    books.manager.forget("b")
    books.manager.warm("a")
    assert books.admit("c", 32) is not None


def test_state_goes_when_its_time_to_live_is_over_and_never_while_it_runs():
    books = cache(device_pages=8)
    manager = books.manager
    turn(books, "a", range(16))
    manager.set_time_to_live("a", 10.0)
    manager.drop_expired(books.now + 9.9)
    assert manager.num_chunks == 4
    manager.touch("a", books.now + 5.0)  # activity puts it off
    manager.drop_expired(books.now + 14.9)
    assert manager.num_chunks == 4
    books.now += 10.0
    assert books.admit("a", 18) is not None
    manager.drop_expired(books.now + 100.0)
    assert manager.num_chunks == 5
    books.now += 100.0
    manager.computed("a", 16, 18)
    manager.finish("a", books.now)
    manager.fork("a", "b", 16, books.now)  # lives as long
    manager.set_time_to_live("a", None)
    manager.drop_expired(books.now + 10.0)
    assert (manager.num_chunks, manager.counters.conversations_expired) == (5, 1)
    manager.set_time_to_live("a", 1.0)
    manager.plan_ahead(books.now + 10.0)
    assert (manager.num_chunks, manager.counters.conversations_expired) == (0, 2)
    books.check()


def test_release_lets_go_at_once_and_priority_keeps():
    books = cache(device_pages=8)
    turn(books, "a", range(16))
    books.manager.release("a")
    assert books.manager.num_chunks == 0
    turn(books, "a", range(16))
    turn(books, "b", range(50, 66))
    books.manager.set_priority("a", 100.0)
    turn(books, "c", range(70, 86))
    assert turn(books, "a", range(17)).tokens_from_device == 16


def test_what_is_cheaper_to_recompute_is_neither_copied_nor_loaded():
    """A chunk at context l costs 0.1 + l / 1000; moving one costs as much as at l = 10."""
    config = Cache(8, 8).manager.config
    config = type(config)(
        device_pages=8, host_pages=8, page_tokens=4, swap_out_below=0.0, load_s_per_page=0.11
    )
    books = Cache(8, 8)
    books.manager = CacheManager(config, make_policy("retention-value", COST), COST)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 82))
    counters = books.manager.counters
    assert (counters.chunks_dropped, counters.chunks_swapped_out) == (2, 2)
    books.manager.forget("b")
    plan = turn(books, "a", range(18))
    assert plan.missing == ((0, 8), (16, 18))
    assert plan.tokens_from_host == 8
    with pytest.raises(ValueError, match="cost"):
        CacheManager(config, make_policy("lru", COST))


@pytest.mark.parametrize(("load_s", "copied"), [(None, 4), (0.0, 3)])
def test_no_step_waits_for_copies_to_the_host(load_s, copied):
    """With the three-way choice, the chunks that would have to wait are dropped."""
    config = Cache(8, 8).manager.config
    books = Cache(8, 8)
    config = dataclasses.replace(config, load_s_per_page=load_s, max_swap_outs_under_way=3)
    books.manager = CacheManager(config, make_policy("lru", COST), COST)
    turn(books, "a", range(16))
    assert books.admit("b", 32) is not None
    assert len(books.end_swap_outs()) == copied
    assert books.manager.counters.chunks_dropped == 4 - copied


def test_whole_conversations_leave_as_one():
    books = cache("whole-conversation-lru", device_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 62))
    turn(books, "c", range(70, 76))  # one page short
    assert books.manager.num_available - 5 == 3
    assert turn(books, "b", range(50, 63)).tokens_from_device == 12
    assert books.manager.counters.chunks_dropped == 4


def test_tail_first_keeps_the_beginning():
    books = cache("tail-first-lru", device_pages=8)
    turn(books, "a", range(16))
    turn(books, "b", range(50, 72))
    assert turn(books, "a", range(17)).missing == ((8, 17),)


@pytest.mark.parametrize(("policy", "kept"), [("retention-value", 0), ("share-aware", 12)])
def test_a_beginning_of_many_is_worth_the_sum(policy, kept):
    """Five idle conversations share a prompt; a longer one of its own has been idle for half the time."""
    books = cache(policy, device_pages=32)
    for number in range(5):
        turn(books, f"s{number}", [*PROMPT, 40 + number])
    books.now = 20.0
    turn(books, "own", range(500, 548))
    books.now = 30.0
    turn(books, "large", range(1000, 1072))  # 18 pages of 32, where 20 are taken
    books.now = 31.0
    before = books.manager.counters.tokens_shared
    turn(books, "new", [*PROMPT, 99])
    found = books.manager.counters.tokens_shared - before
    assert found >= kept
    if policy == "retention-value":
        assert found < 12


def test_think_time_expects_the_quick_ones_back():
    policy = ThinkTime(COST)
    books = cache("think-time")
    for name in ("quick", "slow"):
        turn(books, name, range(8))
    quick, slow = (books.manager._conversations[name] for name in ("quick", "slow"))
    quick.num_gaps, quick.sum_gaps_s = 4, 8.0
    slow.num_gaps, slow.sum_gaps_s = 4, 800.0
    now = books.now + 10
    worth = [value(policy.weight(64, c), policy.origin(c), now) for c in (quick, slow)]
    assert worth[0] > worth[1]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("best", "policy: got 'best', expected one of retention-value, .*, or module:attribute"),
        ("no.such.module:X", "policy: got 'no.such.module:X': No module named 'no'"),
        ("host_cache.policies:Best", "policy: .* has no attribute 'Best'"),
        ("host_cache.policies:MIN_IDLE_S", "policy: got 'host_cache.policies:MIN_IDLE_S': .* a factory"),
        (lambda cost: object(), "expected the members name, leading_first, .*, origin, too"),
        (3, "policy: got 3, expected a name or a factory"),
    ],
)
def test_what_is_no_policy(policy, reason):
    with pytest.raises(ValueError, match=reason):
        make_policy(policy, COST)


def test_policies_come_by_name_by_place_and_from_a_factory():
    assert (
        make_policy("host_cache.policies:ThinkTime", COST) == make_policy(ThinkTime, COST) == ThinkTime(COST)
    )
    assert all(make_policy(name, COST).name == name for name in POLICIES)


def test_warm_up_whose_chunk_leaves_the_host_for_what_makes_room():
    """It leaves with a fork that has been idle for longer than what is on the device."""
    books = cache(device_pages=4, host_pages=1)
    turn(books, "a", range(4))
    turn(books, "b", range(50, 66))  # a is in the host, which is full
    books.manager.fork("a", "fork", 4, books.now)
    books.now += 1000
    turn(books, "b", range(50, 66))
    assert books.manager.warm("a") == 1
    assert books.manager.take_swap_ins(books.now) == ()
    books.check()
