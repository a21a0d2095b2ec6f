"""Every public operation of the manager in any order, against a simple model of what was written where."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from host_cache.config import CacheConfig
from host_cache.cost_model import RecomputeCost
from host_cache.counters import CacheCounters
from host_cache.ledger import ARRIVING, HOST, NONE, Ledger
from host_cache.manager import CacheManager
from host_cache.policies import make_policy, value

SIZE = 4
COST = RecomputeCost(context_tokens=(0, 1000), attention_s=(0.0, 1.0), other_s=0.1, source="made up")


REACHED = Counter()
"""(machine, counter of the cache) -> sum over all examples."""


class ManagerMachine(RuleBasedStateMachine):
    """The model: what each page slot holds, as (conversation lineage, position) of the token written last.

    A plan that hands out wrong pages, a copy that is believed too early, a page reused too soon: each shows
    as a slot that holds another token than the one attended to.
    """

    device_pages, host_pages, policy, load_s_per_page = 9, 5, "lru", None

    def __init__(self):
        super().__init__()
        config = CacheConfig(
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            page_tokens=SIZE,
            max_swap_outs_per_step=3,
            load_s_per_page=self.load_s_per_page,
            max_swap_outs_under_way=4,
        )
        self.manager = CacheManager(config, make_policy(self.policy, COST), COST)
        self.now = 0.0
        self.tokens = {}  # conversation -> token identities of what is logged, in order
        self.running = {}  # conversation -> [identities of all its tokens, list of ranges to compute]
        self.device = {}  # (page, slot) -> identity
        self.host = {}
        self.copying = []  # [(copy, bytes read from the device page)]
        self.loading = []  # copies to the device that hints have caused
        self.fresh = iter(range(1000, 10**9))

    def tick(self):
        self.now += 1.0
        return self.now

    def step(self, swap_ins=(), failed=False):
        """What a worker does: swap-outs read first, then loads are written."""
        self.end_loads()
        self.start_swap_outs()
        for copy in swap_ins:
            for slot in range(SIZE):
                held = None if failed else self.host.get((copy.host_page, slot))
                self.device[copy.device_page, slot] = held
        self.manager.swap_ins_ended(swap_ins, ok=not failed)

    def start_swap_outs(self):
        for copy in self.manager.take_swap_outs():
            held = [self.device.get((copy.device_page, slot)) for slot in range(SIZE)]
            self.copying.append((copy, held))

    def end_loads(self, ok=True):
        """Copies that hints have caused end: only now is the host page read and the device page written."""
        for copy in self.loading if ok else ():
            for slot in range(SIZE):
                self.device[copy.device_page, slot] = self.host.get((copy.host_page, slot))
        self.manager.swap_ins_ended(self.loading, ok=ok)
        self.loading = []

    def choose(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    @property
    def idle(self):
        return [c for c in self.tokens if c not in self.running]

    def start(self, new, count, fail, prompt, data):
        """Admit a turn; returns its conversation if it runs now."""
        if (new and len(self.tokens) < 6) or not self.idle:
            name = f"c{next(self.fresh)}"
            self.tokens[name] = []
            self.manager.open(name, self.tick())
        else:
            name = self.choose(data, self.idle)
        self.manager.touch(name, self.tick())
        identities = self.tokens[name] + [next(self.fresh) for _ in range(count)]
        if not self.tokens[name] and prompt:  # one of two common beginnings
            identities = [prompt * 100 + i for i in range(3 * SIZE - 1)] + identities
        if -(-len(identities) // SIZE) > self.device_pages:
            return None
        plan = self.manager.admit(
            name,
            num_tokens=len(identities),
            history_tokens=max(0, len(self.tokens[name]) - 1),
            now=self.tick(),
            reserve_pages=self.manager.config.reserve_pages if self.running else 0,
            token_ids=np.array(identities),
        )
        if plan is None:
            under_way = self.loading
            self.step()
            alone = not self.running and not self.copying and not under_way
            assert not alone, "an idle cache must admit what fits the pool"
            return None
        covered = plan.tokens_from_device + plan.tokens_from_host + sum(b - a for a, b in plan.missing)
        assert covered == len(identities)
        assert plan.missing[-1][1] == len(identities)
        assert all(b < a for (_, b), (a, _) in zip(plan.missing, plan.missing[1:], strict=False))
        failed = bool(plan.swap_ins) and fail == 0
        self.step(plan.swap_ins, failed)
        if failed:
            self.manager.suspend(name, self.tick())
            self.manager.truncate(name, len(self.tokens[name]))
            return None
        self.manager.admitted(plan)
        self.running[name] = [identities, list(plan.missing)]
        return name

    admission = {  # noqa: RUF012
        "new": st.integers(0, 3).map(lambda n: n == 0),
        "count": st.integers(1, 14),
        "fail": st.integers(0, 3),
        "prompt": st.integers(0, 2),
        "data": st.data(),
    }

    @rule(**admission)
    def admit(self, **drawn):
        self.start(**drawn)

    @rule(**admission)
    def whole_turn(self, **drawn):
        name = self.start(**drawn)
        if name is not None:
            self.end(name)

    @rule(**admission)
    def another_whole_turn(self, **drawn):
        self.whole_turn(**drawn)

    @precondition(lambda self: self.running)
    @rule(budget=st.integers(1, 9), data=st.data())
    def compute(self, budget, data):
        self.step()
        self.progress(self.choose(data, self.running), budget)

    def progress(self, name, budget):
        """Compute a part of what is missing, in order; each token attends to everything before it."""
        identities, missing = self.running[name]
        while missing and budget:
            start, end = missing.pop(0)
            stop = min(end, start + budget)
            budget -= stop - start
            pages = self.manager.page_ids(name, stop)
            for position in range(start, stop):
                self.device[int(pages[position // SIZE]), position % SIZE] = identities[position]
            self.attend(name, stop)
            self.manager.computed(name, start, stop)
            if stop < end:
                missing.insert(0, (stop, end))

    def end(self, name):
        self.step()
        self.progress(name, 10**9)
        self.tokens[name] = self.running.pop(name)[0]
        self.manager.finish(name, self.tick(), np.array(self.tokens[name]))

    def attend(self, name, count):
        identities = self.running[name][0]
        pages = self.manager.page_ids(name, count)
        for position in range(count):
            held = self.device.get((int(pages[position // SIZE]), position % SIZE))
            assert held == identities[position], f"{name} reads another token at {position}"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def decode(self, data):
        name = self.choose(data, self.running)
        identities, missing = self.running[name]
        if missing:
            return
        identities.append(next(self.fresh))
        if not self.manager.grow(name, len(identities), self.tick()):
            identities.pop()
            return
        missing.append((len(identities) - 1, len(identities)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        self.end(self.choose(data, self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cancel=st.booleans())
    def break_off(self, data, cancel):
        name = self.choose(data, self.running)
        del self.running[name]
        (self.manager.finish if cancel else self.manager.suspend)(name, self.tick())
        self.manager.truncate(name, len(self.tokens[name]))

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data, share):
        if len(self.tokens) >= 8:
            return
        source = self.choose(data, self.tokens)
        name = f"c{next(self.fresh)}"
        self.tokens[name] = self.tokens[source][: int(share * len(self.tokens[source]))]
        page_copy = self.manager.fork(source, name, len(self.tokens[name]), self.tick())
        if page_copy is not None:
            assert not self.manager.take_swap_outs(), "else they would have to be read first"
            for slot in range(SIZE):
                self.device[page_copy[1], slot] = self.device.get((page_copy[0], slot))

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data, share):
        name = self.choose(data, self.idle)
        del self.tokens[name][int(share * len(self.tokens[name])) :]
        self.manager.truncate(name, len(self.tokens[name]))

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), really=st.integers(0, 3))
    def forget(self, data, really):
        if really == 0:
            name = self.choose(data, self.idle)
            del self.tokens[name]
            self.manager.forget(name)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), hint=st.sampled_from(["release", "priority"]), priority=st.floats(0.1, 10))
    def hint(self, data, hint, priority):
        name = self.choose(data, self.idle)
        if hint == "release":
            self.manager.release(name)
        else:
            self.manager.set_priority(name, priority)

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), start=st.booleans())
    def warm(self, data, start):
        """The copies that this causes are under way until the next step: whatever happens to their chunks."""
        self.manager.warm(self.choose(data, self.idle))
        if start:
            self.loading += self.manager.take_swap_ins(self.tick())
            self.start_swap_outs()  # their pages may be those of the loads

    @precondition(lambda self: self.loading and not self.running)
    @rule()
    def fail_loads(self):
        self.end_loads(ok=False)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), seconds=st.none() | st.integers(0, 40))
    def set_time_to_live(self, data, seconds):
        self.manager.set_time_to_live(self.choose(data, self.tokens), seconds)

    @rule()
    def drop_expired(self):
        """Exactly those that are idle and past their time lose everything."""
        now = self.tick()
        known = {name: self.manager._conversations[name] for name in self.tokens}
        before = {name: list(conversation.chunks) for name, conversation in known.items()}
        self.manager.drop_expired(now)
        for name, conversation in known.items():
            seconds = conversation.time_to_live_s
            expired = seconds is not None and conversation.last_active + seconds <= now
            assert list(conversation.chunks) == ([] if expired and name in self.idle else before[name])

    @rule()
    def plan_ahead(self):
        self.manager.plan_ahead(self.tick())
        self.step()

    @precondition(lambda self: self.copying)
    @rule(count=st.integers(1, 5), ok=st.integers(0, 9))
    def end_copies(self, count, ok):
        """The oldest copies end only now: until then nobody may rely on them or reuse their pages."""
        for _ in range(min(count, len(self.copying))):
            copy, held = self.copying.pop(0)
            if ok:
                for slot in range(SIZE):
                    self.host[copy.host_page, slot] = held[slot]
            self.manager.swap_outs_ended([copy], ok=bool(ok))

    @precondition(lambda self: not self.running)
    @rule(really=st.integers(0, 9))
    def clear(self, really):
        if really == 0:
            self.manager.clear()

    def teardown(self):
        counters = self.manager.counters
        for name in counters.__slots__:
            REACHED[type(self).__name__, name] += getattr(counters, name)

    @invariant()
    def books_add_up(self):
        REACHED[type(self).__name__, "steps"] += 1
        self.manager.check_integrity()

    @invariant()
    def the_next_to_leave_is_the_least_valuable(self):
        """The order kept up to date gives what looking at every chunk gives."""
        manager, now = self.manager, self.tick()
        ledger, policy = manager._ledger, manager.policy
        for order in manager._orders:
            can_leave, worth = order.can_leave, []
            for conversation in manager._conversations.values():
                for chunk in conversation.chunks:
                    if chunk == NONE or not can_leave(chunk) or ledger.owner(chunk) is not conversation:
                        continue
                    counted = ledger.sharers(chunk) if policy.sums_sharers else [conversation]
                    context = (ledger.index[chunk] + 1) * SIZE
                    worth.append(
                        sum(value(policy.weight(context, c), policy.origin(c), now) for c in counted)
                    )
            found = order.peek(now)
            assert (found is None) == (not worth)
            assert found is None or found[0] == pytest.approx(min(worth))
            assert found is None or can_leave(found[1])


def variant(name, **attributes):
    machine = type(name, (ManagerMachine,), attributes)
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=80, deadline=None)
    return case


TestLru = variant("LruMachine")
TestRetentionValue = variant("RetentionValueMachine", policy="retention-value")
TestShareAware = variant("ShareAwareMachine", policy="share-aware")
TestThinkTime = variant("ThinkTimeMachine", policy="think-time")
TestTailFirst = variant("TailFirstMachine", policy="tail-first-lru")
TestWhole = variant("WholeMachine", policy="whole-conversation-lru", device_pages=14)
TestThreeWay = variant("ThreeWayMachine", policy="retention-value", load_s_per_page=0.11)
TestNoHost = variant("NoHostMachine", host_pages=0)
TestLargeHost = variant("LargeHostMachine", device_pages=6, host_pages=40)
TestSmallest = variant("SmallestMachine", device_pages=1, host_pages=1)


def test_every_path_is_reached():
    """A machine that never evicts proves nothing."""
    case = variant("CountingMachine", policy="retention-value")
    case.settings = settings(case.settings, derandomize=True, max_examples=150)
    case("runTest").runTest()
    reached = {name: REACHED["CountingMachine", name] for name in CacheCounters.__slots__}
    assert all(reached.values()), reached
    assert REACHED["CountingMachine", "steps"] >= 10_000


def test_the_machine_notices_a_page_reused_too_soon(monkeypatch):
    """The model is worth something: with a planted fault it fails."""

    def release_at_once(self, chunk):
        page = self.host_page[chunk]
        if self.flags[chunk] & ARRIVING:
            self._arriving.pop(page)
            self._host.release(page)
            self.host_page[chunk] = NONE
            self._set(chunk, self.flags[chunk] & ~(HOST | ARRIVING))

    monkeypatch.setattr(Ledger, "give_up_host", release_at_once)
    case = variant("FaultyMachine")
    case.settings = settings(case.settings, phases=[Phase.generate])
    with pytest.raises(Exception):  # noqa: B017, PT011  (which check notices it first doesn't matter)
        case("runTest").runTest()
