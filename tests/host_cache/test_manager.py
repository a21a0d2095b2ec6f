"""The manager's rules, one by one."""

import pytest

from host_cache.config import CacheConfig
from host_cache.conversation import CachedConversation
from host_cache.cost_model import RecomputeCost, analytic_cost
from host_cache.errors import IntegrityError
from host_cache.manager import CacheManager
from host_cache.page_pool import PagePool
from host_cache.plan import PageCopy
from host_cache.policies import Lru, RetentionValue, value

COST = RecomputeCost(context_tokens=(0, 1000), attention_s=(0.0, 1.0), other_s=0.1, source="made up")


class Cache:
    """A manager whose copies end when told, with the integrity check after every call."""

    def __init__(self, device_pages, host_pages=0, policy=None, **config):
        config = {"swap_out_below": 0.0, "running_reserve": 0.0, "page_tokens": 4, **config}
        self.manager = CacheManager(
            CacheConfig(device_pages=device_pages, host_pages=host_pages, **config), policy or Lru()
        )
        self.now = 0.0

    def admit(self, conversation, tokens, *, history=0, reserve=0):
        self.now += 1
        self.manager.open(conversation, self.now)
        plan = self.manager.admit(
            conversation, num_tokens=tokens, history_tokens=history, now=self.now, reserve_pages=reserve
        )
        self.check()
        return plan

    def compute(self, conversation, plan):
        """A step: loads end, then the missing ranges are computed."""
        self.manager.swap_ins_ended(plan.swap_ins, ok=True)
        self.manager.admitted(plan)
        for start, end in plan.missing:
            self.manager.computed(conversation, start, end)
        self.check()

    def turn(self, conversation, tokens, **kwargs):
        """A whole turn; ends the copies to the host that it caused."""
        plan = self.admit(conversation, tokens, **kwargs)
        assert plan is not None
        self.compute(conversation, plan)
        self.now += 1
        self.manager.finish(conversation, self.now)
        self.end_swap_outs()
        return plan

    def end_swap_outs(self, ok=True):
        copies = self.manager.take_swap_outs()
        self.manager.swap_outs_ended(copies, ok=ok)
        self.check()
        return copies

    def check(self):
        self.manager.check_integrity()


def test_a_turn_finds_the_history_on_the_device_and_computes_only_the_rest():
    cache = Cache(8)
    assert cache.turn("a", 10).missing == ((0, 10),)
    plan = cache.turn("a", 17, history=10)
    assert plan.missing == ((10, 17),)
    assert plan.tokens_from_device == 10
    assert plan.swap_ins == ()


def test_the_last_token_is_computed_even_if_everything_is_cached():
    cache = Cache(8)
    cache.turn("a", 12)
    assert cache.turn("a", 12, history=12).missing == ((11, 12),)


def test_leading_chunks_of_the_longest_idle_conversation_leave_first_and_come_back():
    cache = Cache(6, host_pages=6)
    cache.turn("a", 12)
    cache.turn("b", 12)
    cache.turn("c", 8)  # two pages short: the leading two of a
    plan = cache.admit("a", 13, history=12)
    assert len(plan.swap_ins) == 2
    assert plan.tokens_from_host == 8
    assert plan.tokens_from_device == 4
    assert plan.missing == ((12, 13),)
    cache.compute("a", plan)


def test_only_the_shortfall_is_evicted():
    cache = Cache(6, host_pages=6)
    cache.turn("a", 16)
    cache.admit("b", 12)
    assert len(cache.end_swap_outs()) == 1


def test_without_a_host_page_a_chunk_is_dropped_and_becomes_a_gap():
    cache = Cache(6)
    cache.turn("a", 16)
    cache.turn("b", 16)
    plan = cache.turn("a", 18, history=16)
    assert plan.missing == ((0, 8), (16, 18))
    assert plan.tokens_recomputed == 8
    assert cache.manager.counters.long_gaps == 1
    assert cache.manager.counters.chunks_dropped == 2 + 3  # two of a, then three of b for a's return


def test_admission_is_all_or_nothing():
    cache = Cache(6)
    first = cache.admit("a", 16)
    before = cache.manager.num_available
    assert cache.admit("b", 12) is None
    assert cache.manager.num_available == before
    assert not cache.end_swap_outs()
    cache.compute("a", first)
    assert cache.manager.grow("a", 24, 9.0)
    assert not cache.manager.grow("a", 25, 9.0)
    cache.check()


def test_newcomers_leave_the_reserve():
    cache = Cache(6)
    assert cache.admit("a", 16, reserve=3) is None
    assert cache.admit("a", 16, reserve=2) is not None


