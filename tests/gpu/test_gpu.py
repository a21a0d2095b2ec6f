"""On a real GPU: the text of a real model, cached equals cold, and swaps through pinned memory.

Run with `pytest -m gpu`. On a CPU the same tests run, but for those that are about the GPU itself.
"""

import random

import jax
import numpy as np
import pytest

from host_cache.transfer import PinnedPool, register_pinned
from pensieve_jax.core.types import SamplingParams
from pensieve_jax.engine.warmup import warm_up
from pensieve_jax.parallel import make_mesh
from pensieve_jax.worker import worker as worker_module
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, blank
from pensieve_jax.worker.runner import ModelRunner
from tests.engine.serving import Chat, ids, small_engine
from tests.engine.smollm2 import assert_second_turns, assert_together, golden, greedy, smollm2_engine
from tests.engine.test_cached_equals_cold import Driver
from tests.tiny import TinyModel

pytestmark = pytest.mark.gpu

ON_GPU = jax.default_backend() == "gpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="about the GPU itself")


@pytest.fixture(scope="module")
def model():
    return TinyModel()


# -- SmolLM2 -------------------------------------------------------------------------------------


def test_text_of_smollm2():
    """In float32, with products in float32, so the tokens are those of the reference."""
    with smollm2_engine(execution="layered") as engine:
        assert_together(engine)


def test_text_of_smollm2_in_one_call_a_step():
    """One conversation: every shape of the whole model takes seconds to compile."""
    with smollm2_engine(execution="resident") as engine:
        case = golden()[3]
        result = engine.conversation().send(case["prompt_ids"], greedy())
        assert list(result.token_ids) == case["output_ids"]


def test_text_of_smollm2_after_a_stay_in_pinned_memory():
    assert_second_turns("layered")


# -- cached equals cold --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execution", "run_ahead", "copied"),
    [("resident", True, False), ("resident", True, True), ("layered", False, True)],
)
def test_cached_equals_cold(model, execution, run_ahead, copied, monkeypatch):
    if copied:
        monkeypatch.setattr(worker_module, "kernels_read_pinned", lambda device: False)
    driver = Driver(model, "tight-host", execution=execution, run_ahead=run_ahead)
    driver.play(random.Random(7), 250)
    counters = driver.engine.counters
    for name in (
        "tokens_from_device",
        "tokens_from_host",
        "gaps",
        "long_gaps",
        "chunks_swapped_in",
        "chunks_swapped_out",
        "chunks_dropped",
        "pages_reclaimed",
    ):
        assert getattr(counters, name) > 0, name
    assert (counters.failed_swap_ins, counters.failed_swap_outs) == (0, 0)
    assert driver.engine.num_suspensions > 0
    driver.engine.close()


def test_resident_and_layered_give_the_same_tokens(model):
    """Also where a swap-in makes a step of the resident engine run layer by layer."""
    outputs = []
    for execution in ("resident", "layered"):
        with small_engine(model=model, device_pages=12, host_pages=40, execution=execution) as engine:
            conversations = [engine.conversation() for _ in range(6)]
            answers = []
            for turn in range(3):
                given = [ids(30 + 5 * n, seed=10 * turn + n) for n in range(6)]
                turns = [
                    engine.submit(c.id, g, SamplingParams(max_tokens=12))
                    for c, g in zip(conversations, given, strict=True)
                ]
                answers += [turn.result().token_ids for turn in turns]
            assert engine.counters.tokens_from_host > 0
            outputs.append(answers)
    assert outputs[0] == outputs[1]


def test_nothing_compiles_while_serving(model):
    """With the platform's own way of running: one call a step, a step ahead, copies by threads."""
    with small_engine(model=model, device_pages=12, host_pages=40, paranoid=False) as engine:
        warm_up(engine, SamplingParams())
        conversations = [engine.conversation() for _ in range(6)]
        for turn in range(3):
            given = [ids(10 + 17 * n, seed=10 * turn + n) for n in range(6)]
            turns = [
                engine.submit(c.id, g, SamplingParams(max_tokens=12))
                for c, g in zip(conversations, given, strict=True)
            ]
            assert all(len(turn.result().token_ids) == 12 for turn in turns)
        assert engine.counters.tokens_from_host > 0
        assert engine.num_compilations == 0


def test_no_step_copies_the_pool(model):
    nothing = PreviousSamples(token_ids=np.zeros(4, np.int32), places={})
    shapes = BatchShapes(num_pages=2000, page_tokens=32, max_rows=4, max_tokens=64, max_pages=4)
    runner = ModelRunner(model, num_pages=0, page_tokens=32, mesh=make_mesh(1))
    account = runner.memory(blank(64, shapes, nothing, decode=False), num_pages=2000)
    assert account.in_place_bytes >= account.pools_bytes > 10 * account.workspace_bytes


