"""Pages that the device itself reads from host memory: cached equals cold. A callback is the kernel here."""

import ctypes
import random

import jax
import numpy as np
import pytest

from pensieve_jax.worker import step_functions, worker
from tests.engine.serving import tiny_model
from tests.engine.test_cached_equals_cold import Driver


def read_by_address(kv_pages, addresses, layer, pages, host_pages, *, num_host_pages):
    """As `read_pages`."""
    page = kv_pages.shape[1:]

    def read(addresses, host_pages):
        address = int(np.asarray(addresses).view("<u8")[layer])
        num_bytes = num_host_pages * int(np.prod(page)) * kv_pages.dtype.itemsize
        memory = np.frombuffer((ctypes.c_char * num_bytes).from_address(address), kv_pages.dtype)
        return memory.reshape(num_host_pages, *page)[np.asarray(host_pages)]

    shape = jax.ShapeDtypeStruct((len(host_pages), *page), kv_pages.dtype)
    staged = jax.pure_callback(read, shape, addresses, host_pages)
    return kv_pages.at[pages].set(staged, mode="drop")


@pytest.mark.parametrize("sizes", [(32, 512), (1, 3)])
def test_cached_equals_cold(sizes, monkeypatch):
    monkeypatch.setattr(step_functions, "read_pages", read_by_address)
    monkeypatch.setattr(worker, "kernels_read_pinned", lambda device: True)
    monkeypatch.setattr(worker, "runs_here", lambda implementation: True)
    monkeypatch.setattr(worker, "READ_SIZES", sizes)
    driver = Driver(tiny_model(), "tight-host", execution="resident", run_ahead=True)
    driver.play(random.Random(5), 150)
    assert driver.engine.counters.chunks_swapped_in > 0
    assert driver.engine._turns.parts.worker.pages_read == driver.engine.counters.chunks_swapped_in
    driver.engine.close()