def test_a_chunk_whose_copy_is_under_way_can_not_be_loaded_yet():
    cache = Cache(4, host_pages=4)
    cache.turn("a", 8)
    plan = cache.admit("b", 12)
    cache.compute("b", plan)
    cache.manager.finish("b", 9.0)
    copies = cache.manager.take_swap_outs()
    assert len(copies) == 1
    assert cache.admit("a", 9, history=8) is None
    cache.manager.swap_outs_ended(copies, ok=True)
    assert cache.admit("a", 9, history=8).tokens_from_host == 4


def test_a_failed_copy_to_the_host_is_a_gap_not_a_hit():
    cache = Cache(4, host_pages=4)
    cache.turn("a", 8)
    plan = cache.admit("b", 12)
    cache.compute("b", plan)
    cache.manager.finish("b", 9.0)
    cache.end_swap_outs(ok=False)
    plan = cache.admit("a", 9, history=8)
    assert plan.tokens_from_host == 0
    assert plan.missing == ((0, 4), (8, 9))
    assert cache.manager.counters.failed_swap_outs == 1


def test_a_failed_load_is_recomputed_and_not_counted_as_a_hit():
    cache = Cache(4, host_pages=4)
    cache.turn("a", 8)
    cache.turn("b", 12)
    plan = cache.admit("a", 9, history=8)
    assert plan.tokens_from_host == 4
    cache.manager.swap_ins_ended(plan.swap_ins, ok=False)
    cache.manager.suspend("a", 20.0)
    cache.check()
    again = cache.admit("a", 9, history=8)
    assert again.missing == ((0, 4), (8, 9))
    assert cache.manager.counters.tokens_from_host == 0
    assert cache.manager.counters.failed_swap_ins == 1


def test_copies_ahead_of_time_make_pages_reclaimable_at_once():
    cache = Cache(8, host_pages=8, swap_out_below=0.5)
    cache.turn("a", 28)
    cache.manager.plan_ahead(9.0)
    assert len(cache.end_swap_outs()) == 3  # one page is free, four are wanted
    cache.turn("b", 12)
    assert cache.manager.counters.pages_reclaimed == 2
    assert cache.manager.counters.chunks_swapped_out == 3
    assert cache.turn("a", 29, history=28).tokens_from_host == 8


def test_a_chunk_that_grew_gives_up_its_stale_copy():
    cache = Cache(4, host_pages=4, swap_out_below=1.0)
    cache.turn("a", 6)
    cache.manager.plan_ahead(5.0)
    assert len(cache.end_swap_outs()) == 2
    cache.turn("a", 8, history=6)
    cache.turn("b", 16)  # everything of a leaves: the full first chunk has a copy, the second needs one
    plan = cache.admit("a", 9, history=8)
    assert plan.tokens_from_host == 8


def test_a_copy_under_way_whose_conversation_is_forgotten_keeps_its_host_page_until_it_ends():
    cache = Cache(4, host_pages=1, swap_out_below=1.0)
    cache.turn("a", 4)
    cache.manager.plan_ahead(5.0)
    copies = cache.manager.take_swap_outs()
    cache.manager.forget("a")
    cache.check()
    cache.turn("b", 4)
    cache.manager.plan_ahead(9.0)
    assert not cache.manager.take_swap_outs()
    cache.manager.swap_outs_ended(copies, ok=True)
    cache.manager.plan_ahead(9.0)
    assert len(cache.end_swap_outs()) == 1


def test_the_host_keeps_what_is_worth_more():
    cache = Cache(8, host_pages=2, policy=RetentionValue(COST))
    cache.turn("long", 32)
    cache.turn("b", 8)  # two leading chunks of long go to the host
    assert cache.manager.counters.chunks_swapped_out == 2
    cache.turn("c", 8)  # the next two are worth more than those
    counters = cache.manager.counters
    assert counters.chunks_swapped_out == 4
    assert counters.chunks_dropped == 2


def test_forks_share_full_chunks_and_write_their_own():
    cache = Cache(8)
    cache.turn("a", 10)
    source, target = cache.manager.fork("a", "b", 10, 9.0)
    assert source != target
    assert cache.manager.counters.chunks_copied == 1
    assert cache.manager.num_available == 8
    plan = cache.turn("b", 14, history=10)
    assert plan.tokens_from_device == 10
    assert plan.missing == ((10, 14),)
    cache.manager.forget("a")
    cache.check()
    assert cache.turn("b", 16, history=14).tokens_from_device == 14


@pytest.mark.parametrize(
    ("source", "tokens"), [("in the host", 10), ("loading", 10), ("cut", 8), ("no page free", 10)]
)
def test_a_fork_copies_only_what_is_on_the_device_to_a_free_page(source, tokens):
    cache = Cache(3 if source == "no page free" else 8, host_pages=8)
    cache.turn("a", 10)
    if source in ("in the host", "loading"):
        cache.turn("b", 32)
        cache.manager.forget("b")
    if source == "loading":
        cache.manager.warm("a")
        copies = cache.manager.take_swap_ins(cache.now)
    assert cache.manager.fork("a", "c", tokens, 90.0) is None
    cache.check()
    if source == "loading":
        cache.manager.swap_ins_ended(copies, ok=True)
    assert cache.manager.counters.chunks_copied == 0


