"""The device pool is never copied, and is as large as the device's memory allows."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from pensieve_jax.config import TierConfig
from pensieve_jax.core.errors import InvalidArgumentError
from pensieve_jax.engine.build import DEVICE_MEMORY_SHARE, steady, tier_sizes
from pensieve_jax.models.shape import shape_of
from pensieve_jax.parallel import make_mesh
from pensieve_jax.worker import worker
from pensieve_jax.worker.batch import BatchShapes, PreviousSamples, blank
from pensieve_jax.worker.host_pool import host_pool
from pensieve_jax.worker.runner import ModelRunner
from pensieve_jax.worker.worker import MOST_GATHERED, build_worker, workspace_bytes
from tests.tiny import SPEC, TinyModel

SHAPES = BatchShapes(num_pages=2000, page_tokens=32, max_rows=4, max_tokens=32, max_pages=4)
PAGE_BYTES = 2 * SPEC.num_layers * SPEC.num_kv_heads * 32 * SPEC.head_dim * 4


@pytest.fixture(scope="module")
def runner():
    return ModelRunner(TinyModel(), num_pages=0, page_tokens=32, mesh=make_mesh(1))


@pytest.mark.parametrize("decode", [False, True])
def test_no_step_copies_the_pool(runner, decode):
    """The compiler says so. A pool that isn't given away, or is changed out of place, would double it."""
    nothing = PreviousSamples(token_ids=np.zeros(4, np.int32), places={})
    batch = blank(4 if decode else 32, SHAPES, nothing, decode=decode)
    small, large = (runner.memory(batch, num_pages=pages) for pages in (50, 2000))
    assert large.pools_bytes == 2000 * PAGE_BYTES
    assert large.in_place_bytes >= large.pools_bytes
    assert large.workspace_bytes < small.pools_bytes
    assert large.workspace_bytes == small.workspace_bytes, "so it is measured without the pool"


def test_no_step_copies_a_pool_of_8_bit_pages():
    runner = ModelRunner(TinyModel(), num_pages=0, page_tokens=32, mesh=make_mesh(1), kv_dtype="fp8_e4m3")
    nothing = PreviousSamples(token_ids=np.zeros(4, np.int32), places={})
    large = runner.memory(blank(32, SHAPES, nothing, decode=False), num_pages=2000)
    assert large.pools_bytes == 2000 * PAGE_BYTES * 33 // (32 * 4)
    assert large.in_place_bytes >= large.pools_bytes
    assert large.workspace_bytes < large.pools_bytes / 4


@pytest.mark.parametrize(("dtype", "more"), [(np.float16, 64 / 33), (np.float32, 128 / 33)])
def test_the_same_bytes_hold_more_tokens_in_8_bits(dtype, more):
    spec = replace(SPEC, dtype=np.dtype(dtype))
    plain, small = (
        tier_sizes(spec, TierConfig(kv_dtype=kind), Gpu(), 1, workspace_bytes=10**9)
        for kind in (None, "fp8_e4m3")
    )
    assert small.device_pages / plain.device_pages == pytest.approx(more, rel=0.01)
    assert small.host_pages / plain.host_pages == pytest.approx(more, rel=0.05), "memory that is free varies"
    assert small.identity != plain.identity


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_model_shape_knows_the_bytes_of_a_page(kv_dtype, num_shards):
    """Simulator, profile and floors count by it, without jax."""
    model = TinyModel()
    shape = shape_of(model, num_shards, kv_dtype=kv_dtype)
    pool = host_pool(model.spec, num_pages=3, page_tokens=16, mesh=make_mesh(num_shards), kv_dtype=kv_dtype)
    assert sum(layer[0].nbytes for layer in pool.layers) == 3 * shape.kv_page_bytes(16)
    pool.close()


class Gpu:
    """A device of 100 GB, of which 30 are in use."""

    platform = "gpu"

    def __init__(self, more_bytes=0):
        self.more_bytes = more_bytes

    def memory_stats(self):
        return {"bytes_limit": 100 * 10**9, "bytes_in_use": 30 * 10**9 + self.more_bytes}


def test_the_pool_takes_what_weights_and_workspace_leave():
    sizes = tier_sizes(SPEC, TierConfig(host_pages=0), Gpu(), 1, workspace_bytes=10 * 10**9)
    assert sizes.device_pages == steady(int(60e9 * 0.9) // PAGE_BYTES)
    sizes = tier_sizes(SPEC, TierConfig(device_memory_share=0.5), Gpu(), 1, workspace_bytes=10 * 10**9)
    assert sizes.device_pages == steady(int((60e9 - MOST_GATHERED * PAGE_BYTES) * 0.5) // PAGE_BYTES)
    sizes = tier_sizes(SPEC, TierConfig(host_pages=0), Gpu(), 1)
    assert sizes.device_pages == steady(int(70e9 * DEVICE_MEMORY_SHARE) // PAGE_BYTES)


def test_a_little_more_memory_in_use_leaves_the_pool_as_it_is():
    """Else the next start would find none of its programs."""
    tiers = TierConfig(host_pages=0)
    sizes = {tier_sizes(SPEC, tiers, Gpu(more), 1).device_pages for more in range(0, 10**8, 10**7)}
    assert len(sizes) == 1
    assert all(0.98 * pages < steady(pages) <= pages for pages in range(1, 3000))
    assert len({steady(pages) for pages in range(1000, 2000)}) < 130


def test_too_little_memory_is_said():
    asked = r"got 9000000 pages of 147\.\d+ GB, expected at most the 70\.00 GB that are free"
    with pytest.raises(InvalidArgumentError, match=asked):
        tier_sizes(SPEC, TierConfig(device_pages=9_000_000), Gpu(), 1)
    left = r"at most the 0\.00 GB that the pool may take of the 70\.00 GB that are free"
    with pytest.raises(InvalidArgumentError, match=left):
        tier_sizes(SPEC, TierConfig(), Gpu(), 1, workspace_bytes=71 * 10**9)
    with pytest.raises(InvalidArgumentError, match="device_memory_share: got 0"):
        TierConfig(device_memory_share=0)


def test_a_device_that_refuses_the_pool(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory in a test")

    monkeypatch.setattr(worker, "ModelRunner", refuse)
    with pytest.raises(InvalidArgumentError, match="got 2000, but the device refuses the memory: RES"):
        build_worker(
            TinyModel(),
            shapes=SHAPES,
            host_pages=0,
            mesh=make_mesh(1),
            execution="auto",
            check_host_memory=True,
            checksums=False,
            transfer_faults=None,
        )


def test_workspace_of_the_largest_step():
    assert 0 < workspace_bytes(TinyModel(), shapes=SHAPES, mesh=make_mesh(1)) < 10 * 2**20
