"""Copies that run ahead of the layers: in order, a few at a time, by a thread or by the caller."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from host_cache.errors import TransferError
from pensieve_jax.worker.arrivals import LOOK_AHEAD, Arrivals


@pytest.fixture(params=["caller", "thread"])
def thread(request):
    if request.param == "caller":
        yield None
        return
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_layers_come_in_order_and_few_are_under_way(thread):
    issued = []

    def stage_in(layer):
        issued.append(layer)
        return np.array(layer)

    with Arrivals(stage_in, 6, thread) as arrivals:
        for layer in range(6):
            assert arrivals.take() == layer
            assert len(issued) <= min(layer + LOOK_AHEAD + 1, 6)
    assert issued == list(range(6))
    assert arrivals.wait_s >= 0


def test_a_failure_is_told_when_its_layer_is_taken(thread):
    def stage_in(layer):
        if layer == 1:
            raise TransferError("layer 1")
        return np.array(layer)

    with Arrivals(stage_in, 4, thread) as arrivals:
        assert arrivals.take() == 0
        with pytest.raises(TransferError, match="layer 1"):
            arrivals.take()


def test_nothing_is_issued_after_the_end():
    issuing = threading.Event()
    go_on = threading.Event()

    def stage_in(layer):
        if layer == 1:
            issuing.set()
            go_on.wait()
        return np.array(layer)

    with ThreadPoolExecutor(1) as executor:
        with Arrivals(stage_in, 2, executor) as arrivals:
            arrivals.take()
            issuing.wait()
            threading.Timer(0.05, go_on.set).start()  # left before the second layer is taken
        assert go_on.is_set()