def test_a_copied_chunk_is_the_forks_own():
    cache = Cache(8)
    cache.turn("a", 10)
    assert cache.manager.fork("a", "b", 9, 9.0)
    cache.manager.truncate("a", 0)
    assert cache.turn("b", 12, history=9).missing == ((9, 12),)
    assert cache.turn("a", 3, history=3).tokens_from_device == 0


def test_rewind_into_a_shared_chunk_leaves_the_other_whole():
    cache = Cache(8)
    cache.turn("a", 8)
    cache.manager.fork("a", "b", 8, 9.0)
    cache.manager.truncate("b", 6)
    assert cache.turn("b", 8, history=6).missing == ((4, 8),)
    assert cache.turn("a", 9, history=8).tokens_from_device == 8


def test_rewind_within_a_chunk_keeps_its_head():
    cache = Cache(8)
    cache.turn("a", 11)
    cache.manager.truncate("a", 6)
    assert cache.turn("a", 9, history=6).missing == ((6, 9),)


def test_a_shared_chunk_leaves_with_the_conversation_that_was_active_last():
    cache = Cache(6)
    cache.turn("a", 8)
    cache.manager.fork("a", "b", 8, 20.0)
    cache.now = 10.0
    cache.turn("c", 8)
    cache.now = 30.0
    cache.turn("d", 16)  # two short: c is idle longest, since b used a's chunks later
    cache.now = 40.0
    assert cache.turn("a", 9, history=8).tokens_from_device == 8


def test_stateless_keeps_nothing():
    cache = Cache(8, keep_finished=False)
    cache.turn("a", 12)
    assert cache.manager.num_available == 8
    assert cache.turn("a", 16, history=12).missing == ((0, 16),)


def test_clear_and_misuse():
    cache = Cache(8, host_pages=4)
    cache.turn("a", 12)
    cache.manager.clear()
    cache.check()
    assert cache.turn("a", 16, history=12).tokens_from_device == 0
    plan = cache.admit("a", 17, history=16)
    for misuse in (
        cache.manager.forget,
        lambda c: cache.manager.truncate(c, 3),
        lambda c: cache.admit(c, 20),
    ):
        with pytest.raises(IntegrityError, match="running"):
            misuse("a")
    with pytest.raises(IntegrityError, match="never computed"):
        cache.manager.computed("a", 18, 19)
    assert plan.missing == ((16, 17),)


def test_pages_are_freed_once():
    pool = PagePool(2)
    assert pool.allocate() == 0
    pool.release(0)
    for page in (0, 1, 2, -1):
        with pytest.raises(IntegrityError):
            pool.release(page)


def test_pages_in_order_lie_together():
    pool = PagePool(8, in_order=True)
    assert [pool.allocate() for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    for page in (4, 2, 3):
        pool.release(page)
    assert sorted(pool.free_pages()) == [2, 3, 4, 6, 7]
    assert [pool.allocate() for _ in range(6)] == [2, 3, 4, 6, 7, None]


def test_retention_value_orders_by_cost_over_idle_time():
    policy = RetentionValue(COST)
    assert COST(0) == pytest.approx(0.1)
    assert COST(500) == pytest.approx(0.6)
    assert COST(2000) == pytest.approx(2.1)  # beyond the profile the last slope goes on
    conversation = CachedConversation("a", "", 10.0)
    weight, origin = policy.weight(500, conversation), policy.origin(conversation)
    assert value(weight, origin, 12.0) == pytest.approx(0.3)
    assert value(weight, origin, 10.0) > 0
    assert policy.weight(32, conversation) < policy.weight(64, conversation)
    estimate = analytic_cost(
        num_layers=2,
        num_heads=4,
        head_dim=8,
        num_parameters=1000,
        chunk_tokens=32,
        max_context_tokens=100,
        flops_per_s=1e6,
    )
    assert estimate(100) == pytest.approx((4 * 32 * 100 * 4 * 8 * 2 + 2 * 32 * 1000) / 1e6)
    assert "estimated" in estimate.source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_pages", 0),
        ("host_pages", -1),
        ("page_tokens", 0),
        ("swap_out_below", 1.5),
        ("running_reserve", 1.0),
    ],
)
def test_bad_sizes_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        CacheConfig(**{"device_pages": 4, name: value})
    with pytest.raises(ValueError, match="context_tokens"):
        RecomputeCost(context_tokens=(5, 5), attention_s=(0.0, 1.0), other_s=0.0, source="")


def test_copies_are_values():
    assert PageCopy(device_page=1, host_page=2) == PageCopy(device_page=1, host_page=2)
