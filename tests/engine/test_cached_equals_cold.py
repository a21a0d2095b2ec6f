"""Whatever happens to the cache, greedy answers equal those of a fresh computation."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_cache.config import TransferFaults
from host_cache.transfer import FaultyMover, PageMover
from pensieve_jax.config import EngineConfig, TierConfig
from pensieve_jax.core.types import FinishReason, SamplingParams
from pensieve_jax.engine import Engine
from pensieve_jax.scheduler.scheduler import SchedulerConfig
from tests.tiny import VOCAB, TinyModel, assert_greedy

POOLS = {
    "smallest": (4, 3),  # 128 tokens: one conversation at a time
    "device-only": (12, 0),
    "tight-host": (12, 7),
    "large-host": (12, 40),
    "roomy": (30, 40),
}


class Driver:
    """Performs random operations on an engine and checks every answer that comes out."""

    def __init__(
        self,
        model,
        pool,
        policy="retention-value",
        execution="auto",
        run_ahead=False,
        kv_dtype=None,
        **settings,
    ):
        self.kv_dtype = kv_dtype
        device_pages, host_pages = POOLS[pool]
        self.model = model
        self.limit = device_pages * 32
        config = EngineConfig(
            tiers=TierConfig(
                device_pages=device_pages, host_pages=host_pages, policy=policy, kv_dtype=kv_dtype
            ),
            scheduler=SchedulerConfig(step_tokens=96, max_rows=6),
            execution=execution,
            run_ahead=run_ahead,
            background=False,
            paranoid=True,
            **settings,
        )
        ticks = itertools.count(step=0.001)  # who leaves first doesn't hang on how busy the machine is
        self.engine = Engine(model, config=config, clock=ticks.__next__)
        self.log = {}  # conversation id -> list of turns, each a list of token ids
        self.pending = {}  # turn -> tokens given
        self.stops = {}  # turn -> token ids that end it
        self.cancels = self.forks = self.rewinds = self.stopped = 0

    def tokens(self, conversation):
        return [t for turn in self.log[conversation] for t in turn]

    def idle(self):
        busy = {turn.conversation_id for turn in self.pending}
        return sorted(c for c in self.log if c not in busy)

    def new_id(self, rng):
        return f"c{len(self.log)}-{rng.random()}"

    def submit(self, rng):
        idle = self.idle()
        if idle and rng.random() < 0.7:
            conversation = rng.choice(idle)
        else:
            conversation = self.engine.conversation(self.new_id(rng)).id
            self.log[conversation] = []
        room = self.limit - len(self.tokens(conversation))
        if room < 4:
            return
        new = min(rng.choice([1, 2, 31, 32, 33, 64, rng.randint(1, 300)]), room - 2)
        output = rng.randint(1, min(60, room - new))
        given_ids = [rng.randrange(VOCAB) for _ in range(new)]
        if not self.log[conversation] and rng.random() < 0.5:  # many conversations begin alike
            given_ids = [7 * i % VOCAB for i in range(min(70, new - 1))] + given_ids[-1:]
        stops = tuple(rng.sample(range(VOCAB), 8)) if rng.random() < 0.3 else ()
        params = SamplingParams(max_tokens=output, stop_token_ids=stops)
        turn = self.engine.submit(conversation, given_ids, params)
        self.pending[turn], self.stops[turn] = given_ids, stops

    def step(self, count):
        for _ in range(count):
            self.engine.step()
            self.collect()

    def collect(self):
        for turn in [t for t in self.pending if t.done]:
            given_ids, stops = self.pending.pop(turn), self.stops.pop(turn)
            result = turn.result()
            self.stopped += result.finish_reason is FinishReason.STOP
            assert (result.token_ids[-1] in stops) or result.finish_reason is FinishReason.LENGTH
            assert not set(result.token_ids[:-1]) & set(stops)
            history = self.tokens(turn.conversation_id)
            assert_greedy(self.model, history + given_ids, result.token_ids, self.kv_dtype)
            self.log[turn.conversation_id].append([*given_ids, *result.token_ids])
            receipt = result.receipt
            cached = receipt.tokens_from_device + receipt.tokens_from_host + receipt.tokens_recomputed
            assert receipt.tokens_new + cached == len(history) + len(given_ids)
            assert receipt.tokens_output == len(result.token_ids)

    def cancel(self, rng):
        if self.pending:
            turn = rng.choice(sorted(self.pending, key=lambda t: t.conversation_id))
            del self.pending[turn]
            turn.cancel()
            assert turn.result().finish_reason is FinishReason.CANCELLED
            assert self.engine.token_ids(turn.conversation_id).tolist() == self.tokens(turn.conversation_id)
            self.cancels += 1

    def fork(self, rng):
        if self.log:
            source = rng.choice(sorted(self.log))
            turns = rng.randint(0, len(self.log[source]))
            new = self.engine.fork(source, self.new_id(rng), num_turns=turns).id
            self.log[new] = [list(turn) for turn in self.log[source][:turns]]
            self.forks += 1

    def rewind(self, rng):
        idle = self.idle()
        if idle:
            conversation = rng.choice(idle)
            turns = rng.randint(0, len(self.log[conversation]))
            self.engine.rewind(conversation, num_turns=turns)
            del self.log[conversation][turns:]
            self.rewinds += 1

    def warm(self, rng):
        for conversation in rng.sample(sorted(self.log), min(4, len(self.log))):
            self.engine.warm(conversation)

    def release(self, rng):
        if idle := self.idle():
            self.engine.release(rng.choice(idle))

    def delete(self, rng):
        idle = self.idle()
        if len(idle) > 3:
            conversation = rng.choice(idle)
            self.engine.delete(conversation)
            del self.log[conversation]

    def drain(self):
        while self.engine.step():
            self.collect()
        assert not self.pending
        self.engine.settle()
        self.engine.check_integrity()

    def clear(self):
        for conversation in self.log:
            self.engine.delete(conversation)
        self.log = {}

    def play(self, rng, length):
        operations = (
            ["submit"] * 6
            + ["step"] * 6
            + ["cancel", "fork", "rewind", "delete", "settle", "warm", "warm", "release"]
        )
        for _ in range(length):
            match rng.choice(operations):
                case "step":
                    self.step(rng.randint(1, 12))
                case "settle":
                    self.engine.settle()
                    self.collect()  # it may have ended turns
                case name:
                    getattr(self, name)(rng)
            self.engine.check_integrity()
        self.drain()


class Drivers:
    """One engine per pool for all drawn cases, so that each shape compiles once. After a failure a new one:
    the driver doesn't know what the old one's conversations hold."""

    def __init__(self, model, **settings):
        self.model, self.settings, self.made = model, settings, {}

    @contextmanager
    def get(self, pool, run_ahead):
        driver = self.made.pop((pool, run_ahead), None)
        driver = driver or Driver(self.model, pool, run_ahead=run_ahead, **self.settings)
        yield driver
        driver.clear()
        self.made[pool, run_ahead] = driver

    def close(self):
        for driver in self.made.values():
            driver.engine.close()


class PromptMover(PageMover):
    """Its copies to the host have ended whenever somebody asks."""

    def ended(self, *, wait):
        return super().ended(wait=True)


def draw_lateness(engine):
    """Copies to the host come late as a seed says, and not as the machine is busy."""
    worker = engine._turns.parts.worker
    prompt = PromptMover(worker._mover.pool, worker._mover._device, worker._mover.checksums)
    worker._mover = FaultyMover(prompt, TransferFaults(fail=0, delay=0.3, reorder=0.5))


@pytest.fixture(scope="module")
def model():
    return TinyModel()


@pytest.fixture(scope="module")
def drivers(model):
    made = Drivers(model)
    yield made
    made.close()


@settings(max_examples=25, deadline=None)
@given(
    pool=st.sampled_from(sorted(POOLS)),
    run_ahead=st.booleans(),
    seed=st.integers(0, 2**32),
    length=st.integers(5, 40),
)
def test_drawn_operations(drivers, pool, run_ahead, seed, length):
    with drivers.get(pool, run_ahead) as driver:
        driver.play(random.Random(seed), length)


@pytest.mark.parametrize(
    ("policy", "run_ahead"), [("retention-value", True), ("lru", False), ("share-aware", True)]
)
def test_every_path_was_taken(model, policy, run_ahead):
    """A long run under pressure, and the proof that it met what it is meant to test."""
    driver = Driver(model, "tight-host", policy, run_ahead=run_ahead)
    draw_lateness(driver.engine)
    driver.play(random.Random(7), 250)
    counters = driver.engine.counters
    assert counters.tokens_from_device > 0
    assert counters.tokens_from_host > 0
    assert counters.tokens_shared > 0
    assert counters.gaps > 0
    assert counters.long_gaps > 0
    assert counters.chunks_swapped_in > 0
    assert counters.chunks_swapped_out > 0
    assert counters.chunks_dropped > 0
    assert counters.pages_reclaimed > 0
    assert driver.engine.num_suspensions > 0
    assert min(driver.cancels, driver.forks, driver.rewinds, driver.stopped) > 0
    driver.engine.close()


def test_copies_by_threads(model):
    """As beside a GPU, where a copy ends some steps later."""
    driver = Driver(model, "tight-host", run_ahead=True)
    worker = driver.engine._turns.parts.worker
    worker._mover = PageMover(worker._mover.pool, worker._mover._device, copy_threads=2)
    worker._loading = ThreadPoolExecutor(1)
    driver.play(random.Random(7), 200)
    assert driver.engine.counters.chunks_swapped_in > 0
    driver.engine.close()


def test_resident_execution(model):
    driver = Driver(model, "tight-host", execution="resident", run_ahead=True)
    driver.play(random.Random(3), 60)
    driver.engine.close()
