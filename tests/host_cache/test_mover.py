"""Staged pages keep their bytes while the staging buffers are used again for further layers."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_cache.plan import PageCopy
from host_cache.transfer import PageMover, PinnedPool
from host_cache.transfer.mover import MOST_STORES
from tests.host_cache.staging import all_layers

NUM_LAYERS, NUM_PAGES = 12, 6
PAGE = (2, 2, 32, 16)


class AlignedMover(PageMover):
    """Its staging buffers begin at a multiple of 64 bytes: such memory a CPU array shares with NumPy."""

    def _slot(self, pages):
        buffers, last = super()._slot(pages)
        return ([_aligned_like(buffer) for buffer in buffers] if last is None else buffers), last


def _aligned_like(array):
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("copy_threads", [0, 3])
@pytest.mark.parametrize("pages", [[3, 5], [0, 3, 5], [0], []])
def test_swapped_in_pages_are_those_swapped_out(copy_threads, pages):
    device = jax.devices()[0]
    dtype = np.dtype(np.float32)
    pool = PinnedPool(
        num_layers=NUM_LAYERS, num_pages=NUM_PAGES, page_shape=PAGE, dtype=dtype, devices=[device]
    )
    sharding = NamedSharding(Mesh([device], ("t",)), PartitionSpec(None, None, "t"))
    mover = AlignedMover(pool, sharding, copy_threads=copy_threads)
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(4, *PAGE)).astype(dtype) for _ in range(NUM_LAYERS)]
    copies = [PageCopy(device_page=i, host_page=page) for i, page in enumerate((5, 0, 3))]
    mover.swap_out(copies, all_layers(layers, sharding))
    assert mover.ended(wait=True) == (tuple(copies), ())

    padded = len(pages) + 1
    staged = [mover.stage_in(layer, np.array(pages, np.int64), padded) for layer in range(NUM_LAYERS)]

    came_from = {5: 0, 0: 1, 3: 2}
    for layer, array in zip(layers, staged, strict=True):
        assert array.shape == (padded, *PAGE)
        expected = layer[[came_from[page] for page in pages]]
        np.testing.assert_array_equal(np.asarray(array)[: len(pages)], expected)
    mover.close()


def test_a_run_of_pages_is_copied_from_the_pool_itself(monkeypatch):
    mover, layers, _ = filled_mover()
    monkeypatch.setattr(mover, "_on_cpu", False)
    monkeypatch.setattr(mover, "_collect", None)  # what copies to a staging buffer
    run = mover.stage_in(1, np.array([2, 3], np.int64), padded=3)
    np.testing.assert_array_equal(np.asarray(run), layers[1][2:5])
    with pytest.raises(TypeError, match="not callable"):
        mover.stage_in(1, np.array([2, 4], np.int64), padded=2)
    with pytest.raises(TypeError, match="not callable"):  # padding would reach past the pool's end
        mover.stage_in(1, np.array([4, 5], np.int64), padded=3)


@pytest.mark.parametrize("copy_threads", [0, 2])
def test_many_copies_to_the_host_end_in_order(copy_threads):
    count = 3 * MOST_STORES
    mover, _, sharding = filled_mover(2 * count, copy_threads=copy_threads)
    rng = np.random.default_rng(1)
    rounds = [rng.normal(size=(2, *PAGE)).astype(np.float32) for _ in range(count)]
    copies = [tuple(PageCopy(device_page=i, host_page=2 * n + i) for i in range(2)) for n in range(count)]
    for copy, pages in zip(copies, rounds, strict=True):
        mover.swap_out(copy, all_layers([pages] * NUM_LAYERS, sharding))
    assert mover.ended(wait=True) == (tuple(one for copy in copies for one in copy), ())
    for shards in mover.pool.layers:
        np.testing.assert_array_equal(shards[0], np.concatenate(rounds))
    assert mover.ended(wait=True) == ((), ())
    mover.close()


def test_a_copy_that_fails_in_a_thread_is_told(monkeypatch):
    mover, _, sharding = filled_mover(copy_threads=1)
    monkeypatch.setattr(mover, "_store", lambda swap_out: 1 / 0)
    copy = PageCopy(device_page=0, host_page=0)
    mover.swap_out([copy], all_layers([np.zeros((1, *PAGE), np.float32)] * NUM_LAYERS, sharding))
    assert mover.ended(wait=True) == ((), (copy,))


def filled_mover(num_pages=NUM_PAGES, **options):
    """A mover over a pool of random pages, those pages per layer, and the sharding of staged ones."""
    device, dtype = jax.devices()[0], np.dtype(np.float32)
    pool = PinnedPool(
        num_layers=NUM_LAYERS, num_pages=num_pages, page_shape=PAGE, dtype=dtype, devices=[device]
    )
    rng = np.random.default_rng(0)
    for shards in pool.layers:
        shards[0][...] = rng.normal(size=shards[0].shape)
    sharding = NamedSharding(Mesh([device], ("t",)), PartitionSpec(None, None, "t"))
    return PageMover(pool, sharding, **options), [shards[0].copy() for shards in pool.layers], sharding
