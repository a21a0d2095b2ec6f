"""Copies to the device that run ahead of the layers that need them."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

import jax

LOOK_AHEAD = 2
"""Layers whose copies are issued ahead of a layer's compute: a transfer that is enqueued behind compute waits
for all of it."""


class Arrivals:
    """The staged pages of each layer in turn, those of the next layers under way meanwhile.

    A copy may hold whoever issues it until it is done, so a thread issues them where there is one: then the
    caller can hand over the compute of one layer while the next one's pages come.
    """

    def __init__(
        self, stage_in: Callable[[int], jax.Array], num_layers: int, thread: Executor | None
    ) -> None:
        """Args:
        stage_in: starts a layer's copies; called for each layer in order.
        num_layers: how many there are.
        thread: issues the copies, one after the other; None: the caller itself.
        """
        self._stage_in = stage_in
        self._num_layers = num_layers
        self._thread = thread
        self._under_way: deque[Future[jax.Array]] = deque()
        self._issued = 0
        self.wait_s = 0.0
        """Seconds that the caller has spent here."""

    def __enter__(self) -> "Arrivals":
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait until no copy is being issued any more."""
        wait(self._under_way)

    def take(self) -> jax.Array:
        """The next layer's pages, [n, *page], still being copied perhaps.

        Raises:
            TransferError: they can't be copied.
        """
        begin = time.perf_counter()
        layer = self._issued - len(self._under_way)
        while self._issued < min(layer + LOOK_AHEAD + 1, self._num_layers):
            self._under_way.append(self._issue(self._issued))
            self._issued += 1
        try:
            return self._under_way.popleft().result()
        finally:
            self.wait_s += time.perf_counter() - begin

    def _issue(self, layer: int) -> Future[jax.Array]:
        if self._thread is not None:
            return self._thread.submit(self._stage_in, layer)
        future: Future[jax.Array] = Future()
        try:
            future.set_result(self._stage_in(layer))
        except Exception as error:  # noqa: BLE001 (told when the layer is taken)
            future.set_exception(error)
        return future
