"""The mover that lets copies go wrong, and the checksums that find pages whose bytes have changed."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_cache.config import TransferFaults
from host_cache.errors import TransferError
from host_cache.plan import PageCopy
from host_cache.transfer import FaultyMover, PageChecksums, PageMover, PinnedPool
from tests.host_cache.staging import all_layers

NUM_LAYERS, NUM_PAGES = 3, 20
PAGE = (2, 2, 4, 8)
COPIES = [PageCopy(device_page=n, host_page=n) for n in range(NUM_PAGES)]


def parts(dtype=np.float32):
    device = jax.devices()[0]
    pool = PinnedPool(
        num_layers=NUM_LAYERS,
        num_pages=NUM_PAGES,
        page_shape=PAGE,
        dtype=np.dtype(dtype),
        devices=[device],
        check_memory=False,
    )
    sharding = NamedSharding(Mesh([device], ("t",)), PartitionSpec(None, None, "t"))
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(NUM_PAGES, *PAGE)).astype(dtype) for _ in range(NUM_LAYERS)]
    return PageMover(pool, sharding, PageChecksums(pool)), data, sharding


def faulty(**shares):
    mover, data, sharding = parts()
    mover = FaultyMover(mover, TransferFaults(**{"fail": 0, "delay": 0, "reorder": 0, "seed": 3, **shares}))
    return mover, data, all_layers(data, sharding)


def holds(mover, data, page):
    layers = zip(mover.pool.layers, data, strict=True)
    return [np.array_equal(shards[0][page], layer[page]) for shards, layer in layers]


def test_without_faults_nothing_changes():
    mover, data, staged = faulty()
    mover.swap_out(COPIES, staged)
    assert np.isnan(mover.pool.layers[0][0]).all(), "nothing counts before it has ended"
    assert mover.ended(wait=True) == (tuple(COPIES), ())
    assert all(all(holds(mover, data, page)) for page in range(NUM_PAGES))
    assert mover.refused(COPIES) == ()
    np.testing.assert_array_equal(mover.stage_in(1, np.array([4, 2]), padded=2), data[1][[4, 2]])
    assert mover.counters.total == 0
    mover.close()


def test_failed_copies_leave_no_bytes():
    mover, data, staged = faulty(fail=0.5)
    mover.swap_out(COPIES, staged)
    done, failed = mover.ended(wait=True)
    assert sorted([*done, *failed]) == COPIES
    assert mover.counters.failed_stores == len(failed) > 3
    for copy in done:
        assert all(holds(mover, data, copy.host_page))
    for copy in failed:
        assert all(np.isnan(shards[0][copy.host_page]).all() for shards in mover.pool.layers)


def test_late_copies_write_their_bytes_when_they_end():
    mover, data, staged = faulty(delay=0.5)
    mover.swap_out(COPIES, staged)
    jax.block_until_ready(staged)
    seen = []
    for _ in range(100):
        done, failed = mover.ended(wait=False)
        assert not failed
        seen += done
        for copy in COPIES:
            assert any(holds(mover, data, copy.host_page)) == (copy in seen)
    assert sorted(seen) == COPIES and seen != COPIES
    assert mover.counters.late_stores > 3


def test_waiting_ends_late_copies():
    mover, data, staged = faulty(delay=1.0)
    mover.swap_out(COPIES, staged)
    done: tuple = ()
    while not mover.counters.late_stores:
        done, _ = mover.ended(wait=False)
    assert done == ()
    assert sorted(mover.ended(wait=True)[0]) == COPIES
    assert all(all(holds(mover, data, page)) for page in range(NUM_PAGES))


def test_order_changes():
    mover, _, staged = faulty(reorder=1.0)
    mover.swap_out(COPIES, staged)
    done, _ = mover.ended(wait=True)
    assert sorted(done) == COPIES and list(done) != COPIES
    assert mover.counters.reordered == 1


def test_loads_fail_singly_or_break_off_together():
    mover, _, staged = faulty(fail=0.5)
    mover.swap_out(COPIES, staged)
    mover.ended(wait=True)
    refused = mover.refused(COPIES)
    assert 0 < len(refused) < NUM_PAGES
    assert mover.counters.failed_loads > 0
    broken_at = set()
    for _ in range(60):
        layer = 0
        try:
            for layer in range(NUM_LAYERS):
                mover.stage_in(layer, np.array([0]), padded=1)
        except TransferError:
            broken_at.add(layer)
    assert broken_at == set(range(NUM_LAYERS))
    assert 0 < mover.counters.broken_loads < 60


def test_a_seed_fixes_what_happens():
    def run(seed):
        mover, _, staged = faulty(fail=0.3, delay=0.3, reorder=0.5, seed=seed)
        mover.swap_out(COPIES, staged)
        return mover.ended(wait=True), mover.refused(COPIES)

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize(
    ("shares", "text"),
    [({"fail": 1.0}, "fail: got 1.0"), ({"delay": -1}, "delay"), ({"reorder": 2}, "reorder")],
)
def test_bad_share(shares, text):
    with pytest.raises(ValueError, match=text):
        TransferFaults(**shares)


@pytest.mark.parametrize("dtype", [np.float32, jax.numpy.bfloat16])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_checksum_finds_one_changed_bit(dtype, layer):
    mover, data, sharding = parts(dtype)
    mover.swap_out(COPIES[:5], all_layers(data, sharding))
    mover.ended(wait=True)
    assert mover.refused(COPIES[:5]) == ()
    mover.pool.layers[layer][0][3].reshape(-1).view(np.uint8)[-1] ^= 1
    assert mover.refused(COPIES[:5]) == (COPIES[3],)
    counters = mover.checksums.counters
    assert (counters.pages_summed, counters.pages_verified, counters.pages_damaged) == (5, 10, 1)
