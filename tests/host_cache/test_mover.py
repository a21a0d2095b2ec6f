"""Staged pages keep their bytes while the staging buffers are used again for further layers."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from host_cache.plan import PageCopy
from host_cache.transfer import PageMover, PinnedPool

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


def test_swapped_in_pages_are_those_swapped_out():
    device = jax.devices()[0]
    dtype = np.dtype(np.float32)
    pool = PinnedPool(
        num_layers=NUM_LAYERS, num_pages=NUM_PAGES, page_shape=PAGE, dtype=dtype, devices=[device]
    )
    sharding = NamedSharding(Mesh([device], ("t",)), PartitionSpec(None, None, "t"))
    mover = AlignedMover(pool, sharding)
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(4, *PAGE)).astype(dtype) for _ in range(NUM_LAYERS)]
    copies = [PageCopy(device_page=i, host_page=page) for i, page in enumerate((5, 0, 3))]
    mover.swap_out(copies, [jax.device_put(layer, sharding) for layer in layers])
    assert mover.ended(wait=True) == (tuple(copies), ())

    staged = [mover.stage_in(layer, np.array([3, 5]), padded=2) for layer in range(NUM_LAYERS)]

    for layer, pages in zip(layers, staged, strict=True):
        np.testing.assert_array_equal(np.asarray(pages), layer[[2, 0]])
    mover.close()
