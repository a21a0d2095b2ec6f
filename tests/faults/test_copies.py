"""Copies between the tiers: too early, too late, to the wrong place. The numbers are those of
docs/design/faults.md."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_cache.plan import PageCopy
from host_cache.policies import RetentionValue
from host_cache.transfer import PageMover, PinnedPool, mover
from tests.engine.serving import DEVICE_TOKENS, Chat, assert_nothing_leaks, evict, ids, small_engine
from tests.host_cache.staging import all_layers
from tests.host_cache.test_manager import COST, Cache


@pytest.fixture(scope="module")
def engine():
    with small_engine(run_ahead=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty(request):
    yield
    if "engine" in request.fixturenames:
        assert_nothing_leaks(request.getfixturevalue("engine"))


def device_bytes(engine, pages):
    pools = engine._turns.parts.worker._runner._pools
    return [np.asarray(pool)[list(pages)] for pool in pools]


def host_bytes(engine, pages):
    return [shards[0][list(pages)].copy() for shards in engine._turns.parts.worker._mover.pool.layers]


def places(engine, chat):
    """(device pages, host pages) of a conversation; -1 where a chunk has none."""
    ledger = engine._turns.cache._ledger
    chunks = engine._turns.cache._conversations[chat.id].chunks
    return [ledger.device_page[c] for c in chunks], [ledger.host_page[c] for c in chunks]


def test_1_a_copy_to_the_host_holds_what_the_last_step_wrote():
    """Chunks are copied ahead of time as soon as their turn has ended; the last one then grows."""
    with small_engine(swap_out_below=1.0) as engine:
        chat = Chat(engine)
        for given in (ids(80), ids(5, seed=1)):
            chat.turn(given, 4)
            Chat(engine).turn([1])
            engine.settle()
            device, host = places(engine, chat)
            assert min(device) >= 0 and min(host) >= 0, "in both tiers"
            there, here = device_bytes(engine, device), host_bytes(engine, host)
            for on_device, in_host in zip(there, here, strict=True):
                computed = slice(0, (len(chat.tokens) - 1) % 32)
                np.testing.assert_array_equal(in_host[:2], on_device[:2])
                np.testing.assert_array_equal(in_host[2, :, :, computed], on_device[2, :, :, computed])


def test_2_a_swap_in_does_not_overwrite_what_the_step_under_way_reads(engine):
    """The pages of a turn that is cancelled while its step runs are loaded into at once."""
    back, gone, beside = Chat(engine), Chat(engine), Chat(engine)
    back.turn(ids(150), 5)
    evict(engine, DEVICE_TOKENS)
    assert max(places(engine, back)[0]) == -1
    other = beside.submit(ids(40, seed=2), max_tokens=30)
    cancelled = gone.submit(ids(180, seed=1), max_tokens=30)
    for _ in range(5):
        engine.step()
    cancelled.cancel()
    turn = back.submit([7, 8], max_tokens=10)
    assert back.check(turn, [7, 8]).receipt.tokens_from_host == 154
    beside.check(other, ids(40, seed=2))


def test_4_no_answer_holds_tokens_of_another_conversation_after_swaps(engine):
    """Three conversations of half a device each take turns."""
    chats = [Chat(engine) for _ in range(3)]
    hosts = 0
    for number in range(4):
        for index, chat in enumerate(chats):
            hosts += chat.turn(ids(60, seed=10 * number + index), 3).receipt.tokens_from_host
    assert hosts > 0


def test_5_a_host_page_is_not_given_away_while_it_is_loaded():
    cache = Cache(4, host_pages=2, policy=RetentionValue(COST))
    cache.turn("a", 8)
    cache.turn("b", 12)  # the first chunk of a goes to the host
    plan = cache.admit("a", 9, history=8)
    assert len(plan.swap_ins) == 1
    leaving = cache.manager.take_swap_outs()
    assert leaving, "the device pages for it were taken from b"
    assert {copy.host_page for copy in plan.swap_ins}.isdisjoint(copy.host_page for copy in leaving)
    assert not cache.manager._host_order.can_leave(cache.manager._conversations["a"].chunks[0])
    cache.compute("a", plan)


def test_6_no_layer_attends_before_its_own_pages_have_come(engine, monkeypatch):
    """What the pages held before is NaN, so one layer too early is enough to spoil the answer."""
    chat = Chat(engine)
    chat.turn(ids(70), 5)
    evict(engine, DEVICE_TOKENS)
    free = engine._turns.cache.free_device_pages()
    assert all(np.isnan(layer).all() for layer in device_bytes(engine, free))
    loaded = []
    stage_in = PageMover.stage_in
    monkeypatch.setattr(
        PageMover, "stage_in", lambda self, layer, *rest: loaded.append(layer) or stage_in(self, layer, *rest)
    )
    assert chat.turn([7, 8]).receipt.tokens_from_host == 74
    assert loaded == list(range(engine.spec.num_layers)), "layer by layer"


def test_7_a_page_that_leaves_is_read_before_the_same_step_writes_to_it(engine):
    chat = Chat(engine)
    chat.turn(ids(90), 7)
    device, _ = places(engine, chat)
    before = device_bytes(engine, device)
    evict(engine, DEVICE_TOKENS)  # one prompt takes all pages, those of the chat among them
    now, host = places(engine, chat)
    assert max(now) == -1 and min(host) >= 0
    for then, in_host in zip(before, host_bytes(engine, host), strict=True):
        np.testing.assert_array_equal(in_host[:3], then[:3])


@pytest.mark.parametrize("length", [63, 64, 65, 96])
def test_8_the_last_chunk_of_a_finished_turn_is_kept_in_both_tiers(engine, length):
    """Also if the turn ends where a chunk does. The last token was produced, but never computed."""
    chat = Chat(engine)
    chat.turn(ids(length - 4), 5)
    assert chat.turn([7], 3).receipt.tokens_from_device == length
    evict(engine, DEVICE_TOKENS)
    receipt = chat.turn([8]).receipt
    assert (receipt.tokens_from_host, receipt.tokens_recomputed) == (length + 4, 0)


def test_10_pages_that_were_given_but_never_computed_are_no_hit():
    cache = Cache(8, host_pages=8, swap_out_below=1.0)
    cache.turn("a", 8)
    assert cache.admit("a", 20, history=8) is not None
    cache.manager.computed("a", 8, 14)  # the step that would compute the rest never comes
    cache.manager.finish("a", 9.0)
    cache.manager.plan_ahead(9.0)
    assert len(cache.end_swap_outs()) == 4, "14 tokens; the fifth page held nothing"
    plan = cache.admit("a", 20, history=19)
    assert plan.missing == ((14, 20),)


def test_11_a_copy_has_ended_only_when_all_layers_and_shards_have(monkeypatch):
    devices = jax.devices()[:2]
    page, layers = (2, 2, 4, 8), 3
    pool = PinnedPool(
        num_layers=layers, num_pages=4, page_shape=page, dtype=np.dtype(np.float32), devices=devices
    )
    sharding = NamedSharding(Mesh(devices, ("t",)), PartitionSpec(None, None, "t"))
    moving = PageMover(pool, sharding)
    values = [np.random.default_rng(n).normal(size=(2, 2, 4, 4, 8)).astype(np.float32) for n in range(layers)]
    copies = (PageCopy(device_page=0, host_page=3), PageCopy(device_page=1, host_page=0))
    moving.swap_out(copies, all_layers(values, sharding))
    monkeypatch.setattr(mover, "_is_ready", lambda array: False)
    assert moving.ended(wait=False) == ((), ()), "some of it is under way"
    monkeypatch.undo()
    assert moving.ended(wait=True) == (copies, ())
    for layer, value in enumerate(values):
        loaded = np.asarray(moving.stage_in(layer, np.array([0, 3]), 2))
        np.testing.assert_array_equal(loaded, value[[1, 0]])
    moving.close()


def test_39_a_large_host_pool_is_made_in_pieces_with_progress():
    seen = []
    pool = PinnedPool(
        num_layers=5,
        num_pages=3,
        page_shape=(2, 2, 32, 16),
        dtype=np.dtype(np.float32),
        devices=jax.devices()[:1],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == [seen[0][0] * n for n in range(1, 6)]
    assert seen[-1][0] == seen[-1][1]
    pool.close()