# -- pinned memory -------------------------------------------------------------------------------


def pages(seed, count=8):
    return np.random.default_rng(seed).standard_normal((count, 2, 2, 32, 16), np.float32)


def is_pinned(array):
    """Registering memory twice is refused, so a refusal shows that it is registered."""
    try:
        jax.devices()[0].client.dma_map(array.ctypes.data, array.nbytes)
    except jax.errors.JaxRuntimeError:
        return True
    jax.devices()[0].client.dma_unmap(array.ctypes.data)
    return False


@needs_gpu
def test_host_tier_is_pinned_memory(model):
    """The whole tier is registered while the engine lives, and not after it."""
    engine = small_engine(model=model, host_pages=64)
    mover = engine._turns.parts.worker._mover
    arrays = [array for shards in mover.pool.layers for array in shards]
    assert len(arrays) == model.spec.num_layers
    assert all(array.shape == (64, 2, 2, 32, 16) for array in arrays)
    assert all(map(is_pinned, arrays))
    assert {memory.kind for memory in jax.devices()[0].addressable_memories()} >= {"device", "pinned_host"}
    assert mover._host.memory_kind == "pinned_host"
    engine.close()
    assert not any(map(is_pinned, arrays))


@needs_gpu
def test_memory_can_be_registered(model):
    array = pages(0)
    assert not is_pinned(array)
    assert register_pinned(array, jax.devices()[0])
    assert is_pinned(array)
    jax.devices()[0].client.dma_unmap(array.ctypes.data)
    assert not is_pinned(array)


@needs_gpu
def test_default_sizes_come_from_the_machine(model):
    """Without sizes, the device tier takes most of the free device memory. That is a pool of more than 2**31
    elements, whose last pages are used first here (fault 33)."""
    stats = jax.devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    with small_engine(model=model, device_pages=None, host_pages=16, paranoid=False) as engine:
        device_pages = engine.cache_config.device_pages
        assert 0.5 * free < device_pages * 2 * 2 * 2 * 32 * 16 * 4 < 0.9 * free
        engine._turns.cache._ledger._device._free.reverse()
        chat = Chat(engine, model=model)
        chat.turn(ids(100))
        chat.turn(ids(40, seed=1))
        assert device_pages * 2 * 2 * 32 * 16 > 2**31


@pytest.mark.parametrize("copied", [False, True])
def test_bytes_survive_the_way_through_the_host(model, copied, monkeypatch):
    """A page that goes to the host and comes back is bit for bit what it was: copied, or read by a kernel."""
    if copied:
        monkeypatch.setattr(worker_module, "kernels_read_pinned", lambda device: False)
    with small_engine(model=model, device_pages=12, host_pages=40) as engine:
        worker = engine._turns.parts.worker
        runner, mover = worker._runner, worker._mover
        conversation = engine.conversation()
        conversation.send(ids(200), SamplingParams(max_tokens=1))
        before = np.asarray(runner.gather(np.arange(12, dtype=np.int32)))
        turn = engine.submit(engine.conversation().id, ids(384, seed=1), SamplingParams(max_tokens=1))
        turn.result()
        engine.settle()
        for layer, original in enumerate(before):
            kept = {page.tobytes() for page in mover.pool.layers[layer][0]}
            written = [page for page in original if np.isfinite(page).all() and page.any()]
            full = [page for page in written if page[:, :, -1].any()]
            assert len(full) >= 6
            assert all(page.tobytes() in kept for page in full), f"layer {layer}"
        result = conversation.send([5], SamplingParams(max_tokens=1))
        assert result.receipt.tokens_from_host == 200
        assert worker.pages_read == (0 if copied or not ON_GPU else 7)
        after = np.asarray(runner.gather(np.arange(12, dtype=np.int32)))
        for original, loaded in zip(before, after, strict=True):
            present = {page.tobytes() for page in loaded}
            full = [page for page in original if np.isfinite(page).all() and page[:, :, -1].any()]
            assert all(page.tobytes() in present for page in full)


def test_pool_of_pages_takes_what_it_was_asked_for():
    pool = PinnedPool(
        num_layers=2,
        num_pages=5,
        page_shape=(2, 2, 32, 16),
        dtype=np.dtype(np.float32),
        devices=[jax.devices()[0]],
    )
    assert [[array.shape for array in shards] for shards in pool.layers] == [[(5, 2, 2, 32, 16)]] * 2
    pool.close()
